"""Low-rank adapters (LoRA) of a checkpoint: merge them into the weights, or write them for peft.

A checkpoint has the weights under their usual names and the adapters beside them, as in
``h.0.attn.c_attn.weight`` and ``h.0.attn.c_attn.lora_A.default.weight``. peft's settings are stored
with the model's config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ...errors import CheckpointError
from ...fsdp.model_state import is_conv1d
from ..index_schema import MODEL
from ..reader import CheckpointReader
from ..shards import TensorShard
from ..state import strip_wrappers

KEY = "adapters"
"""Key of peft's settings in the description of a checkpoint."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.default\.weight")


def is_adapter(name: str) -> bool:
    """Return True if ``name`` is that of an adapter's matrix."""
    return _ADAPTER.fullmatch(name) is not None


def is_transposed(model: nn.Module, name: str) -> bool:
    """Return True if the weight ``name`` is (inputs, outputs), as in transformers' Conv1D."""
    return is_conv1d(model.get_submodule(name.rpartition(".")[0]))


def adapter_settings(model: nn.Module) -> dict[str, Any] | None:
    """Return peft's settings of the adapters in ``model`` as JSON, or None without adapters."""
    settings = getattr(model, "peft_config", {}).get("default")
    if settings is None:
        return None
    found = json.loads(json.dumps(settings.to_dict(), default=sorted))  # sets become lists
    names = (name.partition(".lora_A.") for name, _ in model.named_parameters())
    layers = sorted(strip_wrappers(layer) for layer, part, _ in names if part)
    return found | {"target_modules": layers, "inference_mode": True}


class MergedWeights:
    """Weights of a checkpoint with its adapters added, if it has any."""

    def __init__(self, source: CheckpointReader):
        self.source = source
        self.settings: Mapping[str, Any] | None = source.index.values.get("about", {}).get(KEY)
        names = [name.removeprefix(f"{MODEL}/") for name in source.index.tensors]
        self.layers: set[str] = {
            match["layer"] for match in map(_ADAPTER.fullmatch, names) if match
        }
        if self.layers and self.settings is None:
            raise CheckpointError(
                "the checkpoint has adapters and no settings of them: save it with nearlinear train"
            )

    def read(self, name: str, block: TensorShard, transposed: bool = False) -> torch.Tensor:
        """Return a block of the parameter ``name``.

        Args:
            name: Name of the parameter without adapters.
            block: Block of the whole parameter.
            transposed: True if the weight is (inputs, outputs), as in Conv1D.
        """
        values = self.source.shard(f"{MODEL}/{name}", block)
        layer = name.removesuffix(".weight")
        if self.settings is None or layer not in self.layers or name == layer:
            return values
        down, up = (self._whole(f"{layer}.lora_{part}.default.weight") for part in "AB")
        change = self.settings["lora_alpha"] / self.settings["r"] * (up.double() @ down.double())
        change = change.T if transposed else change
        return (
            values.double() + change[block.slices_in(TensorShard.full(tuple(change.shape)))]
        ).to(values.dtype)

    def write(self, path: Path) -> None:
        """Write the adapters alone to the folder ``path``, for ``PeftModel.from_pretrained``."""
        if self.settings is None:
            raise CheckpointError(
                "the checkpoint has no adapters (lora.rank = 0): leave out --adapter"
            )
        tensors = {
            f"base_model.model.{layer}.lora_{part}.weight": self._whole(
                f"{layer}.lora_{part}.default.weight"
            )
            for layer in sorted(self.layers)
            for part in "AB"
        }
        save_file(tensors, path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(dict(self.settings), indent=2)
        (path / ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")

    def _whole(self, name: str) -> torch.Tensor:
        full = f"{MODEL}/{name}"
        return self.source.shard(full, TensorShard.full(self.source.index.tensors[full].shape))

"""Low-rank adapters (LoRA): insert peft's layers into a model before it is sharded.

Source: Hu et al. 2021. The weights of the model are frozen; an adapter adds alpha / rank times the
product of two small matrices to a linear layer. The adapters start with the values that peft gives
them, which do not depend on the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config.train import LoraConfig
from ..errors import ConfigError
from ..fsdp.deferred_init import deferred_init
from ..fsdp.model_state import is_conv1d

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def import_peft() -> Any:
    """Import peft. Raises ConfigError if it is missing."""
    try:
        import peft  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise ConfigError(
            f'lora.rank: adapters require peft ({error}): pip install "nearlinear[lora]"'
        ) from None
    return peft


def add_adapters(model: PreTrainedModel, config: LoraConfig, base: str) -> None:
    """Insert the adapters of ``config`` into ``model``, on the meta device, and freeze the rest.

    Args:
        model: The model, before it is sharded.
        config: The table [lora].
        base: Name or folder of the trained model, for peft.

    Raises ConfigError if ``lora.targets`` are not linear layers of the model's blocks.
    """
    peft = import_peft()
    from peft.tuners.lora import Linear  # pyright: ignore[reportMissingImports] - optional

    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        fan_in_fan_out=any(map(is_conv1d, model.modules())),
        target_modules=list(config.targets) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    outputs = model.get_output_embeddings()
    try:
        with deferred_init(as_without=False):
            peft.inject_adapter_in_model(settings, model)
    except ValueError as error:  # no module has such a name, or a module is of another type
        raise _unusable(config, " ".join(str(error).split())) from None
    adapted = {name: each for name, each in model.named_modules() if hasattr(each, "lora_A")}
    others = [name for name, each in adapted.items() if not isinstance(each, Linear)]
    if others:
        raise _unusable(config, f"{others[0]} is not a linear layer")
    if model.get_output_embeddings() is not outputs:
        raise _unusable(config, "the output layer may share its weights with the embeddings")


def _unusable(config: LoraConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"lora.targets = {list(config.targets)}: {reason}; name linear layers of the blocks, as in "
        '["q_proj", "v_proj"], or remove the key for all of them'
    )

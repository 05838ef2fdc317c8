"""From a preset or a folder's config.json to a Hugging Face model, without values.

`nearlinear.shard` gives them, or `nearlinear.import_hf`.
"""

from collections.abc import Callable
from pathlib import Path

from torch import nn

from ..checkpoint.hf import skeleton
from ..data.format import Manifest
from ..errors import ConfigError, DataError
from ..parallel.delayed_init import delayed_init
from .config import TrainConfig
from .presets import context_key
from .tables import ModelConfig


def build_model(config: ModelConfig, vocabulary: int) -> nn.Module:
    """The causal language model ``config`` names, with ``vocabulary`` ids, on the meta device."""
    found = config.architecture
    arguments = {
        "vocab_size": vocabulary,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
        **found["shape"],
        context_key(found["family"]): config.longest_sequence,
        "use_cache": False,
        **config.overrides,
    }
    transformers = skeleton.library()
    if found["family"] not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.init_from = {config.init_from}: this version of transformers has no "
            f"{found['family']} models; pip install -U transformers"
        )
    family = transformers.CONFIG_MAPPING[found["family"]]
    if asked := {"attn_implementation", "_attn_implementation"} & set(config.overrides):
        raise ConfigError(
            f"model.overrides.{min(asked)}: the trainer's models attend by sdpa, which takes a "
            "flash kernel where there is one and hides documents from each other (transformers' "
            "flash_attention_2 does so for one sequence at a time alone); drop it"
        )
    unknown = sorted(set(config.overrides) - set(family().to_dict()))
    if unknown:
        raise ConfigError(f"model.overrides.{unknown[0]}: {family.__name__} has no such key")
    try:
        # billions of numbers take minutes
        with delayed_init(as_without=False, values=not config.init_from):
            model = transformers.AutoModelForCausalLM.from_config(
                family(**arguments), attn_implementation="sdpa"
            )
    except Exception as error:  # whatever a model's own code says of numbers that cannot be
        reason = " ".join(str(error).split())
        raise ConfigError(f"the model cannot be built: {reason}") from error
    model.loss_type = "ForCausalLM"  # the one it falls back to, without its warning
    return model


def describe(config: TrainConfig, rows: Callable[[str], int]) -> tuple[dict, Path | None]:
    """The config.json of the model that ``config`` trains, and its tokenizer's folder or None.

    The vocabulary is that of the token shards; where they are not, ``rows(name)`` says how many
    rows the embedding has.
    """
    folder = Path(config.data.folder)
    try:
        vocabulary = Manifest.read(folder).vocab_size if config.data.folder else 0
    except DataError:
        vocabulary = 0
    if not vocabulary:
        model = build_model(config.model, 1)
        words = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is words)
        vocabulary = rows(f"{name}.weight")
    tokenizer = folder / "tokenizer"
    has = bool(config.data.folder) and (tokenizer / "tokenizer.json").is_file()
    return skeleton.describe(build_model(config.model, vocabulary)), tokenizer if has else None

"""From a preset to a Hugging Face model, without values: `nearlinear.shard` gives them."""

from torch import nn

from ..errors import ConfigError, NearlinearError
from ..parallel.delayed_init import delayed_init
from ..spmd import one_at_a_time
from .config import ModelConfig
from .presets import CONFIG, CONTEXT_KEY, preset


def build_model(config: ModelConfig, vocabulary: int) -> nn.Module:
    """The causal language model ``config`` names, with ``vocabulary`` ids, on the meta device."""
    shape = preset(config.preset)
    arguments = {
        "vocab_size": vocabulary,
        CONTEXT_KEY[config.family]: config.longest_sequence,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
        "use_cache": False,
        **shape["shape"],
        **config.overrides,
    }
    try:
        with one_at_a_time():  # its lazy imports are not safe among ranks that are threads
            import transformers
            from transformers import AutoModelForCausalLM

            family = getattr(transformers, CONFIG[config.family])
    except ModuleNotFoundError as error:
        raise NearlinearError(f'{error.name} is missing: pip install "nearlinear[data]"') from None
    unknown = sorted(set(config.overrides) - set(family().to_dict()))
    if unknown:
        raise ConfigError(f"model.overrides.{unknown[0]}: {family.__name__} has no such key")
    try:
        with delayed_init(as_without=False):  # billions of numbers take minutes
            model = AutoModelForCausalLM.from_config(
                family(**arguments), attn_implementation="sdpa"
            )
    except Exception as error:  # whatever a model's own code says of numbers that cannot be
        reason = " ".join(str(error).split())
        raise ConfigError(f"the model cannot be built: {reason}") from error
    model.loss_type = "ForCausalLM"  # the one it falls back to, without its warning
    return model

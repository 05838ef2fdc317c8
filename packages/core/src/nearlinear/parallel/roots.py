"""The modules of a model that FSDP2 takes for whole models: itself, or a pipeline's stages here."""

from torch import nn


def roots_of(model: nn.Module) -> list[nn.Module]:
    """What of ``model`` is sharded, gathered and reduced by itself, blocks included."""
    engine = getattr(model, "_nearlinear_pipeline", None)
    return [model] if engine is None else list(engine.stages.values())

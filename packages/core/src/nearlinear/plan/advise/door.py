"""``nl.advise``: plan a config, and walk the checklist from there on."""

from pathlib import Path

from ...train.config import TrainConfig
from .. import answer
from ..hardware import Cluster
from .trial import Trial
from .walk import Advice, walk


def advise(
    config: TrainConfig | dict | str | Path | None,
    cluster: Cluster | str = "",
    *,
    tokens: float = 0.0,
    vocabulary: int = 0,
    straggler: float | None = None,
    usd_per_hour: float | None = None,
    settings: tuple[str, ...] = (),
) -> Advice:
    """What to change in ``config`` on ``cluster``, item after item of the checklist.

    Arguments are those of `answer.plan`. ``print`` has it in words, ``.config`` is the config as
    advised, ``.decisions`` what was found of each item. Raises ConfigError as the planner does.

        found = nl.advise("run.toml", "p4d.24xlarge:32")
        print(found)
        found.after.tokens_per_second_per_gpu / found.before.tokens_per_second_per_gpu
    """
    said = {"tokens": tokens, "straggler": straggler, "usd_per_hour": usd_per_hour}
    before = answer.plan(config, cluster, vocabulary=vocabulary, settings=settings, **said)
    return walk(Trial.of(before, **said), before)

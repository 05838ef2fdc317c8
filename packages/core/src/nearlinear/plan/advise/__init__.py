"""The ordered checklist of SMP's best practices, on a user's model and cluster, with numbers.

Source: AWS, "SageMaker Distributed Model Parallel Best Practices" (large instances, sharding,
activation checkpointing, tensor parallelism, pipelines across nodes, offloading; the batch first
where memory ends), and the rule of one node more for every three billion parameters ("Train
gigantic models with near-linear scaling", 2022). `items` is the list, `trial` has the planner say
what a choice comes to, `walk` decides item after item, `report` puts it in words, `door` is
``nl.advise``.
"""

from .door import advise
from .items import rule
from .report import as_dict, settings, text, why_text
from .trial import Trial
from .walk import Advice, Decision, why

__all__ = [
    "Advice",
    "Decision",
    "Trial",
    "advise",
    "as_dict",
    "rule",
    "settings",
    "text",
    "why",
    "why_text",
]

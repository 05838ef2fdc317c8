"""The families of `parity` in other sizes, tied and untied."""

import torch
import transformers

from . import parity

VOCABULARY, WIDTH = parity.VOCABULARY, 32


def config_of(family: str, layers: int = 4) -> transformers.PretrainedConfig:
    """``family``, or with ``-tied`` or ``-untied`` behind it what its head shall be."""
    name, _, head = family.partition("-")
    kind, arguments = parity.FAMILIES[name]
    more = {"tie_word_embeddings": head == "tied"} if head else {}
    return getattr(transformers, kind)(**arguments | parity.layers(name, layers) | more)


def build(family: str, layers: int = 4) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config_of(family, layers))


def batch(step: int, rows: int, sequence: int = 16) -> dict:
    """``rows`` sequences of step ``step``, each with another number of targets."""
    return parity.rows(step, rows, sequence)

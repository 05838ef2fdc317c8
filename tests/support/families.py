"""Model families of `parity` with other numbers of layers, tied and untied."""

import torch
import transformers

from tests.support import parity

VOCABULARY, WIDTH = parity.VOCABULARY, 32


def config_of(family: str, layers: int = 4) -> transformers.PretrainedConfig:
    """Return the config of a family; the suffix ``-tied`` or ``-untied`` selects the head."""
    name, _, head = family.partition("-")
    kind, arguments = parity.FAMILIES[name]
    more = {"tie_word_embeddings": head == "tied"} if head else {}
    return getattr(transformers, kind)(**arguments | parity.layers(name, layers) | more)


def build(family: str, layers: int = 4) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config_of(family, layers))


def batch(step: int, rows: int, sequence: int = 16) -> dict:
    """Return ``rows`` sequences of a step, with different numbers of targets."""
    return parity.rows(step, rows, sequence)

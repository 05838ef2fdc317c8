"""Translation of state dicts between Hugging Face and SMP v1."""

from . import gpt2 as gpt2

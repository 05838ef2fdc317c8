"""Modules that every rank imports lazily, imported once in the fork server."""

import torch.distributed.fsdp  # noqa: F401
import transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel  # noqa: F401

transformers.logging.set_verbosity_error()

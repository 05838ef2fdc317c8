"""What every rank imports late, imported once for all of them."""

import torch.distributed.fsdp  # noqa: F401
import transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel  # noqa: F401

transformers.logging.set_verbosity_error()

"""Translation of GPT-2's state dicts. A distributed GPT-2 has Hugging Face's names itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def translate_state_dict_to_hf_gpt2(
    state_dict: Mapping[str, torch.Tensor], max_seq_len: int | None = None
) -> dict[str, torch.Tensor]:
    """Return ``state_dict`` of a distributed GPT-2 for ``transformers.GPT2LMHeadModel``.

    Args:
        state_dict: Result of ``DistributedModel.state_dict``.
        max_seq_len: Number of positions to keep; default: all.
    """
    result = dict(state_dict)
    positions = next((name for name in result if name.endswith("wpe.weight")), None)
    if max_seq_len is not None and positions is not None:
        result[positions] = result[positions][:max_seq_len]
    return result


def translate_hf_state_dict_to_smdistributed_gpt2(
    state_dict: Mapping[str, torch.Tensor], max_seq_len: int | None = None
) -> dict[str, torch.Tensor]:
    """Return ``state_dict`` of ``transformers.GPT2LMHeadModel`` for a distributed GPT-2.

    Masks that old releases of transformers save as buffers are left out.
    """
    masks = (".attn.bias", ".attn.masked_bias")
    plain = {name: each for name, each in state_dict.items() if not name.endswith(masks)}
    return translate_state_dict_to_hf_gpt2(plain, max_seq_len)


translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2

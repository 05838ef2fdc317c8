"""Codecs that compress parameters for the all-gather: config key ``gather_dtype``.

Master weights keep their dtype. A block computes with values that were rounded for transport,
this rank's own shard included, so that all ranks compute with equal numbers. bfloat16 halves the
bytes of float32 and keeps 8 bits of mantissa. fp8 (e4m3, 3 bits) quarters them, plus 1.6 % for a
float32 scale per `BLOCK` elements. Gradients are reduced in full precision. ZeRO++ (Wang et al.
2023) calls this quantized weight communication (qwZ).

A codec of your own needs one class and one registration::

    class Fp16Codec:
        dtype = torch.float16

        def packed_length(self, elements):
            return elements

        def pack(self, values):
            return values.to(torch.float16)

        def unpack(self, output, packed):
            output.copy_(packed)

    register_all_gather_codec("fp16", Fp16Codec())
    nl.init({"gather_dtype": "fp16"})
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..config.parallel import allow_value

BLOCK = 256  # elements that share a scale
FP8_MAX = 448.0  # largest float8_e4m3fn
_SCALE_BYTES = 4


class AllGatherCodec(Protocol):
    """Compression of one shard. It must not depend on the rank or on earlier calls."""

    dtype: torch.dtype
    """Dtype of the packed values."""

    def packed_length(self, elements: int) -> int:
        """Return the number of packed values for ``elements`` values."""
        ...

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` (E,) packed, (packed_length(E),) of `dtype`."""
        ...

    def unpack(self, output: torch.Tensor, packed: torch.Tensor) -> None:
        """Write the values of ``packed`` (ranks, packed_length(E)) to ``output`` (ranks, E)."""
        ...


class Bf16Codec:
    """Round to bfloat16."""

    dtype = torch.bfloat16

    def packed_length(self, elements: int) -> int:
        return elements

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype)

    def unpack(self, output: torch.Tensor, packed: torch.Tensor) -> None:
        output.copy_(packed)


class Fp8Codec:
    """Round to float8 e4m3, scaled so that the largest value of every `BLOCK` elements just fits.

    A block that contains an infinity or a NaN is unpacked as NaN.
    """

    dtype = torch.uint8

    def packed_length(self, elements: int) -> int:
        return elements + _SCALE_BYTES * -(-elements // BLOCK)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        elements = values.numel()
        blocks = values.new_zeros(-(-elements // BLOCK) * BLOCK, dtype=torch.float32)
        blocks[:elements] = values
        blocks = blocks.view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / FP8_MAX
        scales[scales == 0] = 1.0
        rounded = (blocks / scales).to(torch.float8_e4m3fn).view(-1)[:elements]
        return torch.cat([rounded.view(torch.uint8), scales.view(-1).view(torch.uint8)])

    def unpack(self, output: torch.Tensor, packed: torch.Tensor) -> None:
        elements = output.shape[1]
        if elements == 0:
            return
        for row, received in zip(output, packed, strict=True):  # bounds memory to one shard
            values = received[:elements].view(torch.float8_e4m3fn).to(torch.float32)
            scales = received[elements:].clone().view(torch.float32)
            row.copy_(values.mul_(scales.repeat_interleave(BLOCK)[:elements]))


CODECS: dict[str, AllGatherCodec | None] = {"same": None, "bf16": Bf16Codec(), "fp8": Fp8Codec()}
"""Registered codecs by value of ``gather_dtype``."""


def register_all_gather_codec(name: str, codec: AllGatherCodec) -> None:
    """Make ``codec`` available as ``gather_dtype = name``. Raises ValueError if the name is taken.

    Call it on every rank, before the config that names it is read.
    """
    if name in CODECS:
        raise ValueError(f"all-gather codec {name!r} is registered already: choose another name")
    CODECS[name] = codec
    allow_value("gather_dtype", name)


def is_compressed(codec: AllGatherCodec | None, dtype: torch.dtype) -> bool:
    """Return whether ``codec`` changes the transport of parameters of ``dtype``."""
    return codec is not None and dtype.is_floating_point and dtype != codec.dtype


def packed_size(gather_dtype: str, elements: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the number and the dtype of the values sent for ``elements`` values of ``dtype``."""
    codec = CODECS[gather_dtype]
    if codec is None or not is_compressed(codec, dtype):
        return elements, dtype
    return codec.packed_length(elements), codec.dtype

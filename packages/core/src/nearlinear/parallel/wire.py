"""Parameters that travel smaller than they compute: ``gather_dtype``.

Master weights stay as they are; what a gather hands to a block has been rounded on its way, the
rank's own part too, so that all ranks compute with the same numbers. bfloat16 halves float32's
bytes and keeps 8 bits of mantissa; fp8 (e4m3, 3 bits) quarters them, with a float32 scale for every
`BLOCK` elements, 1.6 % on top. Gradients are reduced in full.
"""

import torch

BLOCK = 256  # elements that share a scale
GREATEST = 448.0  # of float8_e4m3fn
SCALE_BYTES = 4


class Bf16:
    """Rounds to bfloat16."""

    dtype = torch.bfloat16

    def length(self, elements: int) -> int:
        """How many of ``dtype`` carry ``elements``."""
        return elements

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` (E,) as they travel, (length(E),) of ``dtype``."""
        return values.to(self.dtype)

    def unpack(self, output: torch.Tensor, packed: torch.Tensor) -> None:
        """Into ``output`` (ranks, E) what came, ``packed`` (ranks, length(E))."""
        output.copy_(packed)


class Fp8:
    """Rounds to float8 e4m3, scaled so that the greatest of every `BLOCK` elements just fits.

    A block with an infinity or a NaN arrives as NaN: nothing is hidden.
    """

    dtype = torch.uint8

    def length(self, elements: int) -> int:
        return elements + SCALE_BYTES * -(-elements // BLOCK)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        elements = values.numel()
        blocks = values.new_zeros(-(-elements // BLOCK) * BLOCK, dtype=torch.float32)
        blocks[:elements] = values
        blocks = blocks.view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / GREATEST
        scales[scales == 0] = 1.0
        rounded = (blocks / scales).to(torch.float8_e4m3fn).view(-1)[:elements]
        return torch.cat([rounded.view(torch.uint8), scales.view(-1).view(torch.uint8)])

    def unpack(self, output: torch.Tensor, packed: torch.Tensor) -> None:
        elements = output.shape[1]
        if elements == 0:
            return
        for row, came in zip(output, packed, strict=True):  # the room of one shard at a time
            values = came[:elements].view(torch.float8_e4m3fn).to(torch.float32)
            scales = came[elements:].clone().view(torch.float32)
            row.copy_(values.mul_(scales.repeat_interleave(BLOCK)[:elements]))


CODECS = {"same": None, "bf16": Bf16(), "fp8": Fp8()}


def codes(codec: Bf16 | Fp8 | None, dtype: torch.dtype) -> bool:
    """Whether ``codec`` changes how parameters of ``dtype`` travel."""
    return codec is not None and dtype.is_floating_point and dtype != codec.dtype


def travelling(gather_dtype: str, elements: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """As how many of which dtype ``elements`` of ``dtype`` travel."""
    codec = CODECS[gather_dtype]
    return (codec.length(elements), codec.dtype) if codes(codec, dtype) else (elements, dtype)

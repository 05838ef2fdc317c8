"""What is sent, and what must come back: every measured size is checked with it.

Element i of a rank's tensor is entry ``i + 101 * rank + 37 * salt`` of a table of 1009 small
whole numbers, repeated. 1009 is prime, so that a block in the wrong place shows; the salt is new
for every check, so that what an earlier call left in memory is not taken for a result. Sums are
exact in the data type as long as it can hold them; averages may differ by its rounding.
"""

from dataclasses import dataclass

import torch

PERIOD = 1009
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int32", "int64")
}
REDUCES = ("sum", "avg", "min", "max")
_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.int8: 127, torch.uint8: 255}
_ROWS = 4096  # compared at a time: 4 MiB of flags


@dataclass(frozen=True)
class Data:
    """The numbers of one data type and reduction over ``ranks`` ranks."""

    dtype: torch.dtype
    ranks: int
    reduce: str = "sum"

    def fill(self, tensor: torch.Tensor, rank: int, salt: int, reduced: bool) -> None:
        """Write rank ``rank``'s input; ``reduced``: numbers small enough to be summed."""
        self._write(tensor, self._row(rank, salt, reduced).to(self.dtype))

    def wrong_gather(self, output: torch.Tensor, salt: int) -> int:
        """Elements of an all-gather's output that are not what they should be."""
        return sum(
            self._differ(part, self._row(rank, salt, False).to(self.dtype), 0.0)
            for rank, part in enumerate(output.view(self.ranks, -1))
        )

    def wrong_reduce(self, output: torch.Tensor, salt: int, start: int = 0) -> int:
        """Elements of a reduction's output, whose first is element ``start`` of the inputs."""
        inputs = torch.stack([self._row(rank, salt, True) for rank in range(self.ranks)])
        exact = {
            "sum": inputs.sum(0),
            "avg": inputs.sum(0).double() / self.ranks,
            "min": inputs.amin(0),
            "max": inputs.amax(0),
        }[self.reduce]
        tolerance = 0.0  # integers wrap, all in the same way
        if self.dtype.is_floating_point and self.reduce in ("sum", "avg"):
            exceeds = inputs.sum(0).max() > _EXACT.get(self.dtype, 2**24)
            roundings = self.ranks if exceeds else 2 if self.reduce == "avg" else 0
            tolerance = roundings * torch.finfo(self.dtype).eps
        return self._differ(output, torch.roll(exact, -start).to(self.dtype), tolerance)

    def _row(self, rank: int, salt: int, reduced: bool) -> torch.Tensor:
        limit = _EXACT.get(self.dtype, 256)
        if reduced and self.reduce in ("sum", "avg"):
            limit = max(1, limit // self.ranks)
        generator = torch.Generator().manual_seed(PERIOD)
        table = torch.randint(1, limit + 1, (PERIOD,), generator=generator)
        return torch.roll(table, -(101 * rank + 37 * salt))

    def _write(self, tensor: torch.Tensor, row: torch.Tensor) -> None:
        whole = tensor.numel() // PERIOD * PERIOD
        tensor[:whole].view(-1, PERIOD).copy_(row)
        tensor[whole:].copy_(row[: tensor.numel() - whole])

    def _differ(self, tensor: torch.Tensor, row: torch.Tensor, tolerance: float) -> int:
        whole = tensor.numel() // PERIOD * PERIOD
        parts = [*tensor[:whole].view(-1, PERIOD).split(_ROWS), tensor[whole:]]
        wrong = 0
        for part in parts:
            wanted = row[: part.shape[-1]]
            if tolerance:  # written so that NaN is wrong
                wrong += int((~((part - wanted).abs() <= tolerance * wanted.abs())).sum())
            else:
                wrong += int((part != wanted).sum())
        return wrong


def poison(tensor: torch.Tensor) -> None:
    """Fill an output with what no collective of this data gives."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

"""Direct preference optimization: training on pairs of an accepted and a rejected conversation.

The loss of a pair is ``-log sigmoid(beta * (margin - reference))``. The margin is the log
probability of the accepted answer minus that of the rejected one, and the reference the same number
under the model at the start of the run (Rafailov et al. 2023, arXiv:2305.18290, equation 7). The
reference of every pair is measured once, before the first step, so that no second model takes
memory, and kept beside the checkpoints.

The two conversations of a pair are adjacent documents of a sequence. Where they are, and the
reference, travel in the labels (`PairLabels`): tensor, context and pipeline ranks split labels like
any others, and the loss function finds all it needs in its part.
"""

from __future__ import annotations

import io
import zipfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..data.dataset import TokenDataset
from ..data.loader import evaluation_batches
from ..data.masking import IGNORED_LABEL, Masks
from ..distributed.consensus import raise_on_all_ranks
from ..distributed.mesh import Mesh
from ..distributed.objects import broadcast_object
from ..distributed.watchdog import Watchdog
from ..errors import ConfigError, DataError, StorageError
from ..fsdp.targets import TargetRule
from ..pipeline_parallel.api import Pipelined
from ..storage import StoragePath
from ..tensor_parallel.loss import context_sum

REFERENCE_FILE = "reference.npz"
"""Beside the checkpoints: references of all pairs, float32."""
TOKEN_BITS, DOCUMENT_BITS, REFERENCE_BITS = 20, 11, 32
"""Bits of a label, from the lowest: the token, the number of its document, the reference."""
PATIENCE = 12.0
"""Multiple of ``train.rank_timeout`` for a batch of the reference's measurement."""

Batch = dict[str, torch.Tensor]


class References:
    """References of the pairs of one split: those of window i are ``values[ends[i-1]:ends[i]]``."""

    def __init__(self, values: np.ndarray, ends: np.ndarray):
        self.values: np.ndarray = values
        self.ends: np.ndarray = ends

    def of(self, window: int) -> np.ndarray:
        """Return the references of the pairs of a window, in order, float32."""
        return self.values[self.ends[window - 1] if window else 0 : self.ends[window]]


class PairLabels:
    """The objective of pairs: changes labels to numbers of token, document and reference."""

    identity: str = "preference"
    in_evaluation: bool = True

    def __init__(self, vocabulary: int):
        if vocabulary > 1 << TOKEN_BITS:
            raise ConfigError(
                f"a vocabulary of {vocabulary} is larger than {1 << TOKEN_BITS}, the limit of "
                "training on pairs of conversations"
            )
        self.vocabulary: int = vocabulary
        self.references: References | None = None
        """None: all references are 0."""

    def __call__(self, batch: Batch, windows: list[int], seeds: list[int]) -> Batch:
        labels = batch["labels"]
        documents = (batch["position_ids"] == 0).cumsum(1) - 1
        if int(documents.max()) >= 1 << DOCUMENT_BITS:
            raise DataError(
                f"a sequence holds {int(documents.max()) + 1} conversations, more than "
                f"{1 << DOCUMENT_BITS}: use a shorter data.sequence_length"
            )
        references = torch.zeros(labels.shape)
        if self.references is not None:
            for row, window in enumerate(windows):
                known = torch.from_numpy(self.references.of(window))
                padded = torch.cat([known, known.new_zeros(1)])  # of the padding
                references[row] = padded[(documents[row] // 2).clamp(max=len(known))]
        bits = references.view(torch.int32).long() & (1 << REFERENCE_BITS) - 1
        full = labels | documents << TOKEN_BITS | bits << TOKEN_BITS + DOCUMENT_BITS
        return batch | {"labels": torch.where(labels == IGNORED_LABEL, labels, full)}


def documents_of(labels: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the documents in labels of `PairLabels`; 0 for ignored ones."""
    found = labels >> TOKEN_BITS & (1 << DOCUMENT_BITS) - 1
    return torch.where(labels == IGNORED_LABEL, 0, found)


def references_of(labels: torch.Tensor) -> torch.Tensor:
    """Return the references in labels of `PairLabels`, float32; 0 for ignored ones."""
    bits = labels >> TOKEN_BITS + DOCUMENT_BITS
    signed = bits - (bits >> REFERENCE_BITS - 1 << REFERENCE_BITS)
    found = signed.to(torch.int32).view(torch.float32)
    return torch.where(labels == IGNORED_LABEL, 0.0, found)


class PairRule(TargetRule):
    """Counts pairs, over which the loss is a mean."""

    def count(self, batch) -> float:
        """Return the number of pairs of ``batch``."""
        labels = batch.get("shift_labels")
        labels = batch["labels"][..., 1:] if labels is None else labels
        rows = torch.arange(len(labels), device=labels.device).unsqueeze(1)
        documents = documents_of(labels) + (rows << DOCUMENT_BITS)
        present = torch.unique(documents[labels != IGNORED_LABEL])
        _, halves = torch.unique(present // 2, return_counts=True)
        return float((halves == 2).sum())


class PreferenceLoss:
    """The loss of a batch: the mean over its pairs. See `tensor_parallel.loss.Reduction`."""

    target_rule: TargetRule = PairRule(shifted=True)

    def __init__(self, beta: float):
        self.beta: float = beta
        self.sums: torch.Tensor | None = None
        """Since `take_sums`: pairs, those with a positive reward margin, and these margins."""
        self.measured: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """If a list, receives of each call the margins (B, pairs) and which of them exist."""

    def token_ids(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.where(labels == IGNORED_LABEL, labels, labels & (1 << TOKEN_BITS) - 1)

    def __call__(
        self, losses: torch.Tensor, labels: torch.Tensor, context: dist.ProcessGroup | None
    ) -> torch.Tensor:
        documents = documents_of(labels)
        highest = documents.max()
        if context is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=context)
        pairs = int(highest) // 2 + 1
        # a sum by comparison, since scattered sums depend on the order on a GPU
        numbers = torch.arange(2 * pairs, device=labels.device)
        inside = (documents.unsqueeze(-1) == numbers) & (labels != IGNORED_LABEL).unsqueeze(-1)
        negative = torch.where(inside, losses.unsqueeze(-1), 0.0).sum(1)
        count = inside.sum(1).double()
        references = references_of(labels).double().unsqueeze(-1)
        reference = torch.where(inside, references, 0.0).sum(1)  # equal numbers: exact
        if context is not None:
            negative, count = context_sum(negative, count, context)
            dist.all_reduce(reference, group=context)
        exists = (count[:, 0::2] > 0) & (count[:, 1::2] > 0)
        margin = negative[:, 1::2] - negative[:, 0::2]
        known = (reference / count.clamp(min=1)).to(margin.dtype)[:, 0::2]
        reward = self.beta * (margin - known)
        if self.measured is not None:
            self.measured.append((margin.detach(), exists))
        self._add(reward.detach(), exists)
        return torch.where(exists, functional.softplus(-reward), 0.0).sum() / exists.sum()

    def _add(self, reward: torch.Tensor, exists: torch.Tensor) -> None:
        found = torch.where(exists, reward, 0.0).double()
        each = torch.stack([exists.sum().double(), (found > 0).sum().double(), found.sum()])
        self.sums = each if self.sums is None else self.sums + each

    def take_sums(self, device: torch.device) -> torch.Tensor:
        """Return `sums` and start new ones; pipeline ranks without the loss have zeros."""
        found, self.sums = self.sums, None
        return torch.zeros(3, dtype=torch.float64, device=device) if found is None else found


def preference_metrics(sums: list[float]) -> dict[str, float]:
    """Return the metrics of `PreferenceLoss.sums` over all ranks."""
    pairs, positive, rewards = sums
    if not pairs:
        return {}
    return {"reward_accuracy": positive / pairs, "reward_margin": rewards / pairs}


@torch.no_grad()
def measure_references(
    model: nn.Module,
    loss: PreferenceLoss,
    dataset: TokenDataset,
    mesh: Mesh,
    batch_size: int,
    masks: Masks,
    watch: Watchdog,
) -> References:
    """Return the margins of all pairs of ``dataset`` under ``model``. A collective call."""
    device = next(model.parameters()).device
    place = mesh.data_rank(dist.get_rank()), mesh.data_ranks
    objective = PairLabels(dataset.manifest.vocab_size)
    by_window: dict[int, np.ndarray] = {}
    model.eval()
    batches = evaluation_batches(dataset, batch_size, *place, None, masks, objective)
    total = -(-len(dataset) // (batch_size * mesh.data_ranks))
    for number, batch in enumerate(batches):
        watch.at(f"measuring the reference, batch {number + 1} of {total}", PATIENCE)
        loss.measured = []
        if isinstance(model, Pipelined):
            model.evaluate(batch)
        else:
            model(**batch)
        first = (number * mesh.data_ranks + place[0]) * batch_size
        rows = (pair for calls in loss.measured for pair in zip(*calls, strict=True))
        for window, (margins, exists) in enumerate(rows, first):
            if window < len(dataset):
                by_window[window] = margins[exists].double().cpu().numpy()
    loss.measured, loss.sums = None, None
    model.train()
    return _gather(by_window, len(dataset), device)


def _gather(by_window: dict[int, np.ndarray], windows: int, device: torch.device) -> References:
    """Collect the margins of all ranks, of which several have the same windows."""
    most = torch.tensor([max(map(len, by_window.values()), default=0)], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    table = np.zeros((windows, int(most) + 2))
    for window, margins in by_window.items():
        table[window, : len(margins)] = margins
        table[window, -2:] = len(margins), 1
    everyones = torch.from_numpy(table).to(device)
    dist.all_reduce(everyones)
    everyones /= everyones[:, -1:]
    found = everyones.cpu().numpy()
    counts = found[:, -2].round().astype(np.int64)
    used = np.arange(table.shape[1] - 2) < counts[:, None]
    return References(found[:, :-2][used].astype(np.float32), counts.cumsum())


def write_references(folder: StoragePath, splits: dict[str, References]) -> None:
    """Write the references beside the checkpoints on rank 0. A collective call."""
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            arrays = {
                f"{split}_{name}": getattr(found, name)
                for split, found in splits.items()
                for name in ("values", "ends")
            }
            file = io.BytesIO()
            np.savez(file, **arrays)
            try:
                folder.mkdir()
                (folder / REFERENCE_FILE).put(file.getvalue())
            except OSError as error:
                raise DataError(
                    f"{folder / REFERENCE_FILE} cannot be written ({error}): free space, or set "
                    "another checkpoint.folder"
                ) from None


def read_references(
    folder: StoragePath, datasets: dict[str, TokenDataset], device: torch.device
) -> dict[str, References]:
    """Read the references that rank 0 finds beside the checkpoints. A collective call.

    Raises CheckpointError on all ranks if the file is missing, damaged, or of other data.
    """
    found: dict[str, list[torch.Tensor]] = {}
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            for split, each in _read(folder / REFERENCE_FILE, datasets).items():
                found[split] = [torch.from_numpy(each.values), torch.from_numpy(each.ends)]
    world = dist.group.WORLD
    assert world is not None  # the ranks have joined
    everyones = broadcast_object(found, 0, world, device, "the references")
    return {
        split: References(*(tensor.cpu().numpy() for tensor in tensors))
        for split, tensors in everyones.items()
    }


def _read(path: StoragePath, datasets: dict[str, TokenDataset]) -> dict[str, References]:
    remedy = "copy it from the folder of the first checkpoint, or start a new run"
    try:
        with np.load(io.BytesIO(path.read()), allow_pickle=False) as arrays:
            found = {
                split: References(arrays[f"{split}_values"], arrays[f"{split}_ends"])
                for split in datasets
            }
    except (OSError, StorageError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} cannot be read ({error}): it holds the probabilities of the answers under the "
            f"model at the start of the run; {remedy}"
        ) from None
    for split, dataset in datasets.items():
        if len(found[split].ends) != len(dataset):
            raise DataError(
                f"{path} has references of {len(found[split].ends)} sequences of {split}, and the "
                f"data has {len(dataset)}: {remedy}"
            )
    return found

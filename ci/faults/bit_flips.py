"""Damage checkpoints and load them: no damage may be loaded silently, crash, or hang.

    python -m ci.faults.bit_flips                       # 2,000 bit flips, 200 indexes
    python -m ci.faults.bit_flips --flips 100 --crafted 60 --seed 1

Bits flip at random positions of all files of a checkpoint, half of them in the index. Crafted
indexes are changed on purpose and have a matching hash (`ci.faults.crafted`). Every
damaged checkpoint is verified and loaded. The exit code is 0 if each load either raised
CheckpointError or restored exactly the saved state, and verification agreed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import nearlinear as nl
from nearlinear.checkpoint import index, sealed_json, verify
from nearlinear.errors import CheckpointError

from . import crafted

MAX_SECONDS = 5.0
"""A load that takes longer counts as a hang."""
REFUSED, HARMLESS, WRONG, CRASHED, HANGING, UNVERIFIED = (
    "refused", "loaded, identical", "SILENTLY WRONG", "TRACEBACK", "HANG", "VERIFY DISAGREES",
)  # fmt: skip
ACCEPTED = {REFUSED, HARMLESS}


@dataclass
class Report:
    """Outcomes of all trials."""

    outcomes: dict[str, Counter] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, kind: str, label: str, outcome: str, seconds: float) -> None:
        """Count a trial."""
        self.outcomes.setdefault(kind, Counter())[outcome] += 1
        self.slowest = max(self.slowest, seconds)
        if outcome.split(":")[0] not in ACCEPTED:
            self.failures.append(f"{kind}, {label}: {outcome}")


class Trials:
    """A small saved run, and loads of its damaged copies.

    Args:
        folder: Folder for temporary files.
        seed: Seed of all changes.
    """

    def __init__(self, folder: Path, seed: int):
        self.rng = random.Random(seed)
        self.folder, self.report = folder, Report()
        self.sealed, self.unsealed = folder / "sealed", folder / "unsealed"
        nl.spmd.run(_save, 2, args=(str(self.sealed),))
        shutil.copytree(self.sealed, self.unsealed)
        crafted.write_unsealed(self.unsealed)

    def run(self, flips: int, indexes: int) -> Report:
        """Run all trials on one rank."""
        nl.spmd.run(self._run, 1, args=(flips, indexes), timeout=24 * 3600)
        return self.report

    def _run(self, rank: int, flips: int, indexes: int) -> None:
        nl.init({})
        self.model, self.optimizer = _build()
        for folder in (self.sealed, self.unsealed):  # intact checkpoints load
            self.expected = self._load(folder)
        for number in range(flips):
            self._flip(in_index=number % 2 == 0)
        for number in range(indexes):
            self._craft(number)

    def _flip(self, in_index: bool) -> None:
        names = sorted(path.name for path in self.sealed.iterdir() if path.name != index.NAME)
        path = self.sealed / (index.NAME if in_index else self.rng.choice(names))
        original = path.read_bytes()
        position, bit = self.rng.randrange(len(original)), self.rng.randrange(8)
        changed = bytearray(original)
        changed[position] ^= 1 << bit
        path.write_bytes(changed)
        label = f"bit {bit} of byte {position} of {path.name}"
        self._try("bit flips in the index" if in_index else "bit flips in data", label, self.sealed)
        path.write_bytes(original)

    def _craft(self, number: int) -> None:
        for folder, label, text in self._crafted(number):
            path = folder / index.NAME
            original = path.read_bytes()
            path.write_bytes(text)
            kind = "crafted indexes" + (" of format 2" if folder == self.unsealed else "")
            self._try(kind, label, folder)
            path.write_bytes(original)

    def _crafted(self, number: int) -> Iterator[tuple[Path, str, bytes]]:
        changes = crafted.STRUCTURAL | crafted.SEMANTIC
        names = [*changes, *crafted.TEXTS]
        label = names[number % len(names)] if number < len(names) else "random value"
        if number >= len(names) and number % 2:
            label = self.rng.choice(list(crafted.STRUCTURAL))
        text = (self.sealed / index.NAME).read_bytes()
        if label in crafted.TEXTS:
            changed = crafted.TEXTS[label](text)
            if sealed_json._PREFIX.match(changed):
                changed = _reseal(changed)
            yield self.sealed, label, changed
            return
        data = json.loads(text)
        changes[label](data, self.rng)
        yield self.sealed, label, crafted.seal(data)
        if label in crafted.STRUCTURAL:
            older = json.loads((self.unsealed / index.NAME).read_text())
            changes[label](older, self.rng)
            yield self.unsealed, label, json.dumps(older).encode()

    def _try(self, kind: str, label: str, folder: Path) -> None:
        begin = time.monotonic()
        faulthandler.dump_traceback_later(12 * MAX_SECONDS, exit=True)
        try:
            outcome = self._outcome(folder)
        finally:
            faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - begin
        if seconds > MAX_SECONDS:
            outcome = f"{HANGING}: {seconds:.1f} s"
        self.report.add(kind, label, outcome, seconds)

    def _outcome(self, folder: Path) -> str:
        try:
            found = self._load(folder)
            outcome = HARMLESS if _equal(found, self.expected) else WRONG
        except CheckpointError as error:
            outcome = REFUSED if "\n" not in str(error) else f"{CRASHED}: several lines"
        except BaseException as error:
            return f"{CRASHED}: {error!r:.200}"
        try:
            faulty = any(True for _ in verify.find_faults(folder))
        except BaseException as error:
            return f"{CRASHED}: verify raised {error!r:.200}"
        return outcome if faulty == (outcome == REFUSED) else f"{UNVERIFIED}: {outcome}"

    def _load(self, folder: Path) -> dict:
        """Load a checkpoint over poisoned values; return all that it restores."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))
        for group in self.optimizer.param_groups:
            group["lr"] = 123.0
        self.optimizer.state.clear()
        counter = _Counter()
        step = nl.load(folder, self.model, self.optimizer, counter=counter)
        found = {"step": step, "counter": counter.value}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().full_tensor().clone()
            for key, value in sorted(self.optimizer.state[parameter].items()):
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}.{key}"] = full.clone()
        for number, group in enumerate(self.optimizer.param_groups):
            found |= {f"{number}.{k}": v for k, v in group.items() if k != "params"}
        return found


class _Counter:
    """An object with a state, as a data loader is."""

    value = 0

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"] + 0


def _build():
    """Return a sharded model of two blocks and its optimizer."""
    with nl.spmd.one_at_a_time(seed=0):
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2,
                       bos_token_id=0, eos_token_id=0)
        )  # fmt: skip
    nl.shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _save(rank: int, folder: str) -> None:
    nl.init({})
    model, optimizer = _build()
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    counter = _Counter()
    counter.value = 17
    nl.save(folder, model, optimizer, step=41, wait=True, counter=counter)


def _reseal(text: bytes) -> bytes:
    """Return ``text`` with a matching hash of itself."""
    import hashlib

    begin = text.index(b'"sha256":"') + len(b'"sha256":"')
    zeroed = text[:begin] + b"0" * 64 + text[begin + 64 :]
    return text[:begin] + hashlib.sha256(zeroed).hexdigest().encode() + text[begin + 64 :]


def _equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


def main(argv: list[str] | None = None) -> int:
    """Run all trials, print a table, and return 0 if none failed."""
    parser = argparse.ArgumentParser(prog="python -m ci.faults.bit_flips")
    for name, default in (("flips", 2000), ("crafted", 200), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="bit-flips-") as folder:
        report = Trials(Path(folder), options.seed).run(options.flips, options.crafted)
    for kind, counts in report.outcomes.items():
        shown = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
        print(f"{kind:28} {sum(counts.values()):5}: {shown}")
    print(f"slowest trial: {report.slowest:.2f} s")
    for failure in report.failures[:20]:
        print(f"  {failure}")
    print(f"{len(report.failures)} failures")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

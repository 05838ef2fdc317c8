"""This preparation and other tools on the same file, in one run, by CPU seconds of one process.

Each is a process of its own, from start to end: imports, reading, encoding, writing. This
preparation runs before and after each of the peers, which take minutes, and counts by its median.
All ids are compared. Peers do what their users do (`peers`); nanoGPT does it without its split.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from data_prep.arguments import PEERS
from nearlinear.errors import DataError

ROW = 512
"""tokens of a row, where a tool makes rows"""

PEAK = "peak"
"""the file in which a tool tells its peak of memory, in KiB"""

_EOS_ID = 50256
_OURS = "nearlinear"


def bench(
    file: str | Path, peers: Sequence[str] = PEERS, folder: str | Path | None = None,
    say: bool = True,
) -> dict:  # fmt: skip
    """Prepare JSON lines `file` with GPT-2's tokenizer, with each of `peers`, and compare.

    The answer has `bytes`, `tokens` and for each tool `cpu_seconds`, `tokens_per_cpu_second` and
    `peak_mb`; of this one `runs`, the CPU seconds of each, and of peers `ratio` and `same_ids`.
    Raises `DataError` when a tool fails, and, when all have run, for those that gave other ids.
    """
    unknown = set(peers) - set(PEERS)
    if unknown:
        raise DataError(f"no peer {sorted(unknown)[0]!r}: use {', '.join(PEERS)}")
    path = Path(file).resolve()
    if not path.is_file():
        raise DataError(f"no input file {file}: check the path")
    tools = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as place:

        def run(name: str) -> tuple[dict, np.ndarray]:
            os.sync()  # else what the last one wrote is written while this one syncs
            tool, ids = _run(name, path, Path(place, name)), _stream(name, Path(place, name))
            shutil.rmtree(Path(place, name))
            if say:
                print(f"{name:<12} {tool['cpu_seconds']:8.2f} CPU s", flush=True)
            return tool, ids

        tool, ours = run(_OURS)
        runs = [tool]
        for name in peers:
            tools[name], ids = run(name)
            tools[name]["same_ids"] = _same(name, ids, ours)
            tool, ids = run(_OURS)
            runs.append(tool)
            if not np.array_equal(ids, ours):
                raise DataError(f"two preparations of {file} gave different ids: please report it")
    tools = {_OURS: _median(runs), **tools}
    for tool in tools.values():
        tool["tokens_per_cpu_second"] = len(ours) / tool["cpu_seconds"]
    for name in peers:
        tools[name]["ratio"] = tools[name]["cpu_seconds"] / tools[_OURS]["cpu_seconds"]
    if say:
        print()
        for name, tool in tools.items():
            print(_line(name, tool), flush=True)
    if others := [name for name in peers if not tools[name]["same_ids"]]:
        raise DataError(
            f"{', '.join(others)} gave other ids than nearlinear for {file}, so what they took is "
            "not to be compared: leave them out with --peers, and report the file's text"
        )
    return {"file": str(file), "bytes": path.stat().st_size, "tokens": len(ours), "tools": tools}


def _median(runs: list[dict]) -> dict:
    """Of several runs of a tool, with the CPU seconds of each; the most memory of all."""
    seconds = [run["cpu_seconds"] for run in runs]
    return {
        "cpu_seconds": statistics.median(seconds),
        "runs": seconds,
        "peak_mb": max(run["peak_mb"] for run in runs),
    }


def _run(name: str, file: Path, out: Path) -> dict:
    """One tool in a process of its own: its CPU seconds and the most memory it held."""
    out.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_DATASETS_CACHE": str(out / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "data_prep.bench.peers", name, str(file), str(out)]
    with open(out / "said", "w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, cwd=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (out / "said").read_text().strip().splitlines()[-1:]
        raise DataError(f"{name} failed ({process.returncode}): {''.join(last)}")
    peak_mb = int((out / PEAK).read_text()) / 1024
    return {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": peak_mb}


def _stream(name: str, out: Path) -> np.ndarray:
    """All ids that a tool wrote, in order."""
    if name == "huggingface":
        from datasets import load_from_disk

        columns = load_from_disk(str(out / "rows")).data.column("input_ids").chunks
        return np.concatenate([chunk.flatten().to_numpy() for chunk in columns])
    patterns = {"nearlinear": "tokens/train/*.bin", "nanogpt": "train.bin", "datatrove": "*.ds"}
    files = sorted(out.glob(patterns[name]))
    return np.concatenate([np.fromfile(file, np.uint16) for file in files])


def _same(name: str, ids: np.ndarray, ours: np.ndarray) -> bool:
    """Whether a tool's ids are ours, in its order and with what it leaves out."""
    if name == "datatrove":  # it shuffles documents
        return _documents(ids) == _documents(ours)
    return np.array_equal(ids, _grouped(ours) if name == "huggingface" else ours)


def _documents(stream: np.ndarray) -> Counter:
    """How often each document is in a stream, by its hash."""
    ends = np.flatnonzero(stream == _EOS_ID) + 1
    pieces = np.split(np.ascontiguousarray(stream), ends[:-1])
    return Counter(xxhash.xxh3_128_digest(piece) for piece in pieces)


def _grouped(stream: np.ndarray) -> np.ndarray:
    """What run_clm.py's grouping keeps of a stream: whole rows of each 1,000 documents."""
    ends = np.flatnonzero(stream == _EOS_ID) + 1
    pieces = np.split(stream, ends[999:-1:1000])
    return np.concatenate([piece[: len(piece) // ROW * ROW] for piece in pieces])


def _line(name: str, tool: dict) -> str:
    line = (
        f"{name:<12} {tool['cpu_seconds']:8.2f} CPU s {tool['tokens_per_cpu_second'] / 1e6:7.2f} "
        f"M tokens per CPU s {tool['peak_mb']:7.0f} MB"
    )
    if "ratio" not in tool:
        return f"{line}  median of {len(tool['runs'])}"
    return f"{line}  1/{tool['ratio']:.1f}, ids {'identical' if tool['same_ids'] else 'DIFFER'}"

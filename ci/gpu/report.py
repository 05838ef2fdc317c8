"""The list of stages, and the page of results: packages/core/docs/gpu_evidence.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .runner import MODES, ROOT, STAGES, Stage, read_result

PAGE = ROOT / "packages" / "core" / "docs" / "gpu_evidence.md"
NOT_RUN = "not yet run"
MAX_CELL = 300  # characters of a reason in a table

INTRODUCTION = """\
# What has and has not been run on a GPU

nearlinear is developed on machines without a GPU. Its tests run on the CPU, over gloo and its own
backend for host memory, and tests marked `gpu` are skipped there. This page lists the checks that
need a GPU and their results. `python -m ci.gpu` runs the checks on one GPU, from a bare checkout
and without a network; `python -m ci.gpu --render` writes this page from the result files in
`ci/gpu/results`, and a test compares the two.

`python -m ci.gpu --rehearse` runs every stage on the CPU with tiny shapes. On 2026-11-25 all stages
passed on Python 3.12.1, torch 2.11.0+cu130 and transformers 5.17.0, without a network and without a
GPU, with the peers of `--carry`; Megatron-FSDP runs on CUDA only and was refused.
"""

NEVER = """\
## Never run on any GPU

Results below replace an entry of this list only for the part that they measure.

{entries}
"""

ENTRIES = (
    ("correctness", "training on CUDA at all, with any kind of parallelism, precision or "
     "checkpoint: the tests marked `gpu` have always been skipped"),
    ("memory", "the planner's memory model against CUDA's allocator; it is compared with dry runs "
     "and with CPU processes"),
    ("speed", "any speed of nearlinear on a GPU: MFU, overhead over FSDP2"),
    ("peers", "any comparison with DeepSpeed, Megatron-FSDP or torchtitan on a GPU"),
    ("activation-offload", "activation offloading with CUDA streams and pinned memory"),
    ("optimizers", "offloaded and 8-bit optimizers on CUDA"),
    ("codecs", "the speed of `gather_dtype = \"bf16\"` and `\"fp8\"` on CUDA tensors"),
    ("collectives", "the `nearlinear` backend with CUDA tensors, CUDA graphs, copies by CUDA IPC"),
    ("checkpoint", "asynchronous saves from GPU memory"),
    ("profile", "a profile of the training step on a GPU"),
)  # fmt: skip
"""Stage that would prove it, and the untested subject."""

BEYOND = """\
## Beyond these checks

One GPU cannot show the following. Each has run on the CPU only, in processes and in emulated
clusters:

- NCCL between GPUs, NVLink, InfiniBand and EFA;
- overlap of communication with computation on CUDA streams between several GPUs;
- MiCS, hierarchical all-gather and two-hop synchronization at speed;
- the planner's step times for clusters, other than by comparison with published runs;
- watchdog and elastic restarts with NCCL communicators that hang;
- more than one node of any kind of real hardware.
"""


def format_stages(stages: list[Stage]) -> str:
    """Return a line per stage: name, time limit and purpose."""
    width = max(len(stage.name) for stage in STAGES)
    return "\n".join(f"{s.name:{width}}  {s.minutes:3g} min  {s.proves}" for s in stages)


def render(folder: Path) -> str:
    """Return the page for the results in ``folder``.

    Raises ValueError for a result of a rehearsal, or of an unknown stage.
    """
    results = {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}
    known = {stage.name for stage in STAGES}
    for name, result in results.items():
        if name not in known:
            raise ValueError(f"{folder / name}.json: no such stage; move the file away")
        if result.get("mode") != MODES[0]:
            raise ValueError(
                f"{folder / name}.json is not a result of a GPU (mode {result.get('mode')!r}); "
                "remove it, and keep rehearsals in another folder with --results"
            )
    rows = [
        "| stage | result | proves |",
        "|:--|:--|:--|",
        *(f"| {s.name} | {_summary(results.get(s.name))} | {s.proves} |" for s in STAGES),
    ]
    open_entries = [text for stage, text in ENTRIES
                    if results.get(stage, {}).get("status") != "passed"]  # fmt: skip
    parts = [INTRODUCTION, "## Stages\n", "\n".join(rows) + "\n"]
    if open_entries:
        entries = ";\n".join(_wrapped(f"- {text}") for text in open_entries) + "."
        parts.append(NEVER.format(entries=entries))
    parts.append(BEYOND)
    parts += [_section(stage, results[stage.name]) for stage in STAGES if stage.name in results]
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def _summary(result: dict[str, Any] | None) -> str:
    if result is None:
        return NOT_RUN
    device = result.get("device", {}).get("name", "unknown device")
    return f"{result['status']} on {device}, {result['started'][:10]}"


def _section(stage: Stage, result: dict[str, Any]) -> str:
    """Return the table of one stage: a row per check."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    head = [
        f"## {stage.name}\n",
        f"```sh\npython -m ci.gpu --stages {stage.name}\n```\n",
        f"{_summary(result)}; {versions}; commit {result['commit'][:12] or 'unknown'}; "
        f"{result['seconds']:.0f} s.",
    ]
    if result["reason"]:
        head.append(f"\n{_cell(result['reason'])}")
    rows = ["\n| check | result | figures |", "|:--|:--|:--|"]
    for check in result["checks"]:
        figures = ", ".join(f"{key} {value}" for key, value in check["figures"].items()
                            if not isinstance(value, (dict, list)) and value != "")  # fmt: skip
        shown = _cell("; ".join(filter(None, [figures, check["reason"]])))
        rows.append(f"| {_cell(check['name'])} | {check['status']} | {shown} |")
    return "\n".join([*head, *rows]) + "\n"


def _cell(text: str) -> str:
    line = " ".join(str(text).split()).replace("|", "\\|")
    return line if len(line) <= MAX_CELL else line[:MAX_CELL] + " ..."

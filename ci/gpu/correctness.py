"""Training on CUDA compared with PyTorch on the CPU, and every test marked ``gpu``."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nearlinear as nl
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import local_tensor
from tests.support import parity

from . import ranks
from .measure import Recorder, Refused, significant
from .runner import ROOT

FP32_BOUND = 1e-5
TEST_PACKAGES = ("msgspec", "tokenizers", "xxhash")  # of fixtures of the marked tests
HALF_BOUNDS = {"losses": 0.05, "values": 0.01}  # those of tests/core/fsdp/test_float8.py


@dataclass(frozen=True)
class Layout:
    """A kind of parallelism, trained on several ranks of one GPU."""

    name: str
    ranks: int
    family: str
    config: dict[str, Any]
    accumulation: int = 1
    layers: int = 2


LAYOUTS = (
    Layout("full sharding", 2, "gpt2", {}),
    Layout("tensor parallel", 2, "llama", {"tensor_parallel_degree": 2}),
    Layout("context parallel, ring", 2, "llama", {"context_parallel_degree": 2}),
    Layout("context parallel, all-gather", 2, "gpt2",
           {"context_parallel_degree": 2, "cp_comm_type": "all_gather"}),
    Layout("expert parallel", 2, "mixtral", {"expert_parallel_degree": 2}),
    Layout("pipeline", 2, "llama", {"pipeline_parallel_degree": 2, "microbatches": 2}, layers=4),
    Layout("full sharding, least memory", 2, "llama", {"sdp_max_live_parameters": 0}, 2),
    Layout("MiCS, 2 replicas of 2 shards", 4, "gpt2", {"hybrid_shard_degree": 2}, 2),
    Layout("MiCS, sliced optimizer", 4, "llama",
           {"hybrid_shard_degree": 2, "shard_optimizer_state": True}, 2),
    Layout("tensor x shard", 4, "llama", {"tensor_parallel_degree": 2}, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Technique:
    """A setting of one rank that must not change, or barely change, the results."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] = lambda model: None
    then: Callable[[Any], Any] = lambda model: None


def _checkpoint(model: Any, strategy: str) -> None:
    nl.checkpoint_activations(model, strategy)


def _offload(model: Any, strategy: str | None, horizon: int) -> None:
    if strategy:
        nl.checkpoint_activations(model, strategy)
    nl.offload_activations(model, horizon, smallest=1)


BIT_EXACT = (
    *(Technique(f"checkpointing {s}", then=functools.partial(_checkpoint, strategy=s))
      for s in ("each", "group_2", "selective")),
    Technique("offloading", then=functools.partial(_offload, strategy=None, horizon=2)),
    Technique("checkpointing each + offloading",
              then=functools.partial(_offload, strategy="each", horizon=1)),
)  # fmt: skip
HALF_PRECISION = (
    Technique("bf16", {"bf16": True}),
    Technique("fp16 with a loss scale", {"fp16": True, "init_scale": 65536.0}),
)


def run(recorder: Recorder) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products
    with recorder.check("tests marked gpu") as figures:
        run_marked_tests(recorder, figures)
    check_layouts(recorder)
    check_techniques(recorder)
    with recorder.check("save on the GPU, load on the CPU, and back") as figures:
        figures |= round_trip(recorder)


def run_marked_tests(recorder: Recorder, figures: dict[str, Any]) -> None:
    """Run every test marked gpu in one pytest and record the outcomes."""
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [path for path in modules if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        arguments = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code, output = run_pytest([*arguments, *map(str, files)], fork=recorder.rehearse)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {code}: {output[-1000:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcomes["skipped" if "skipped" in kinds else outcome].append(case.get("name"))
    figures |= {outcome: len(names) for outcome, names in outcomes.items()}
    figures["failures"] = outcomes["failed"]
    if outcomes["failed"] or not cases:
        print(output[-8000:], flush=True)
        missing = [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]
        hint = f"; missing packages, to be carried: {', '.join(missing)}" if missing else ""
        raise AssertionError(f"{len(outcomes['failed'])} of {len(cases)} tests failed{hint}")
    if recorder.rehearse and outcomes["passed"]:
        raise AssertionError("a test marked gpu passed without a GPU")


def run_pytest(arguments: list[str], fork: bool) -> tuple[int, str]:
    """Run pytest in a process of its own and return its exit code and output.

    A fork of this process has imported torch already. CUDA does not survive a fork.
    """
    with tempfile.TemporaryFile("w+") as output:
        if fork:
            process = multiprocessing.get_context("fork").Process(
                target=_pytest_in_fork, args=(arguments, output.fileno())
            )
            process.start()
            process.join()
            code = process.exitcode or 0
        else:
            command = [sys.executable, "-m", "pytest", *arguments]
            code = subprocess.run(command, cwd=ROOT, stdout=output, text=True).returncode
        output.seek(0)
        return code, output.read()


def _pytest_in_fork(arguments: list[str], output: int) -> None:
    import pytest

    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    sys.exit(int(pytest.main(arguments)))


reference = functools.cache(parity.alone)


def check_layouts(recorder: Recorder) -> None:
    """Compare every layout with one process; a rehearsal shares processes between layouts."""
    groups: list[list[Layout]] = [[layout] for layout in LAYOUTS]
    if recorder.rehearse:
        counts = sorted({layout.ranks for layout in LAYOUTS})
        groups = [[each for each in LAYOUTS if each.ranks == count] for count in counts]
    for layouts in groups:
        trained: dict[str, list[parity.Run]] = {}
        failure: Exception | None = None
        try:
            runs = ranks.run(train_layouts, layouts[0].ranks, layouts)
            by_layout = zip(*runs, strict=True)
            trained = {
                layout.name: list(found) for layout, found in zip(layouts, by_layout, strict=True)
            }
        except Exception as error:
            failure = error
        for layout in layouts:
            with recorder.check(f"{layout.name}, {layout.ranks} ranks") as figures:
                if failure is not None:
                    raise failure
                expected = reference(layout.family, **parity.layers(layout.family, layout.layers))
                figures |= largest_differences(trained[layout.name], expected)
                parity.assert_equal(trained[layout.name], expected, FP32_BOUND)


def train_layouts(rank: int, layouts: list[Layout]) -> list[parity.Run]:
    return [
        functools.partial(parity.together, **parity.layers(layout.family, layout.layers))(
            rank, layout.family, layout.config, layout.accumulation
        )
        for layout in layouts
    ]


def largest_differences(runs: list[parity.Run], expected: parity.Run) -> dict[str, float]:
    each = [parity.differences(found, expected) for found in runs]
    return {name: significant(max(found[name] for found in each), 2) for name in each[0]}


def check_techniques(recorder: Recorder) -> None:
    """Train on one rank with each technique, in this process."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = reference("llama", **parity.layers("llama", 4))
    plain: list[parity.Run] = []
    with recorder.check("float32, 1 rank") as figures:
        plain.append(train_alone(Technique("float32")))
        figures |= largest_differences(plain, expected)
        parity.assert_equal(plain, expected, FP32_BOUND)
    for technique in BIT_EXACT:
        with recorder.check(f"{technique.name}, bit for bit") as figures:
            if not plain:
                raise Refused("the run without it failed")
            figures |= largest_differences([train_alone(technique)], plain[0])
            if any(figures.values()):
                raise AssertionError("the results differ from those without it")
    compiled = functools.partial(
        nl.compile_blocks, backend="eager" if recorder.rehearse else "inductor"
    )
    with recorder.check("compiled blocks") as figures:
        found = train_alone(Technique("compiled", prepare=compiled))
        figures |= largest_differences([found], expected)
        parity.assert_equal([found], expected, FP32_BOUND)
    for technique in HALF_PRECISION:
        with recorder.check(technique.name) as figures:
            compare_half(train_alone(technique), expected, figures)
    with recorder.check("fp8 by torchao") as figures:
        if importlib.util.find_spec("torchao") is None:
            raise Refused("torchao is neither installed nor carried")
        convert = functools.partial(nl.convert_to_fp8, emulate=recorder.rehearse)
        technique = Technique("fp8", {"bf16": True, "fp8": True}, prepare=convert)
        compare_half(train_alone(technique), expected, figures)
    with recorder.check("fp8 by Transformer Engine"):
        raise Refused("nearlinear multiplies in float8 by torchao only")
    torch.use_deterministic_algorithms(False)


def train_alone(technique: Technique) -> parity.Run:
    """Train Llama with four layers on this process's device."""
    try:
        train = functools.partial(parity.together, **parity.layers("llama", 4))
        return train(0, "llama", technique.config, prepare=technique.prepare, then=technique.then)
    finally:
        runtime.shutdown()


def compare_half(found: parity.Run, expected: parity.Run, figures: dict[str, Any]) -> None:
    figures |= largest_differences([found], expected)
    for name, bound in HALF_BOUNDS.items():
        if not figures[name] <= bound:
            raise AssertionError(f"{name} differ by {figures[name]:g}, more than {bound:g}")
    if figures["losses"] == 0:
        raise AssertionError("the losses are those of float32: the precision has no effect")


def round_trip(recorder: Recorder) -> dict[str, Any]:
    """Save from the GPU, read on the CPU, save there, read on the GPU; compare bit for bit."""
    with tempfile.TemporaryDirectory(prefix="round-trip-") as folder:
        first, second = f"{folder}/gpu", f"{folder}/cpu"
        try:
            device, saved = train_and_save(0, first)
        finally:
            runtime.shutdown()
        with ranks.without_gpu():
            [(host, loaded)] = ranks.run(load_and_save, 1, first, second, backend="gloo")
        try:
            back, again = load_and_save(0, second, "")
        finally:
            runtime.shutdown()
    expected = "cpu" if recorder.rehearse else "cuda"
    if (device, host, back) != (expected, "cpu", expected):
        raise AssertionError(f"the ranks were on {device}, {host} and {back}")
    for name, tensor in saved.items():
        if not (tensor.equal(loaded[name]) and tensor.equal(again[name])):
            raise AssertionError(f"{name} changed on the way")
    return {"tensors": len(saved), "devices": f"{device}, {host}, {back}"}


def _build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    nl.init({})
    torch.manual_seed(seed)
    model = nl.shard(parity.unseeded("llama"))
    return model, parity.adamw(model, 1e-3)


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = local_tensor(parameter.detach()).cpu()
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = local_tensor(value).cpu()
    return found


def train_and_save(rank: int, folder: str) -> tuple[str, dict[str, torch.Tensor]]:
    model, optimizer = _build(0)
    device = runtime.current().device
    for step in range(2):
        batch = {key: value.to(device) for key, value in parity.rows(step).items()}
        parity.forward_and_backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    nl.save(folder, model, optimizer, wait=True)
    return device.type, _state(model, optimizer)


def load_and_save(rank: int, source: str, target: str) -> tuple[str, dict[str, torch.Tensor]]:
    model, optimizer = _build(1)
    nl.load(source, model, optimizer)
    if target:
        nl.save(target, model, optimizer, wait=True)
    return runtime.current().device.type, _state(model, optimizer)

"""Migration guide of SMP v1: code blocks, the table of keys, and the table of symbols."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import nearlinear as nl
from ci.smp_scripts import tables
from ci.smp_scripts.__main__ import main, run_all
from ci.smp_scripts.expectations import Expectation
from nearlinear.compat import smp

HERE = Path(__file__).parent
DOCS = tables.PAGE.parent
ROW = re.compile(r"^\| (?P<symbols>`.*?) \| (?P<behaviour>.*?) \| `(?P<test>test_\w+)` \|$", re.M)
CLASSES = {
    "StepOutput": smp.StepOutput,
    "DistributedModel": smp.DistributedModel,
    "DistributedOptimizer": smp.DistributedOptimizer,
    "amp.GradScaler": smp.amp.GradScaler,
}


INTERNAL = {
    "check_options",
    "distribute",
    "distributing",
    "name_parameters",
    "use_parameters",
}
"""Names that the package's modules use of each other."""


def rows():
    """Return (symbol, test) of every row of the table of symbols."""
    text = (DOCS / "smp_v1_symbols.md").read_text(encoding="utf-8")
    found = [(row["symbols"], row["test"]) for row in ROW.finditer(text)]
    return [(name, test) for names, test in found for name in re.findall(r"`([\w.]+)`", names)]


def public_names():
    """Return all public names of the interface, with the methods of its classes."""
    names = set(smp.__all__) | {"StepOutput", "collect_outputs"}
    for prefix, kind in CLASSES.items():
        own = {name for name in vars(kind) if name[0] != "_"} - INTERNAL
        names |= {prefix} | {f"{prefix}.{name}" for name in own}
    names |= {f"nn.{n}" for n, each in vars(smp.nn).items() if _belongs(each, smp.nn)}
    names |= {f"optimizers.{n}" for n in vars(smp.optimizers) if n.startswith("Fused")}
    gpt2 = smp.nn.huggingface.gpt2
    names |= {f"nn.huggingface.gpt2.{n}" for n in vars(gpt2) if n.startswith("translate")}
    checkpoint = smp.patches.checkpoint
    return names | {
        f"patches.checkpoint.{n}" for n, e in vars(checkpoint).items() if _belongs(e, checkpoint)
    }


def _belongs(value, module):
    name = getattr(value, "__name__", "_")
    own = getattr(value, "__module__", "") == module.__name__
    return callable(value) and own and name[0] != "_" and name not in INTERNAL


def test_table_of_symbols_is_complete_and_true():
    listed = dict(rows())
    assert public_names() - listed.keys() == set()
    sources = "".join(path.read_text() for path in (HERE / "scripts").glob("*.py"))
    tests = {}
    for path in HERE.glob("test_*.py"):
        text = path.read_text()
        tests |= {name: text for name in re.findall(r"^def (test_\w+)", text, re.M)}
    unused = []
    for symbol, test in listed.items():
        found = smp
        for part in symbol.split("."):
            found = getattr(found, part)
        used = re.compile(rf"\b{symbol.rpartition('.')[2]}\b")
        if symbol != "DistributedModel.forward":  # called as model(...)
            unused += [symbol] * (test not in tests or not used.search(tests[test] + sources))
    assert not unused


def test_every_public_name_is_documented():
    for symbol in public_names():
        found = smp
        for part in symbol.split("."):
            found = getattr(found, part)
        if callable(found) and inspect.getdoc(found) is None:
            raise AssertionError(f"{symbol} has no docstring")


def test_table_of_keys_is_current():
    assert tables.page_table() == tables.key_table(), "run python -m ci.smp_scripts --write-tables"


def test_before_and_after_compute_the_same(interface, tmp_path):
    blocks = re.findall(r"```py\n(.*?)```", tables.PAGE.read_text(encoding="utf-8"), re.DOTALL)
    before, after = blocks

    def build():
        with nl.spmd.one_at_a_time(seed=3):
            return interface.AutoModelForCausalLM.from_config(interface.config())

    def read_batch(step, place, places):
        return interface.ids(step, 8).chunk(places)[place]

    def work(rank, block):
        variables = {"torch": torch, "build": build, "read_batch": read_batch, "rank": rank}
        exec(block, variables := variables | {"folder": str(tmp_path)})
        return variables["losses"]

    old, new = (nl.spmd.run(work, 4, args=(block,)) for block in (before, after))
    assert len(set(map(tuple, old))) == 4  # of different data
    for there, here in zip(old, new, strict=True):
        assert here == pytest.approx(there, abs=1e-5)


SCRIPTS = {
    "good.py": "print('Batch 0 Loss: 1.5, Speed'); print('done')",
    "other.py": "print('Loss: 1.6'); print('done')",
    "bad.py": "raise SystemExit('a reason')",
    "silent.py": "print('Loss: 1.5')",
    "slow.py": "import time; time.sleep(60)",
}


def test_harness_compares_runs_with_expectations(tmp_path, capsys):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)

    def run(name, **more):
        return Expectation(name, f"{name}.py", 1, "--max_steps 1", says="done", **more)

    expectations = [
        run("good"), run("other", losses_of="good"), run("bad"), run("silent"), run("missing"),
        Expectation("again", "good.py", 1, "", says="done", losses_of="good"),
    ]  # fmt: skip
    launch = [sys.executable]
    faults = run_all(expectations, tmp_path, tmp_path, tmp_path / "out", 30, launch)
    assert faults["good"] == faults["again"] == ""
    assert "losses differ by 1.0e-01 from those of 'good'" in faults["other"]
    assert faults["bad"] == "exit status 1: a reason"
    assert "lacks 'done'" in faults["silent"] and "there is no missing.py" in faults["missing"]
    slow = run_all([run("slow")], tmp_path, tmp_path, tmp_path / "out", 0.5, launch)
    assert "no end after" in slow["slow"]
    printed = capsys.readouterr().out
    assert "ok      good: 1 ranks" in printed and "FAILED  bad" in printed
    assert main(["--list", "--only", "plain"]) == 0
    assert "train_gpt_simple.py" in capsys.readouterr().out

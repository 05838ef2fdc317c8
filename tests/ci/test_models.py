"""`python -m ci.models`: a sample of families, isolation of crashes and hangs, and the page."""

import json
import subprocess
import sys

import pytest

from ci import models
from ci.models import Cell

UNSAFE = """
import os, sys, time
from ci import models

def check_family(family, task, techniques):
    for technique in techniques:
        yield models.Cell(family, task, technique, "", "begin")
        if family == "dies" and technique == "tp2":
            os._exit(3)
        if family == "hangs" and technique == "tp2":
            time.sleep(60)
        yield models.Cell(family, task, technique, "plain", "equal")

models.check_family, models.CELL_SECONDS, models.GRACE = check_family, 0.1, 0.5
techniques = {"shard": "", "tp2": "", "cp2": ""}
todo = [(family, "causal", techniques) for family in ("dies", "hangs", "works")]
for cell in models.run(todo, jobs=2):
    print(cell.family, cell.technique, cell.result, cell.detail)
"""


def test_a_crash_or_a_hang_ends_one_cell():
    done = subprocess.run([sys.executable, "-c", UNSAFE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {
        tuple(line.split(maxsplit=2)[:2]): line.split()[2] for line in done.stdout.splitlines()
    }
    expected = {
        (f, t): "equal" for f in ("dies", "hangs", "works") for t in ("shard", "tp2", "cp2")
    }
    assert found == expected | {("dies", "tp2"): "crash", ("hangs", "tp2"): "crash"}
    assert "exit code 3" in done.stdout and "no result in" in done.stdout


SAMPLE = (
    "qwen2 qwen3_moe phi3 granite cohere2 glm4 starcoder2 exaone4 gemma2 gpt_oss persimmon "
    "minimax_m3_vl_text"
)
"""Families without tests of their own that both tensor and pipeline parallelism support."""


@pytest.mark.slow
def test_a_sample_of_families_equals_one_process(tmp_path):
    """And a measured cell is not measured again."""
    cells = tmp_path / "cells.jsonl"
    measured = Cell("qwen2", "causal", "tp2", "plain", "equal", "measured before")
    cells.write_text(json.dumps(vars(measured)) + "\n")
    families = [*SAMPLE.split(), "vit", "gemma4_text", "jetmoe"]
    command = [sys.executable, "-m", "ci.models", "--families", ",".join(families)]
    command += ["--techniques", "tp2,pp2", "--kinds", "plain", "--json", str(cells)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = models.read_cells(cells)
    assert found[measured.key] == measured
    for family in SAMPLE.split():
        for technique in ("tp2", "pp2"):
            assert found[family, "causal", technique, "plain"].result == "equal"
    refused = [cell for cell in found.values() if cell.result == "refused"]
    assert {(cell.family, cell.technique) for cell in refused} >= {
        ("vit", "tp2"), ("gemma4_text", "pp2"), ("jetmoe", "tp2")
    }  # fmt: skip
    for cell in refused:
        assert "= 1" in cell.detail or "yourself" in cell.detail, cell


def test_page_lists_results_faults_and_reasons():
    reason = "tensor_parallel_degree > 1: AForCausalLM has no plan"
    cells = [
        Cell("a", "causal", "shard", "plain", "equal"),
        Cell("a", "causal", "tp2", "plain", "refused", reason),
        Cell("b", "causal", "shard", "plain", "equal"),
        Cell("b", "causal", "shard", "packed", "wrong", "module m, tensor w: the loss differs"),
        Cell("b", "causal", "tp2", "plain", "refused", reason.replace("AFor", "BFor")),
        Cell("c", "vision", "shard", "plain", "none", "no twin | here"),
    ]
    page = models.render(cells)
    assert "| a | equal | refused |" in page and "| b | equal: plain; WRONG: packed |" in page
    assert "2 equal, 2 refused with the reason, 1 wrong, 0 crashed" in page
    assert "**shard**, 1 causal families: a." in page
    assert "- b (causal), shard, packed: wrong. module m" in page
    assert page.count("MODEL has no plan *a, b*") == 1
    assert "- c (vision): no twin \\| here" in page


def test_later_lines_replace_earlier_cells(tmp_path):
    path = tmp_path / "cells.jsonl"
    first, again = (Cell("a", "causal", "tp2", "plain", result) for result in ("crash", "equal"))
    path.write_text("".join(json.dumps(vars(cell)) + "\n" for cell in (first, again)))
    assert [cell.result for cell in models.read_cells(path).values()] == ["equal"]

"""The GPU checklist: every stage is rehearsed on the CPU, and the page shows its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.gpu import carry, report, runner

ROOT = Path(__file__).parents[2]
FIELDS = {"stage", "mode", "proves", "started", "commit", "source", "device", "versions", "status",
          "reason", "seconds", "checks"}  # fmt: skip
CHECK_FIELDS = {"name", "status", "reason", "figures", "seconds"}
NEEDS_CARRIED = {"peers"}
"""Stages in which every check may be refused on a machine without the carried wheels."""


def checklist(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as on a GPU machine: from the checkout, with nothing on the path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-m", "ci.gpu", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_stage_passes_its_rehearsal(tmp_path):
    done = checklist("--rehearse", "--results", str(tmp_path))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for stage in runner.STAGES:
        found = json.loads((tmp_path / f"{stage.name}.json").read_text())
        assert FIELDS == set(found), stage.name
        assert found["stage"] == stage.name and found["mode"] == "rehearsal"
        refused = found["status"] == "refused" and stage.name in NEEDS_CARRIED
        assert found["status"] == "passed" or refused, found["reason"]
        assert found["versions"]["torch"] and found["device"]["name"] and found["checks"]
        for check in found["checks"]:
            assert CHECK_FIELDS == set(check)
            assert check["figures"] or check["reason"], check["name"]
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert memory["checks"][0]["figures"]["configurations"] == 30
    assert (tmp_path / "activation-offload.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="is not a result of a GPU"):
        report.render(tmp_path)


def settings(folder: Path, again: bool = False) -> runner.Settings:
    return runner.Settings(folder, rehearse=True, again=again)


def fails(recorder) -> None:
    with recorder.check("good") as figures:
        figures["answer"] = 42
    with recorder.check("bad"):
        raise ArithmeticError("out of luck")
    with recorder.check("after it") as figures:
        figures["answer"] = 43


def passes(recorder) -> None:
    with recorder.check("good") as figures:
        figures["pid"] = os.getpid()


def hangs(recorder) -> None:
    passes(recorder)
    subprocess.run(["sleep", "600"])


def dies(recorder) -> None:
    passes(recorder)
    os._exit(7)


def test_stages_that_fail_hang_or_die_do_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PRELOADED", ())
    stages = [runner.Stage(function.__name__, 0.2 if function is hangs else 1, "",
                           f"{__name__}:{function.__name__}")
              for function in (fails, hangs, dies, passes)]  # fmt: skip
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert runner.run(stages, settings(tmp_path)) == 3
    found = {s.name: json.loads((tmp_path / f"{s.name}.json").read_text()) for s in stages}
    assert {name: result["status"] for name, result in found.items()} == {
        "fails": "failed", "hangs": "failed", "dies": "failed", "passes": "passed"}  # fmt: skip
    assert [check["status"] for check in found["fails"]["checks"]] == ["passed", "failed", "passed"]
    assert found["fails"]["checks"][1]["reason"] == "ArithmeticError: out of luck"
    assert found["fails"]["reason"] == "1 of 3 checks: bad"
    assert found["hangs"]["reason"] == "stopped at its limit of 0.2 min"
    assert found["dies"]["reason"] == "its process ended with code 7"
    assert found["hangs"]["checks"][0]["name"] == found["dies"]["checks"][0]["name"] == "good"

    def pid() -> int:
        return json.loads((tmp_path / "passes.json").read_text())["checks"][0]["figures"]["pid"]

    before = pid()
    assert runner.run(stages[-1:], settings(tmp_path)) == 0
    assert pid() == before, "a stage that has passed runs again"
    monkeypatch.setattr(runner, "source_hash", lambda: "other sources")
    runner.run(stages[-1:], settings(tmp_path))
    assert pid() != before, "changed sources must be checked again"
    before = pid()
    runner.run(stages[-1:], settings(tmp_path, again=True))
    assert pid() != before


def test_list_names_every_stage_with_its_limit_and_purpose():
    lines = report.format_stages(list(runner.STAGES)).splitlines()
    assert len(lines) == len(runner.STAGES) >= 9
    for line, stage in zip(lines, runner.STAGES, strict=True):
        assert line.startswith(stage.name) and stage.proves in line
        assert f"{stage.minutes:g} min" in line and stage.minutes <= 8


def test_page_is_the_rendered_results():
    assert report.PAGE.read_text() == report.render(runner.RESULTS), "run python -m ci.gpu --render"


def test_page_shows_results_and_drops_proven_entries(tmp_path):
    unproven = report.render(tmp_path)
    assert unproven.count("| not yet run |") == len(runner.STAGES)
    assert len(report.ENTRIES) == len(runner.STAGES)
    assert all(stage in {s.name for s in runner.STAGES} for stage, _ in report.ENTRIES)
    check = {"name": "a | b", "status": "failed", "reason": "too slow", "figures": {"ms": 3}}
    result = {"stage": "memory", "mode": "gpu", "started": "2026-01-02 03:04:05", "commit": "abc",
              "device": {"name": "H100"}, "versions": {"torch": "2.11.0"}, "status": "passed",
              "reason": "", "seconds": 9.0, "checks": [check]}  # fmt: skip
    (tmp_path / "memory.json").write_text(json.dumps(result))
    page = report.render(tmp_path)
    assert "| memory | passed on H100, 2026-01-02 |" in page
    assert r"| a \| b | failed | ms 3; too slow |" in page
    entry = dict(report.ENTRIES)["memory"][:40]
    assert entry in unproven and entry not in page
    (tmp_path / "other.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match="no such stage"):
        report.render(tmp_path)


def test_commands_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match="allowed are correctness, memory"):
        runner.find_stages("speed,nothing")
    with pytest.raises(ValueError, match="python -m ci.gpu --carry"):
        carry.unpack(tmp_path)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "ci.gpu", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "add --rehearse" in done.stderr
    assert not list(tmp_path.iterdir())


def test_carried_wheels_are_importable_after_unpacking(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "")
        wheel.writestr("peer/data.txt", "read me")
    manifest = {"commit": "abc", "wheels": {"peer-1-py3-none-any.whl": 1}}
    (tmp_path / carry.MANIFEST).write_text(json.dumps(manifest))
    site = carry.unpack(tmp_path)
    assert (site / "peer" / "data.txt").read_text() == "read me"
    assert carry.unpack(tmp_path) == site and carry.commit(tmp_path) == "abc"

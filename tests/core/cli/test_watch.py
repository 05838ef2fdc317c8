"""``nearlinear watch`` on a running job, on a terminal and on a log."""

import io
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from nearlinear import cli
from nearlinear.cli.watch import command
from nearlinear.errors import ConfigError
from nearlinear.train.metrics import Reporter, format_line
from tests.support.command_line import nearlinear
from tests.support.runs import ROW, ranks_at

WATCH = [sys.executable, "-m", "nearlinear.cli", "watch"]
DEADLINE = 60.0  # seconds, for a busy machine


def row(step, **changes):
    return ROW | {"step": step, "time": time.time()} | changes


def write(folder, steps, mode="w"):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", mode) as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in steps)


# ---- once --------------------------------------------------------------------------------------


def test_watch_once_needs_no_terminal(tmp_path):
    reporter = Reporter(tmp_path / "run", 20, active=True, tensorboard=False)
    reporter.introduce(20, 4096, ["algo-1"] * 4)
    for step in range(1, 11):
        reporter.log_step(row(step) | ranks_at([0.1] * 4, [0.3, 0.3, 0.9, 0.3]))
    reporter.close()
    for where in (tmp_path / "run", tmp_path / "run" / "metrics.jsonl"):
        shown = nearlinear("watch", where, "--once")
        assert shown.returncode == 0 and shown.stderr == "" and "\x1b" not in shown.stdout
        assert "step 10 of 20" in shown.stdout
        assert "slow: rank 2 on algo-1 computes 0.6 s longer" in shown.stdout


def test_watch_once_reads_a_log_from_a_pipe(tmp_path):
    log = "mesh\n20 steps of 4,000 tokens by 4 ranks on 2 hosts\n"
    log += "".join(f"[algo-1] {format_line(row(step))}\n" for step in (1, 2, 3))
    done = subprocess.run([*WATCH, "-", "--once"], input=log, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[0].split(maxsplit=2)[2] == "step 3 of 20   ETA 1 min 08 s"
    (tmp_path / "slurm-1.out").write_text(log)
    assert "step 3 of 20" in nearlinear("watch", tmp_path / "slurm-1.out", "--once").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--once"], "nowhere/metrics.jsonl: no such file"),
        (["nowhere.log", "--once"], "nowhere.log: no such file"),
        (["run.toml"], "run.toml is a config file"),
    ],
)
def test_watch_error_is_one_line(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and words in err and err.count("\n") == 1


def test_watch_refuses_a_terminal_as_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(ConfigError, match="pipe a log into it"):
        command.run_watch("-")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", "runs/latest/metrics.jsonl"),
        ("runs/gpt2.5", "runs/gpt2.5/metrics.jsonl"),
        ("a.jsonl", "a.jsonl"),
        ("slurm-7.out", "slurm-7.out"),
    ],
)
def test_metrics_file_of_a_path_that_does_not_exist(where, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(command.find_metrics_file(where)) == expected


def test_metrics_file_of_a_folder_named_like_a_log(tmp_path):
    (tmp_path / "a.out").mkdir()
    assert command.find_metrics_file(str(tmp_path / "a.out")).name == "metrics.jsonl"
    (tmp_path / "log").touch()
    assert command.find_metrics_file(str(tmp_path / "log")).name == "log"


def test_watch_imports_no_torch(tmp_path):
    write(tmp_path, [1, 2])
    code = (
        "import sys; from nearlinear import cli; "
        f"assert cli.main(['watch', {str(tmp_path)!r}, '--once']) == 0; "
        "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_documented_commands_parse():
    page = Path(__file__).resolve().parents[3] / "packages/core/docs/howto/watch.md"
    commands = page.read_text().partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 5
    for text in commands:
        for part in text.partition("  #")[0].split("|"):
            program, *arguments = part.split()
            assert program == "nearlinear" and cli.build_parser().parse_args(arguments).run


# ---- following ---------------------------------------------------------------------------------


class Follower:
    """``nearlinear watch`` in the background, and its output."""

    def __init__(self, where, terminal=False, rows=40, columns=100):
        if terminal:
            self.out, theirs = pty.openpty()
            self.resize(rows, columns)
        else:
            self.out, theirs = os.pipe()
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
        for size in ("LINES", "COLUMNS"):
            environment.pop(size, None)
        self.child = subprocess.Popen(
            [*WATCH, str(where)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        os.close(theirs)
        self.printed = ""

    def resize(self, rows, columns):
        ioctl(self.out, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, words):
        """Read until ``words`` are printed and return the output since the last call."""
        begin, deadline = len(self.printed), time.monotonic() + DEADLINE
        while words not in self.printed[begin:]:
            assert select.select([self.out], [], [], deadline - time.monotonic())[0], self.printed
            self._read()
        return self.printed[begin:]

    def stop(self):
        """Send Ctrl-C and return the exit status."""
        self.child.send_signal(signal.SIGINT)
        while select.select([self.out], [], [], DEADLINE)[0] and self._read():
            pass
        return self.child.wait(DEADLINE)

    def _read(self):
        try:
            block = os.read(self.out, 1 << 16)
        except OSError:  # a terminal whose other end is closed
            block = b""
        self.printed += block.decode(errors="replace")
        return block


@pytest.fixture
def follow():
    """Return a function that starts a `Follower`; all of them are killed after the test."""
    started = []

    def start(*arguments, **options):
        started.append(Follower(*arguments, **options))
        return started[-1]

    yield start
    for follower in started:
        follower.child.kill()
        follower.child.wait()
        os.close(follower.out)


def test_watch_prints_new_lines(tmp_path, follow):
    """Cover a file that does not exist yet, half a line, and a second run in the same file."""
    run = tmp_path / "run"
    watching = follow(run)
    watching.until(f"waiting for {run / 'metrics.jsonl'}")
    write(run, [1, 2])
    watching.until("step=2 loss=6.0000")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(3))[:30])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(3))[30:] + "\n" + json.dumps(row(4, loss=None)) + "\n")
    seen = watching.until("the run has diverged")
    assert "step=3 loss=6.0000" in seen and "step=4 loss=nan" in seen
    write(run, [1])
    assert "step=1 loss=6.0000" in watching.until("step=1")
    assert watching.stop() == 0
    assert watching.printed.count("step=") == 5 and "Traceback" not in watching.printed


def test_watch_redraws_a_terminal(tmp_path, follow):
    run = tmp_path / "run"
    watching = follow(run, terminal=True)
    watching.until("no step has been reported yet")
    write(run, range(1, 8))
    assert "\x1b[?1049" in watching.printed  # the alternate screen
    assert width(watching.until("step 7")) > 60
    watching.resize(40, 60)
    watching.until("step 7")  # may have been drawn before or during the resize
    watching.until("step 7")
    write(run, [8], "a")
    assert width(watching.until("step 8")) <= 60
    assert watching.stop() == 0
    left = watching.printed.rpartition("\x1b[?1049l")[2]  # printed on the normal screen
    assert "step 8" in left and "Traceback" not in watching.printed


def width(screens):
    """Return the width of the widest line without cursor movements and colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", screens)
    return max(map(len, re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r?\n", text)))


def test_watch_ends_with_its_log(tmp_path):
    log = "".join(f"{format_line(row(step))}\n" for step in (1, 2))
    done = subprocess.run(
        [*WATCH, "-"], input=log, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == log


# ---- dashboard ---------------------------------------------------------------------------------


def test_dashboard_needs_events(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    assert cli.main(["dashboard", str(tmp_path)]) == 2
    assert "holds no TensorBoard events" in capsys.readouterr().err


def test_dashboard_address(tmp_path):
    app = tmp_path / "resource-metadata.json"
    assert command.format_address(6006, app) == "http://127.0.0.1:6006/"
    app.write_text('{"AppType": "JupyterLab", "DomainId": "d-1"}')
    assert "/jupyterlab/default/proxy/6007/" in command.format_address(6007, app)
    app.write_text('{"AppType": "KernelGateway"}')
    assert command.format_address(6006, app) == "http://127.0.0.1:6006/"


def test_dashboard_skips_a_used_port():
    first = command.find_free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert command.find_free_port() > first

"""Small corpora, and comparison of prepared folders."""

import gzip
import json
import os
import random
import signal

from data_prep import output, pool

OPTIONS = {"progress": False, "val_fraction": 0.2, "workers": 1, "backends": ("tokenizers",)}
"""Options of `prepare`: one process, no output."""


def write_lines(path, documents=120, seed=0):
    """Write JSON lines of words from a to g, with duplicates. Return the texts."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randint(1, 30))) for _ in range(documents)]
    texts += texts[10:20]  # duplicates in another split
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_rows(path, rows):
    """Write JSON lines, compressed if the name of the file says so. Return the path."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def contents(folder):
    """Map each file except the history to its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.is_file() and p.name != "preparation.json"}  # fmt: skip


def killed_at(number, work):
    """Run `work` in a process that is killed at its `number`th durable call or worker wait.

    Return False if the process ended before.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), (
            "the process ended with an error"
        )
        return os.WIFSIGNALED(status)
    left = [number]

    def deadly(call):
        def dying(*arguments, **options):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return dying

    for name in ("fsync", "rename", "replace", "link", "rmdir", "unlink"):
        setattr(os, name, deadly(getattr(os, name)))
    output.exchange_paths = deadly(output.exchange_paths)
    pool._WorkerProcess._wait_for = deadly(pool._WorkerProcess._wait_for)
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)

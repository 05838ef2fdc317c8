"""Text that is soon prepared, and what came of it: for the tests of data preparation."""

import json
import os
import random
import signal

from data_prep import output, pool

OPTIONS = {"progress": False, "val_fraction": 0.2, "workers": 1, "backends": ("tokenizers",)}
"""of `prepare`: in this process, and nothing said"""


def write_lines(path, documents=120, seed=0):
    """JSON lines of words from a to g, some of them twice; the texts."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randint(1, 30))) for _ in range(documents)]
    texts += texts[10:20]  # duplicates, in another split
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def contents(folder):
    """Every file but the history of its making."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*")
            if p.is_file() and p.name != "preparation.json"}  # fmt: skip


def killed_at(number, work):
    """Whether a process that does `work` dies at its `number`th call that makes things last,
    or waits for a worker.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status), "it ended with an error"
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
    output.exchange = deadly(output.exchange)
    pool._Worker._answer = deadly(pool._Worker._answer)
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)

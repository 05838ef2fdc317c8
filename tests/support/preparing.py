"""Text that is soon prepared, and what came of it: for the tests of data preparation."""

import json
import random

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

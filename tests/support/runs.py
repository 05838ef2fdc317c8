"""Synthetic histories of runs for the tests of ``nearlinear watch``."""

from nearlinear.cli.watch.history import History

ROW = {
    "step": 1,
    "loss": 6.0,
    "lr": 1e-5,
    "grad_norm": 0.0,
    "tokens_per_s": 1000.0,
    "tflops_per_gpu": 1e-6,
    "mfu": 0.4,
    "mem_gib": 1.0,
}


def history(count, **changes):
    """Return a history of ``count`` steps of 2 s; ``changes``: values or functions of the step."""
    found = History()
    for step in range(1, count + 1):
        more = {name: v(step) if callable(v) else v for name, v in changes.items()}
        found.add(ROW | {"step": step, "time": 1e9 + 2 * step} | more)
    return found


def ranks_at(load, compute, step=1.0):
    return {"load_seconds": load, "compute_seconds": compute, "step_seconds": [step] * len(load)}

"""Check every family of transformers with every technique: ``python -m ci.models``.

Each cell compares a small twin of a family, in one layout, with one process: the comparison of
`nearlinear check`. Cells are written to a file of JSON lines as they are measured, so that a run
can be continued. A family runs in a process of its own; a crash or a hang ends one cell.

    python -m ci.models --families llama,gemma3_text --techniques cp2,tp2
    python -m ci.models --json cells.jsonl --jobs 2           all families, resumable
    python -m ci.models --json cells.jsonl --again wrong,crash --write
    PYTHONPATH=FOLDER python -m ci.models --write PAGE        another transformers, in FOLDER
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "packages/core/docs/models.md"
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
"""Mapping of transformers that lists the families of each task."""

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "shard": {},
    "recompute": {"checkpoint": "each"},
    "deferred": {"deferred": True},
    "tp2": {"parallel": {"tensor_parallel_degree": 2}},
    "cp2": {"parallel": {"context_parallel_degree": 2}},
    "pp2": {"parallel": PIPELINE},
    "ep2": {"parallel": {"expert_parallel_degree": 2}},
}
KNOWN_KINDS = ("plain", "left", "right", "packed")
KINDS = {"recompute": "plain,packed", "deferred": "plain", "ep2": "plain,right"}
"""Kinds of batches that show the faults of a technique; the others take all kinds."""

RANKS = 2
CELL_SECONDS = 180.0
"""Time limit of one comparison."""

HANG = "no result in"
"""Beginning of the reason of a cell that did not end."""

GRACE = 30.0
"""Seconds after the limit until the process of a family is ended."""

LARGEST_TWIN = 15_000_000
"""Parameters of a twin; larger ones have sizes that the reduction does not know."""

REASONS = {"equal": "equals one process", "refused": "refused with the reason", "wrong": "differs",
           "crash": "ends with another error", "none": "no twin"}  # fmt: skip

EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
        "layer_types": ["full_attention"] * 40,
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 8}},
    "deepseek_v2": EXPERTS,
    "dots1": EXPERTS | {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron": {"num_key_value_heads": 8},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "reformer": {"is_decoder": True},
}
"""Arguments of config classes whose defaults describe no model."""

WINDOWS: dict[str, Any] = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
"""Settings of the variant ``+window`` of families that have a window, off by default."""


@dataclass
class Cell:
    """Result of one family, technique and kind of batch."""

    family: str
    task: str
    technique: str
    kind: str
    result: str
    """equal, refused, wrong, crash, or none without a twin"""
    detail: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.family, self.task, self.technique, self.kind


def list_families(wanted: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return (family, task) of ``wanted`` or all families, with variants that enable a window."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found = []
    for task, mapping in TASKS.items():
        for family in getattr(modeling_auto, mapping)._model_mapping:
            found.append((family, task))
            variant = f"{family}+window"
            chosen = not wanted or variant in wanted
            if task == "causal" and chosen and family in CONFIG_MAPPING and _window_is_off(family):
                found.append((variant, task))
    return [each for each in found if not wanted or each[0] in wanted]


def _window_is_off(family: str) -> bool:
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[family](**ARGUMENTS.get(family, {}))
    except Exception:  # noqa: BLE001 - reported by the family itself
        return False
    if getattr(config, "use_sliding_window", None) is False:
        return True
    return "sliding_window" in config.to_dict() and config.sliding_window is None


def describe(family: str, task: str) -> tuple[type, Any]:
    """Return the class of a family's model and the config of its class' defaults."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    name, _, variant = family.partition("+")
    config_class = CONFIG_MAPPING[name]
    arguments = dict(ARGUMENTS.get(name, {}))
    if variant:
        known = config_class(**arguments).to_dict()
        arguments |= {key: value for key, value in WINDOWS.items() if key in known}
    config = config_class(**arguments)
    if getattr(config, "is_encoder_decoder", False):
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    kind = getattr(modeling_auto, TASKS[task])[config_class]
    kind = kind[0] if isinstance(kind, tuple) else kind
    if getattr(kind, "config_class", None) not in (None, config_class):
        config = config.get_text_config()  # the text model of a model for images, too
    return kind, config


def check_family(family: str, task: str, techniques: dict[str, str]) -> Iterator[Cell]:
    """Yield the cells of a family, after a `Cell` that announces each technique.

    ``techniques``: comma-separated kinds of batches by technique; "" for all kinds.
    """
    import torch

    from nearlinear.errors import NearlinearError
    from nearlinear.train.self_check.compare import run_alone
    from nearlinear.train.self_check.probe import Probe, kinds_of, probe_batches
    from nearlinear.train.self_check.twin import TwinSize, build_twin, spread_values, twin_config

    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        model_class, full = describe(family, task)
        twin = twin_config(full, TwinSize())
        with torch.device("meta"):
            size = sum(p.numel() for p in build_twin(model_class, twin).parameters())
        if size > LARGEST_TWIN:
            raise ValueError(f"the twin has {size:,} parameters")
        model = build_twin(model_class, twin)
        spread_values(model)
        stacked = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
        kinds, reason = [], ""
        wanted = {"plain", *",".join(techniques.values()).split(",")}
        every = "" in techniques.values()
        for kind in (each for each in kinds_of(model) if every or each in wanted):
            try:
                parts = probe_batches(model, Probe.for_degrees(1, 1, 1), kind, _vocabulary(twin))
                if not run_alone(model, parts, torch.device("cpu")).norm > 0:
                    raise ValueError("the loss has no gradient")
                kinds.append(kind)
            except Exception as error:  # noqa: BLE001 - models reject kinds in many ways
                reason = reason or _describe_error(error)
        if "plain" not in kinds:
            raise ValueError(f"one process cannot train it: {reason}")
    except Exception as error:  # noqa: BLE001 - the family has no reference
        detail = str(error) if isinstance(error, NearlinearError) else _describe_error(error)
        for technique in techniques:
            yield Cell(family, task, technique, "plain", "none", detail, time.monotonic() - start)
        return
    del model
    for technique in techniques:
        if technique.startswith("ep") and not stacked:
            yield Cell(family, task, technique, "plain", "none", "no experts")
            continue
        yield Cell(family, task, technique, "", "begin")
        chosen = techniques[technique] or ",".join(kinds)
        own = tuple(kind for kind in kinds if kind in chosen.split(","))
        if not own:
            yield Cell(family, task, technique, "plain", "none", f"takes no batch {chosen}")
            continue
        yield from _check_technique(family, task, technique, model_class, full, own)


def _vocabulary(twin: Any) -> int:
    from nearlinear.train.self_check.compare import vocabulary_of

    return vocabulary_of(twin)


def _check_technique(
    family: str, task: str, technique: str, model_class: type, full: Any, kinds: tuple[str, ...]
) -> Iterator[Cell]:
    """Yield the cells of one technique: all kinds in one run, or one by one after an error."""
    start = time.monotonic()
    results = _run(technique, model_class, full, kinds)
    if isinstance(results, dict):
        seconds = (time.monotonic() - start) / len(kinds)
        for kind, found in results.items():
            result = ("wrong", found) if found else ("equal", "")
            yield Cell(family, task, technique, kind, *result, seconds)
        return
    if results[1].startswith(HANG):
        for kind in kinds:
            yield Cell(family, task, technique, kind, *results, time.monotonic() - start)
        return
    for number, kind in enumerate(kinds):
        start = time.monotonic()
        single = results if len(kinds) == 1 else _run(technique, model_class, full, (kind,))
        seconds = time.monotonic() - start
        if isinstance(single, dict):
            result = ("wrong", single[kind]) if single[kind] else ("equal", "")
        else:
            result = single
        yield Cell(family, task, technique, kind, *result, seconds)
        if number == 0 and result[0] == "refused" and result[1] == results[1]:
            for other in kinds[1:]:  # refused by the model's structure
                yield Cell(family, task, technique, other, *result)
            return


def _run(
    technique: str, model_class: type, full: Any, kinds: tuple[str, ...]
) -> dict[str, str] | tuple[str, str]:
    """Return the difference of each kind ("" if equal), or (refused or crash, reason)."""
    import nearlinear as nl
    from nearlinear.config.train import ActivationsConfig, TrainConfig
    from nearlinear.errors import NearlinearError, RankError

    settings = TECHNIQUES[technique]
    config = TrainConfig(
        parallel=nl.ParallelConfig(**settings.get("parallel", {})),
        activations=ActivationsConfig(checkpoint=settings.get("checkpoint", "")),
    )
    arguments = (model_class, full, config, kinds, settings.get("deferred", False))
    try:
        return nl.spmd.run(_work, RANKS, args=arguments, timeout=CELL_SECONDS)[0]
    except RankError as error:
        cause = error.__cause__
        if isinstance(cause, NearlinearError) and not isinstance(cause, RankError):
            return "refused", " ".join(str(cause).split())
        if isinstance(cause, TimeoutError) or cause is None:
            return "crash", f"{HANG} {CELL_SECONDS:g} s: {str(error).partition(chr(10))[0]}"
        return "crash", _describe_error(cause)


def _work(
    rank: int, model_class: type, full: Any, config: Any, kinds: tuple[str, ...], deferred: bool
) -> dict[str, str]:
    import nearlinear as nl
    from nearlinear.train.self_check.compare import compare, twin_size
    from nearlinear.train.self_check.twin import twin_config

    nl.init(config.parallel)
    twin = twin_config(full, twin_size(config))
    found = compare(model_class, twin, config, kinds, deferred)
    return {kind: "" if each is None else str(each) for kind, each in found.items()}


def _describe_error(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno}" for f in frames]
    own = [place for f, place in zip(frames, places, strict=True) if "nearlinear" in f.filename]
    message = " ".join(str(error).split())[:240]
    return f"{type(error).__name__}: {message} (at {', '.join([*own[-2:], *places[-1:]])})"


# the processes


class Worker:
    """A process that checks one family."""

    def __init__(self, family: str, task: str, techniques: dict[str, str]):
        self.family, self.task, self.left = family, task, techniques
        self.technique = next(iter(techniques))
        context = multiprocessing.get_context("fork")  # shares the imported modules
        self.results, ours = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(ours, family, task, techniques))
        self.process.start()
        ours.close()
        self.deadline = time.monotonic() + 2 * CELL_SECONDS + GRACE

    def receive(self) -> Cell | None:
        """Return the next cell, or None at the end of the process."""
        try:
            cell = Cell(**json.loads(self.results.recv_bytes()))
        except EOFError:
            return None
        self.technique = cell.technique
        self.deadline = time.monotonic() + CELL_SECONDS + GRACE
        return cell

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.results.close()


def _child(results: Any, family: str, task: str, techniques: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    for cell in check_family(family, task, techniques):
        results.send_bytes(json.dumps(asdict(cell)).encode())
    results.close()
    os._exit(0)  # threads of stopped ranks may be left


def run(todo: list[tuple[str, str, dict[str, str]]], jobs: int) -> Iterator[Cell]:
    """Yield the cells of (family, task, techniques) as they are measured, in ``jobs`` processes.

    ``techniques``: see `check_family`.
    """
    waiting, workers = list(reversed(todo)), []
    done: dict[Worker, set[str]] = defaultdict(set)
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(Worker(*waiting.pop()))
            ready = multiprocessing.connection.wait([w.results for w in workers], timeout=1)
            for worker in list(workers):
                ended = worker.deadline < time.monotonic()
                if worker.results in ready:
                    cell = worker.receive()
                    if cell is not None:
                        done[worker].add(cell.technique)
                        if cell.result != "begin":
                            yield cell
                        continue
                    ended = True
                if not ended:
                    continue
                worker.process.join(timeout=5)
                code = worker.process.exitcode
                worker.stop()
                workers.remove(worker)
                if code == 0:
                    continue
                reason = f"{HANG} {CELL_SECONDS:g} s" if code is None else f"exit code {code}"
                yield Cell(worker.family, worker.task, worker.technique, "plain", "crash", reason)
                over = done[worker] | {worker.technique}
                left = {name: kinds for name, kinds in worker.left.items() if name not in over}
                if left:
                    waiting.append((worker.family, worker.task, left))
    finally:
        for worker in workers:
            worker.stop()


# the table


def read_cells(path: Path) -> dict[tuple[str, str, str, str], Cell]:
    """Read measured cells; later lines replace earlier ones."""
    if not path.exists():
        return {}
    cells = (Cell(**json.loads(line)) for line in path.read_text().splitlines() if line.strip())
    return {cell.key: cell for cell in cells}


def summarize(cells: Iterable[Cell]) -> str:
    """Return the text of one field of the table: the result of all kinds of batches."""
    by_result = defaultdict(list)
    for cell in cells:
        by_result[cell.result].append(cell.kind)
    if not by_result:
        return "?"
    if set(by_result) == {"none"}:
        return "–"
    if len(by_result) == 1:
        return _shown(next(iter(by_result)))
    parts = [
        f"{_shown(result)}: {', '.join(kinds)}"
        for result, kinds in sorted(by_result.items(), key=lambda item: -len(item[1]))
    ]
    return "; ".join(parts)


def _shown(result: str) -> str:
    return result.upper() if result in ("wrong", "crash") else result


def render(cells: Iterable[Cell]) -> str:
    """Return the page of all families."""
    import torch
    import transformers

    ordered = list(cells)
    names = [t for t in TECHNIQUES if any(cell.technique == t for cell in ordered)]
    rows: dict[tuple[str, str], dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in ordered:
        rows[cell.task, cell.family][cell.technique].append(cell)
    counts = defaultdict(int)
    for cell in ordered:
        counts[cell.result] += 1
    built = {
        key: row
        for key, row in rows.items()
        if any(cell.result != "none" for each in row.values() for cell in each)
    }
    measured = {name: {cell.kind for cell in ordered if cell.technique == name} for name in names}
    lines = [
        f"# Model families of transformers {transformers.__version__}",
        "",
        "`python -m ci.models --write` measures this page: it builds a small twin of each family",
        "of transformers from a reduced config, trains one step of it with each technique on two",
        "ranks, and compares the loss and every gradient with one process, as `nearlinear check`",
        "does. Batches have uneven labels (plain), also with padding on the left or right, or with",
        "packed documents and their `position_ids`; as measured:",
        "",
        *(
            f"- **{name}**: {', '.join(kind for kind in KNOWN_KINDS if kind in measured[name])}"
            for name in names
        ),
        "",
        f"Measured {datetime.date.today()} with torch {torch.__version__.partition('+')[0]} on "
        f"CPU ranks: {len(built)} families.",
        f"Cells: {counts['equal']} equal, {counts['refused']} refused with the reason, "
        f"{counts['wrong']} wrong, {counts['crash']} crashed.",
        "",
        "- **equal**: loss and gradients are those of one process.",
        "- **refused**: nearlinear rejects the combination before the first step, with the reason.",
        "- **WRONG**, **CRASH**: faults, listed below.",
        "- **–**: not applicable. **?**: not measured.",
        "",
    ]  # fmt: skip
    for technique in names:
        equal = sorted(
            family
            for (task, family), row in built.items()
            if task == "causal" and any(c.result == "equal" for c in row[technique])
            and not any(c.result in ("wrong", "crash") for c in row[technique])
        )  # fmt: skip
        lines += [f"**{technique}**, {len(equal)} causal families: {', '.join(equal)}.", ""]
    for task in TASKS:
        families = sorted(family for other, family in built if other == task)
        if not families:
            continue
        lines += [f"## {task}", "", "| family | " + " | ".join(names) + " |"]
        lines += ["|:--|" + ":--|" * len(names)]
        for family in families:
            row = built[task, family]
            lines.append(
                f"| {family} | " + " | ".join(summarize(row[name]) for name in names) + " |"
            )
        lines.append("")
    faults = [cell for cell in ordered if cell.result in ("wrong", "crash")]
    if faults:
        lines += ["## Faults", ""]
        lines += [
            f"- {c.family} ({c.task}), {c.technique}, {c.kind}: {c.result}. {_cell_text(c.detail)}"
            for c in sorted(faults, key=lambda c: c.key)
        ]
        lines.append("")
    reasons: dict[str, set[str]] = defaultdict(set)
    for cell in ordered:
        if cell.result == "refused":
            reasons[_generalize(cell.detail)].add(cell.family)
    lines += ["## Reasons of refusals", ""]
    for reason, families in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"- {_cell_text(reason)} *{', '.join(sorted(families))}*")
    none = {
        (cell.family, cell.task): cell.detail
        for cell in ordered
        if cell.result == "none" and (cell.task, cell.family) not in built
    }
    lines += ["", "## Families without a twin", ""]
    lines += [f"- {f} ({t}): {_cell_text(detail)}" for (f, t), detail in sorted(none.items())]
    return "\n".join(lines).rstrip() + "\n"


def _cell_text(text: str) -> str:
    return re.sub(r"([*|<`])", r"\\\1", text)


def _generalize(reason: str) -> str:
    """Return a reason without the names of one model, so that equal reasons are one entry."""
    reason = re.sub(r"\b[A-Z]\w*(?:For\w+|LMHead\w*|Model\b|Config\b)", "MODEL", reason)
    return re.sub(r"\.\d+\.", ".*.", reason)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare every model family of transformers with one process.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    parser.add_argument("--tasks", default="", help=f"comma-separated, of {', '.join(TASKS)}")
    parser.add_argument("--techniques", default=",".join(TECHNIQUES), help="comma-separated")
    parser.add_argument("--kinds", default="", help="of batches, e.g. plain,packed; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time (1)")
    parser.add_argument("--json", default="", metavar="OUT", help="file of cells; continued")
    parser.add_argument("--again", default="", help="results to measure again, e.g. wrong,crash")
    parser.add_argument(
        "--write", nargs="?", const=PAGE, type=Path, metavar="PAGE", help=f"write {PAGE.name}"
    )
    options = parser.parse_args(arguments)
    for name, given, allowed in (
        ("--techniques", options.techniques, TECHNIQUES),
        ("--tasks", options.tasks, TASKS),
        ("--again", options.again, REASONS),
    ):
        for unknown in set(filter(None, given.split(","))) - set(allowed):
            parser.error(f"{name} {unknown}: allowed are {', '.join(allowed)}")
    import transformers

    import nearlinear.train.self_check.compare  # noqa: F401 - before the processes are forked

    transformers.logging.set_verbosity_error()
    techniques = options.techniques.split(",")
    kinds = {name: options.kinds or KINDS.get(name, "") for name in techniques}
    path = Path(options.json) if options.json else None
    cells = read_cells(path) if path else {}
    repeat = set(filter(None, options.again.split(",")))
    measured = {key[:3] for key, cell in cells.items()}
    measured -= {key[:3] for key, cell in cells.items() if cell.result in repeat}
    wanted, tasks = set(filter(None, options.families.split(","))), options.tasks.split(",")
    families = [
        (family, task)
        for family, task in list_families(wanted)
        if not options.tasks or task in tasks
    ]
    if missing := wanted - {family for family, _ in families}:
        parser.error(f"--families: transformers {transformers.__version__} has no {min(missing)}")
    todo = [
        (family, task, left)
        for family, task in families
        if (left := {t: kinds[t] for t in techniques if (family, task, t) not in measured})
    ]
    for cell in run(todo, options.jobs):
        cells[cell.key] = cell
        if path:
            with path.open("a") as file:
                file.write(json.dumps(asdict(cell)) + "\n")
        print(
            f"{cell.family:24} {cell.task:8} {cell.technique:9} {cell.kind:7} "
            f"{_shown(cell.result):7} {cell.seconds:5.1f} s  {cell.detail[:160]}",
            flush=True,
        )
    chosen = [c for c in cells.values() if (c.family, c.task) in set(families)]
    if options.write:
        options.write.write_text(render(cells.values()))
    faults = [cell for cell in chosen if cell.result in ("wrong", "crash")]
    grouped = itertools.groupby(sorted(c.result for c in chosen))
    print(", ".join(f"{len(list(group))} {result}" for result, group in grouped))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

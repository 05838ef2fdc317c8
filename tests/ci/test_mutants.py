"""`ci.mutants`: mutations change one place, and the results of a run are kept and reported."""

import ast
import json

from ci.mutants import __main__ as command
from ci.mutants import mutations, survivors, targets

SOURCE = b'''
"""Docstring with 3 numbers."""
import logging
log = logging.getLogger()

def limit(values: list[int], most: int = 3) -> int:
    """Return \xc3\xa9."""
    log.info("%d values", 2)
    if len(values) < most and values:
        raise ValueError("fewer than 3")
    values.append(most - 1)
    return values[0] // most
'''

CONDITION = "len(values) < most and values"


def test_mutations_change_one_place_and_leave_messages_alone():
    found = mutations.find_mutations(SOURCE)
    for each in found:
        changed = each.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), each
        assert changed[: each.begin] == SOURCE[: each.begin]
        assert b'"%d values", 2' in changed and "numbers" in changed.decode()
    assert {(each.kind, each.before, each.after) for each in found} == {
        ("off by one", "3", "(4)"),
        ("negated condition", CONDITION, f"(not ({CONDITION}))"),
        ("and/or", CONDITION, "(len(values) < most or values)"),
        ("comparison", "len(values) < most", "(len(values) <= most)"),
        ("dropped statement", 'raise ValueError("fewer than 3")', "pass"),
        ("dropped statement", "values.append(most - 1)", "pass"),
        ("operator", "most - 1", "(most + 1)"),
        ("swapped operands", "most - 1", "(1 - most)"),
        ("off by one", "1", "(2)"),
        ("operator", "values[0] // most", "(values[0] * most)"),
        ("swapped operands", "values[0] // most", "(most // values[0])"),
        ("off by one", "0", "(1)"),
    }  # fmt: skip


def test_comments_docstrings_and_other_code_keep_results_valid():
    """The results of a day should not be lost to a comment."""
    changed = SOURCE.replace(b"import logging", b"import logging  # of Python").replace(
        b"Return \xc3\xa9.", b"Return a value."
    )
    assert changed != SOURCE and mutations.code_of(changed) == mutations.code_of(SOURCE)
    assert mutations.code_of(SOURCE.replace(b"most - 1", b"most")) != mutations.code_of(SOURCE)
    keys = [each.key for each in mutations.find_mutations(SOURCE + SOURCE)]
    assert len(set(keys)) == len(keys) == 2 * len(mutations.find_mutations(SOURCE))


def test_sample_is_seeded_and_covers_every_kind():
    chosen = mutations.sample(SOURCE, 6, "a")
    assert chosen == mutations.sample(SOURCE, 6, "a") != mutations.sample(SOURCE, 6, "b")
    assert len({each.kind for each in chosen}) == 6
    assert len(mutations.sample(SOURCE, 99, "a")) == len(mutations.find_mutations(SOURCE))


def test_targets_exist_and_can_be_mutated():
    for module, tests in targets.TARGETS.items():
        source = (command.ROOT / targets.SOURCE / module).read_bytes()
        found = mutations.find_mutations(source)
        assert len(found) >= 20, module
        ast.parse(found[-1].apply(source))
        assert all((command.ROOT / targets.TESTS / name).exists() for name in tests)
        keys = {each.key for each in found}
        explained = {key for name, key in survivors.EXPLAINED if name == module}
        assert explained <= keys, explained - keys


class FakeRuns:
    """Tests that notice dropped statements only."""

    def __init__(self):
        self.mutants = []

    def run(self, tests, timeout):
        return command.SURVIVED, 1.0

    def run_mutant(self, module, mutation, tests, timeout):
        self.mutants.append(mutation)
        assert timeout == command.TIMEOUT_FACTOR + command.TIMEOUT_EXTRA
        dropped = mutation.kind == "dropped statement"
        return command.KILLED if dropped else command.SURVIVED, 1.0


def test_results_continue_and_are_dropped_when_the_module_changes(tmp_path, monkeypatch):
    module, path = "fsdp/clip_grad.py", tmp_path / "results.jsonl"
    first, second = FakeRuns(), FakeRuns()
    command.run_module(first, module, 3, 0, path)
    command.run_module(second, module, 5, 0, path)
    assert len(first.mutants) == 3 and len(second.mutants) == 2
    rows = list(command.read_results(path).values())
    assert len(rows) == 5
    killed = sum(row["kind"] == "dropped statement" for row in rows)
    table = command.format_table(rows)
    assert f"| `{module}` | 5 | {killed} | 0 | {5 - killed} | {killed / 5:.0%} |" in table
    assert table.count(f"`{module}:") == 5 - killed
    for changed, valid in (("tests", killed), ("source", 0)):  # new tests may detect survivors
        lines = [json.loads(line) | {changed: "other"} for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
        assert len(command.read_results(path)) == valid

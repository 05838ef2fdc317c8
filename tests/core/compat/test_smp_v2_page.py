"""The migration page of SMP v2 and SMDDP: its code runs, and its tables are true."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import nearlinear as nl
from nearlinear.compat import tsm
from nearlinear.compat.smddp import torch_smddp
from tests.support import parity

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "packages/core/docs/migration/smp_v2.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
MODULES = {
    "tsm": "nearlinear.compat.tsm",
    "torch.sagemaker": "nearlinear.compat.tsm",
    "smddp": "nearlinear.compat.smddp",
    "smdistributed.dataparallel.torch": "nearlinear.compat.smddp",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
}
"""Abbreviations of the page, and names of other libraries."""


def key_table() -> str:
    """Return the table of configuration keys, from the table that ``tsm.init`` uses."""
    lines = ["| Key of v2 | Default | nearlinear | Difference |", "|:--|:--|:--|:--|"]
    for name, key in tsm.job.KEYS.items():
        equivalent = f"`{key.equivalent}`" if key.equivalent else "none"
        lines.append(f"| `{name}` | `{key.default}` | {equivalent} | {key.note} |")
    return "\n".join(lines) + "\n"


def variable_table() -> str:
    lines = ["| Variable | Reason |", "|:--|:--|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in torch_smddp.VARIABLES.items()]
    return "\n".join(lines) + "\n"


def test_tables_are_those_of_the_code():
    for table in (key_table(), variable_table()):
        assert table in TEXT, f"put this table into {PAGE.name}:\n{table}"


def block(words: str) -> str:
    """Return the block of the page that contains ``words``, with our names of the modules."""
    blocks = re.findall(r"```py(?:thon)?\n(.*?)```", TEXT, re.DOTALL)
    (found,) = [each for each in blocks if words in each]
    found = found.replace("import torch.sagemaker as tsm", "from nearlinear.compat import tsm")
    return re.sub(r"smdistributed\.dataparallel\.torch", MODULES["smddp"], found)


def trained(rank, words):
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    mine = {name: rows.chunk(2)[rank // 2] for name, rows in parity.rows(0).items()}
    mine["labels"] = mine["input_ids"]
    variables = {"model": model, "loader": [parity.split(mine, 2)] * 2, "nl": nl}
    exec(block(words), variables)
    found = variables["model"]
    return parity.whole(getattr(found, "module", found), lambda p: p.detach())


def test_a_script_before_and_after_the_change_trains_alike():
    before = nl.spmd.run(trained, 4, args=("# before\nimport torch\n",))
    tsm.shutdown()
    after = nl.spmd.run(trained, 4, args=('nl.init({"hybrid_shard_degree": 2, "tensor',))
    for name, value in after[0].items():
        torch.testing.assert_close(before[0][name], value, rtol=0, atol=1e-5)
        assert (value != parity.build("llama").get_parameter(name)).any()


ROWS = re.findall(r"^\| `([\w.]+)(?:\((\w+)=\))?` \| .+ \| `(\w+)::(\w+)` \|$", TEXT, re.MULTILINE)


def resolved(symbol: str):
    """Return the object that a symbol of the page names. Raises AttributeError."""
    for short, name in MODULES.items():
        if symbol == short or symbol.startswith(f"{short}."):
            symbol = name + symbol.removeprefix(short)
            break
    holder, _, last = symbol.rpartition(".")
    if holder == "nearlinear.compat.tsm.state":  # its values exist in a job only
        assert last in vars(tsm.job.State) or last in tsm.state.SETTINGS
        return tsm.state
    parts = symbol.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise AttributeError(symbol)


@functools.cache
def definitions(module: str) -> dict[str, set[str]]:
    """Return the identifiers and strings in each top-level definition of a test module."""
    found = {}
    for node in ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8")).body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        used = set()
        for part in ast.walk(node):
            for field in ("id", "attr", "arg", "name"):
                used.add(getattr(part, field, None))
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                used |= set(re.findall(r"\w+", part.value))
        found |= dict.fromkeys(names, used)
    return found


def used_by(module: str, test: str) -> set[str]:
    """Return the names that a test and the definitions it uses mention."""
    every, todo, seen = definitions(module), [test], set()
    while todo:
        name = todo.pop()
        if name in every and name not in seen:
            seen.add(name)
            todo += every[name] - seen
    return set().union(*(every[name] for name in seen))


@pytest.mark.parametrize(("symbol", "argument", "module", "test"), ROWS)
def test_every_row_of_the_table_is_shown_by_its_test(symbol, argument, module, test):
    found = resolved(symbol)
    assert test in definitions(module), f"{module} has no {test}"
    name = symbol.rpartition(".")[2]
    used = used_by(module, test)
    assert name in used or name == "VARIABLES", f"{test} does not use {name}"
    assert not argument or argument in used, f"{test} does not pass {argument}"
    if argument and symbol == "FSDP":
        found = tsm.fsdp1.ShardedModel
    if argument and argument != "translate_on_save" and argument != "process_group":
        assert argument in inspect.signature(found).parameters


def test_the_table_covers_the_public_names():
    """Functions and classes of the modules, and the methods of the initializer."""
    listed = {symbol for symbol, *_ in ROWS}
    assert len(ROWS) > 50
    tree = (
        "delayed_param moe.moe_config nn.attn nn.huggingface.llama_flashattn utils.module_utils "
        "distributed.checkpoint.state_dict_saver"
    )
    for path in tree.split():
        module = resolved(f"tsm.{path}")
        for name, value in vars(module).items():
            own = inspect.isfunction(value) or inspect.isclass(value)
            helper = name in ("allocate_buffers", "initialize_by", "record_initialization",
                              "reset_parameters")  # fmt: skip
            if own and value.__module__ == module.__name__ and name[0] != "_" and not helper:
                assert f"tsm.{path}.{name}" in listed
    for name in tsm.__all__:
        value = getattr(tsm, name)
        assert inspect.ismodule(value) or f"tsm.{name}" in listed
    for name in vars(tsm.delayed_param.DelayedParamIniter):
        assert name[0] == "_" or f"tsm.delayed_param.DelayedParamIniter.{name}" in listed

"""Evaluation sets are found as by datatrove, and addresses are masked as by datatrove."""

import json
import random
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data_prep
from data_prep.__main__ import main
from nearlinear.data.format import Manifest
from nearlinear.errors import DataError
from tests.support.preparing import write_rows

pytest.importorskip("datatrove")
pytest.importorskip("numba")
pytest.importorskip("spacy")
from ci.benchmarks.filters import (  # noqa: E402
    by_datatrove,
    by_rules,
    decontamination,
    decontamination_of_datatrove,
)
from data_prep import decontaminate, pii, quality  # noqa: E402
from data_prep.documents import make_filters  # noqa: E402

OPTIONS = {"progress": False, "val_fraction": 0.1, "backends": ("tokenizers",)}
OFTEN = settings(deadline=None, max_examples=300,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
NAMES = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in "lmnrst"]


def draw_words(draw, count):
    return " ".join(draw.choice(NAMES) for _ in range(count))


@pytest.fixture(scope="module")
def items():
    """Items of an evaluation set, some of which are short."""
    draw = random.Random(3)
    return [{"query": draw_words(draw, draw.choice([3, 15, 30])) + "?",
             "label": draw_words(draw, draw.choice([1, 6, 14]))} for _ in range(30)]  # fmt: skip


@pytest.fixture(scope="module")
def texts(items):
    """Documents, most of which quote an item in another form, whole, in part or not at all."""
    draw, found = random.Random(4), []
    replacing = [(" ", ",\n"), ("a", "á"), (" ", " 7 ")]
    forms = [str.title, str.upper, "“{}”".format]
    forms += [lambda text, change=change: text.replace(*change, 1) for change in replacing]
    for _ in range(300):
        item = draw.choice(items)
        parts = [item["query"], item["label"], item["query"] + " " + item["label"]]
        quoted = draw.choice(parts).split(" ")
        quoted = quoted[draw.randrange(3) :][: draw.choice([8, 11, 12, 13, 99])]
        middle = draw.choice(forms)(" ".join(quoted))
        found.append(f"{draw_words(draw, 20)}. {middle} {draw_words(draw, 20)}, can't 3,000.5 % é.")
    return found


def test_decisions_equal_those_of_datatrove(items, texts, tmp_path):
    expected = by_datatrove(texts, [], [decontamination_of_datatrove(items)])
    assert by_rules(texts, [], more_rules=[decontamination(items)]) == expected
    assert 40 < [why for why, _ in expected].count("decontaminate: contaminated") < 260
    answers = [{"text": item["label"]} for item in items]
    sets = decontaminate.read_evaluation_sets([write_rows(tmp_path / "b.jsonl.gz", answers)])
    rules = make_filters([], sets)
    labels = [{"label": item["label"]} for item in items]
    alone = by_datatrove(texts, [], [decontamination_of_datatrove(labels)])
    assert [bool(rules.judge(text)[0]) for text in texts] == [bool(why) for why, _ in alone]


@OFTEN
@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("1٣,.٫ \n-Aé"))))
def test_texts_are_simplified_as_by_datatrove(text):
    from datatrove.utils.text import PUNCTUATION, simplify_text

    assert set(PUNCTUATION) == quality.PUNCTUATION
    assert decontaminate.simplify(text) == simplify_text(text)
    of_chunks = (decontaminate.simplify(chunk).split() for chunk in text.split())
    assert [word for words in of_chunks for word in words] == simplify_text(text).split()


def test_preparation_leaves_out_evaluation_sets(items, texts, tmp_path, monkeypatch, capsys):
    from data_prep.sources import source as splitting

    monkeypatch.setattr(splitting, "SPLIT_BYTES", 12_000)
    corpus = write_rows(tmp_path / "c.jsonl", [{"text": text} for text in texts])
    one = write_rows(tmp_path / "one.jsonl", items[:15])
    two = write_rows(tmp_path / "two.jsonl", items[15:])
    given = ["--decontaminate", str(one), "--decontaminate", str(two), "--filters", "pii"]
    out = str(tmp_path / "d")
    assert main(["prepare", "jsonl", str(corpus), *given, "--workers", "2", "--out", out]) == 0
    manifest = Manifest.read(out)
    filtered, named = manifest.statistics["filtered"], manifest.settings["evaluation_sets"]
    assert set(filtered) == {"decontaminate: one", "decontaminate: two"}
    assert named["names"] == ["one", "two"] and named["words"] == 12
    source = data_prep.sources.jsonl(corpus)
    chosen = {"filters": ["pii"], "workers": 1, **OPTIONS}
    again = data_prep.prepare(source, tmp_path / "e", decontaminate=[one, two], **chosen)
    assert again.statistics["filtered"] == filtered
    with pytest.raises(DataError, match="evaluation_sets"):
        data_prep.prepare(source, tmp_path / "e", decontaminate=[two], **chosen)
    capsys.readouterr()
    assert main(["audit", "jsonl", str(corpus), "--decontaminate", str(one)]) == 0
    assert capsys.readouterr().out.count("decontaminate: one") >= filtered["decontaminate: one"]


@pytest.mark.parametrize("package", ["spacy", "numba", "fasttext"])
def test_missing_packages_are_named(tmp_path, monkeypatch, items, package):
    file = write_rows(tmp_path / "a.jsonl", items)
    source = data_prep.sources.jsonl(file, "query")
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("quality", "words", "word_loops", "decontaminate", "language"):
        monkeypatch.delitem(sys.modules, f"data_prep.{name}", raising=False)
        monkeypatch.delattr(data_prep, name, raising=False)
    of_words = ({"filters": ["pii"]}, {"decontaminate": [file]})
    for chosen in ({"languages": ["en"]}, *(of_words if package != "fasttext" else ())):
        with pytest.raises(DataError, match=f"filters need more packages .*{package}"):
            data_prep.prepare(source, tmp_path / "d", **chosen, **OPTIONS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"question": "a"}', "line 2: an item of an evaluation set is an object with"),
        ('{"query": "a", "label": ["b", 3]}', "line 2: an item"),
        ("[]", "line 2: an item"),
    ],
)
def test_other_files_are_refused(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": " ".join("abcdefghijklmn")}) + f"\n{line}\n")
    with pytest.raises(DataError, match=message):
        decontaminate.read_evaluation_sets([path])
    path.write_text('{"text": "a short text"}\n')
    with pytest.raises(DataError, match="no text of 12 words"):
        decontaminate.read_evaluation_sets([path])
    with pytest.raises(DataError, match="need different names"):
        decontaminate.read_evaluation_sets([path, tmp_path / "b" / "a.jsonl.gz"])


ADDRESSES = st.lists(st.one_of(
    st.sampled_from(["a.b@c.de", "@", ".", "..", "8.8.8.8", "10.0.0.1", "1.2.3.256", "01.2.3.4",
                     "x@[1.2.3.4]", "x@[1.2.3.a-b:]", "é", "_", "-", "com", " ", "\n", "#", "٣",
                     "jo@mail-1.example.org.", "a@b", "@c.d@e.f", "{x}", "2.22.222.2222"]),
    st.text(alphabet="a1.@-é_ #", max_size=6)), max_size=12)  # fmt: skip


@OFTEN
@given(ADDRESSES)
def test_addresses_are_masked_where_datatrove_does(parts):
    from datatrove.pipeline.formatters import PIIFormatter

    text = "".join(parts)
    formatter = PIIFormatter(email_replacement=pii.EMAIL, ip_replacement=pii.IP)
    assert pii.mask(text) == formatter.format(text)


def test_masking_takes_time_in_proportion_to_the_text():
    """A pattern that begins at every word of a run takes hours for this one."""
    run = "a-" * 500_000
    assert pii.mask(f"{run} b@c.de") == f"{run} {pii.EMAIL}"
    assert pii.mask(f"{run}@c.de") == pii.EMAIL
    assert pii.mask("a@" * 100_000 + "1." * 100_000).startswith("a@a@")

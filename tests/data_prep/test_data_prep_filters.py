"""Filters match datatrove's own pipeline, and near-duplicates their definition."""

import json
import random
from collections import Counter
from unicodedata import category

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import data_prep
from data_prep import near_dedup, report
from data_prep.__main__ import main
from data_prep.documents import FILTERS
from data_prep.near_dedup import BANDS
from data_prep.sources import source as splitting
from nearlinear.data.format import Manifest, verify
from nearlinear.errors import DataError

pytest.importorskip("datatrove")
pytest.importorskip("numba")
pytest.importorskip("spacy")
from loguru import logger  # noqa: E402  a dependency of datatrove

from ci.benchmarks import filters  # noqa: E402
from ci.benchmarks.filters import by_datatrove, by_rules, damaged  # noqa: E402
from data_prep import quality, words  # noqa: E402

OPTIONS = {"progress": False, "val_fraction": 0.1, "backends": ("tokenizers",)}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    logger.remove()  # may write to a stream that an earlier test closed
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 12_000)


@pytest.fixture(scope="module")
def texts():
    """Documents that pass, that fail, and that are nearly equal."""
    draw = random.Random(0)
    names = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "lmnrst"]

    def sentence():
        words = [draw.choice(["the", "of", "that", "have", "and"] if draw.random() < 0.2 else names)
                 for _ in range(14)]  # fmt: skip
        return " ".join(words).capitalize() + "."

    good = ["\n".join(" ".join(sentence() for _ in range(3)) for _ in range(6)) for _ in range(40)]
    alike = [f"{text[:-1]} indeed." for text in good[::4]]
    far = [" ".join(draw.sample(text.split(), len(text.split()))) + "." for text in good[:5]]
    bad = ["short", "# # # # " * 40, "The same line of that and the.\n" * 30,
           "\n".join(f"- item {i}" for i in range(90)), good[1] + "\n{ code of that."]  # fmt: skip
    found = [*good, *alike, *far, *bad, *good[:3]]
    draw.shuffle(found)
    return found


@pytest.fixture
def corpus(tmp_path, texts):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def kept(folder, gpt2, read_documents):
    found = read_documents(folder)
    return sorted(gpt2.decode(ids) for side in found.values() for ids in side)


def test_filters_match_datatrove_pipeline(corpus, texts, tmp_path, gpt2, read_documents, capsys):
    source = data_prep.sources.jsonl(corpus)
    assert len(source.splits()) > 4
    names = list(FILTERS)
    manifest = data_prep.prepare(source, tmp_path / "d", filters=names, workers=1, **OPTIONS)
    expected = [text for why, text in by_datatrove(texts, names) if not why]
    assert kept(tmp_path / "d", gpt2, read_documents) == sorted(expected)
    filtered = manifest.statistics["filtered"]
    assert 10 < len(expected) == len(texts) - sum(filtered.values())
    assert filtered["gopher: gopher_short_doc"] and filtered["c4: curly_bracket"]
    said = report.stats(tmp_path / "d")
    assert f"filtered: {sum(filtered.values())} documents" in said
    assert "1 c4: curly_bracket" in said and "near-duplicates" not in said
    verify(tmp_path / "d")
    whole = data_prep.prepare(source, tmp_path / "w", workers=1, **OPTIONS)
    assert "filters" not in whole.settings and whole.statistics["filtered"] == {}


def test_near_duplicates_match_datatrove_pipeline(corpus, texts, tmp_path, gpt2, read_documents):
    from datatrove.data import Document
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.hashing import HashConfig

    source = data_prep.sources.jsonl(corpus)
    manifest = data_prep.prepare(
        source, tmp_path / "d", near_duplicates="minhash", workers=1, **OPTIONS
    )
    assert "datatrove" not in manifest.settings
    place = lambda name: str(tmp_path / name)  # noqa: E731
    # datatrove passes text to xxhash, which xxhash 3.6 and later reject
    config = minhash.MinhashConfig(num_buckets=BANDS, hash_config=HashConfig(hash_fc="sha1"))
    documents = [Document(text, id=str(number)) for number, text in enumerate(texts)]
    minhash.MinhashDedupSignature(place("s"), config).run(iter(documents), 0, 1)
    for band in range(BANDS):
        step = minhash.MinhashDedupBuckets(place("s"), place("b"), config=config)
        step.run(None, band, BANDS)
    minhash.MinhashDedupCluster(place("b"), place("c"), config).run(None, 0, 1)
    expected = list(minhash.MinhashDedupFilter(place("c")).run(iter(documents), 0, 1))
    found = kept(tmp_path / "d", gpt2, read_documents)
    short = [text for text in texts if len(text.split()) < 5]
    assert len(found) == len(expected) and set(short) <= set(found)
    dropped = manifest.statistics["near_duplicates"]["documents"]
    assert dropped == 14 and manifest.statistics["duplicates"]["documents"] == 3
    for number, text in enumerate(texts):  # the first of near-duplicates is kept
        if f"{text[:-1]} indeed." in texts[:number]:
            assert text not in found


def words_of(text):
    """Words as `near_dedup` defines them, one character at a time."""
    found, word = [], ""
    for symbol in text.lower():
        if "\u3040" <= symbol <= "\u9fff":  # a word of its own
            found, word = [*found, word, symbol], ""
        elif symbol.isalpha():
            word += symbol
        elif symbol.isdigit():
            word += "0"
        else:
            found, word = [*found, word], ""
    return [each for each in [*found, word] if each]


def shingles_of(text):
    words = words_of(text)
    return {tuple(words[i : i + near_dedup.WORDS]) for i in range(len(words) - 4)}


ALPHABET = st.sampled_from("abAB19 \n.,-'é“”—\u00a0ж中国。ａ！ß")


@settings(deadline=None, max_examples=80,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.lists(st.text(ALPHABET, max_size=60), min_size=1, max_size=6))
def test_signatures_depend_on_the_words_alone(texts):
    rows = near_dedup.sign(texts)
    assert np.array_equal(rows, near_dedup.sign([" ".join(words_of(text)) for text in texts]))
    shingles = [shingles_of(text) for text in texts]
    assert rows.any(axis=1).tolist() == [len(each) > 0 for each in shingles]
    for one, a in zip(rows, shingles, strict=True):
        for other, b in zip(rows, shingles, strict=True):
            assert not a or not b or np.array_equal(one, other) == (a == b)


def test_signatures_do_not_depend_on_batches(texts, monkeypatch):
    documents = [*texts, " ".join(texts)]
    whole = near_dedup.sign(documents)
    monkeypatch.setattr(near_dedup, "_PIECE", 3000)
    monkeypatch.setattr(near_dedup, "_BLOCK", 101)
    assert np.array_equal(whole, near_dedup.sign(documents))
    assert np.array_equal(whole[3:4], near_dedup.sign(texts[3:4]))


def test_near_duplicates_are_found_by_exact_similarity(tmp_path):
    """Compare with the exact Jaccard similarity of 5-grams."""
    draw = random.Random(1)
    vocabulary = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(600)]
    pairs = []
    for _ in range(400):
        words = [draw.choice(vocabulary) for _ in range(300)]
        changed = list(words)
        for place in draw.sample(range(300), draw.choice((2, 2, 3, 40, 90))):
            changed[place] = draw.choice(vocabulary)
        pairs += [" ".join(words), " ".join(changed)]
    clusters = near_dedup.find_clusters([near_dedup.sign(pairs)], len(pairs), tmp_path)
    found = clusters != np.arange(len(pairs))
    assert not found[::2].any()  # the first of each pair is kept
    shingles = list(map(shingles_of, pairs))
    sets = zip(shingles[::2], shingles[1::2], strict=True)
    similarity = np.array([len(a & b) / len(a | b) for a, b in sets])
    alike, apart = found[1::2][similarity >= 0.9], found[1::2][similarity < 0.3]
    assert len(alike) > 150 and alike.mean() >= 0.99
    assert len(apart) > 100 and not apart.any()


def test_filtered_bytes_do_not_depend_on_workers_or_interruptions(corpus, tmp_path, monkeypatch):
    source = data_prep.sources.jsonl(corpus)
    options = {**OPTIONS, "filters": ["gopher"], "near_duplicates": "minhash", "val_fraction": 0.3}
    one = data_prep.prepare(source, tmp_path / "one", workers=1, **options)
    process_split, done = data_prep.pool.process_split, []

    def stopping(plan, number, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(number)
        return process_split(plan, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(data_prep.pool, "process_split", stopping)
        with pytest.raises(KeyboardInterrupt):
            data_prep.prepare(source, tmp_path / "two", workers=1, **options)
    with pytest.raises(DataError, match=r"\(filters \['gopher'\] -> \['c4'\]\)"):
        data_prep.prepare(source, tmp_path / "two", workers=1, **{**options, "filters": ["c4"]})
    assert data_prep.prepare(source, tmp_path / "two", workers=2, **options) == one
    assert one.statistics["near_duplicates"]["documents"] > 5
    with pytest.raises(DataError, match="no filter 'mine': use gopher, c4, fineweb, pii"):
        data_prep.prepare(source, tmp_path / "x", filters=["mine"], **OPTIONS)


def test_cli_accepts_filters_and_near_duplicates(corpus, tmp_path, capsys):
    arguments = ["jsonl", str(corpus), "--out", str(tmp_path / "d"), "--workers", "1",
                 "--filters", "gopher,fineweb", "--near-duplicates", "minhash"]  # fmt: skip
    assert main(arguments) == 0
    settings = Manifest.read(tmp_path / "d").settings
    assert settings["filters"] == ["gopher", "fineweb"] and settings["spacy"]


def test_audit_lists_what_a_preparation_drops(corpus, texts, tmp_path, capsys):
    names = ["--filters", "gopher,c4"]
    with corpus.open("a") as lines:
        lines.write(json.dumps({"text": "  \n"}) + "\n")
    assert main(["audit", "jsonl", str(corpus), *names, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = filters.by_datatrove(texts, ["gopher", "c4"])
    assert {each["document"]: each["rule"] for each in found} == {
        **{number: why for number, (why, _) in enumerate(expected, 1) if why},
        len(texts) + 1: "blank",
    }
    assert all(texts[each["document"] - 1].startswith(each["text"]) for each in found[:-1])
    assert main(["prepare", "jsonl", str(corpus), "--out", str(tmp_path / "d"), "--workers", "1",
                 *names]) == 0  # fmt: skip
    counted = Manifest.read(tmp_path / "d").statistics["filtered"]
    assert Counter(each["rule"] for each in found[:-1]) == counted
    capsys.readouterr()
    assert main(["audit", "jsonl", str(corpus), *names]) == 0
    assert f"{corpus}:{found[0]['document']}  {found[0]['rule']}" in capsys.readouterr().out
    assert main(["audit", "jsonl", str(corpus), "--filters", "mine"]) == 2


def test_filters_replace_lone_surrogates():
    _, text = quality.QualityFilters([]).judge("a \ud800 b")
    assert text == "a ? b"


def test_decisions_equal_those_of_datatrove(texts):
    draw = random.Random(2)
    documents = [*texts, *(damaged(draw.choice(texts[:60]), draw) for _ in range(400))]
    documents = [text for text in documents if text.strip()]
    reasons = set()
    for names in (["gopher"], ["c4"], ["fineweb"], [*FILTERS]):
        expected = by_datatrove(documents, names)
        assert by_rules(documents, names) == expected
        reasons.update(why for why, _ in expected)
    assert len(reasons) > 18, reasons


FORMS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", '"', "“", "("]),
        st.one_of(
            st.from_regex("[A-Za-z]{1,4}|[0-9]{1,5}", fullmatch=True),
            st.sampled_from(["dont", "Im", "don't", "a.m", "US", "Dr", "xD", "D", "id", "8", "http://a.b"]),
        ),
        st.sampled_from(["", "-a", "-Dont", "-a-b", "'s", "’s", "n't"]),
        st.sampled_from(["", ",", ".", ":", ";", "?", "!", '"', "”", ")", "...", ").", "%"]),
    ),
)  # fmt: skip


@settings(deadline=None, max_examples=400,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.lists(FORMS, min_size=1, max_size=8), st.sampled_from([" ", "\n", "  ", "\u3000"]))
def test_words_equal_those_of_spacy(word_table, chunks, space):
    text = space.join(chunks)
    numbers = word_table.numbers(word_table.find(text))
    names = [*word_table._numbers]
    tokens = word_table._split(text)
    assert [names[number] for number in numbers] == [t.text for t in tokens if t.text.strip()]


@pytest.fixture(scope="module")
def word_table():
    return words.WordTable(quality.SYMBOLS)


def test_benchmark_of_filters_compares_decisions(tmp_path, texts, capsys, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:20]))
    assert filters.main([str(path), "--rounds", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert "| gopher+c4+fineweb |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["results"][0]["documents"] == 20
    monkeypatch.setattr(quality, "repetitions", lambda parts: (len(parts), 0))
    assert filters.main([str(path), "--rounds", "1"]) == 1


def test_a_full_table_of_words_begins_anew(texts, monkeypatch):
    expected = by_rules(texts, FILTERS)
    monkeypatch.setattr(words, "MOST_CHUNKS", 50)
    assert by_rules(texts, FILTERS) == expected


def test_properties_of_characters(word_table):
    last = words._LETTERS_END
    others = map(chr, range(last, 0x110000))
    assert not any(each.isalpha() or category(each)[0] == "P" for each in others)
    word_table.numbers(word_table.find("a, b4 ... . “ ß-x #"))
    found = dict(zip(word_table._numbers, word_table._flags.values.tolist(), strict=True))
    assert found["a"] == 1 | 2 and found["b4"] == 1 | 2 and found["#"] == 4
    assert found["..."] == 4 and found["."] == 4 | 8 and found["“"] == 4


def test_near_duplicate_clusters_match_breadth_first_search(tmp_path, monkeypatch):
    """Compare union-find clusters with a search over documents that share a band."""
    monkeypatch.setattr(near_dedup, "_PARTITION_DOCUMENTS", 7)
    rows = np.random.default_rng(0).integers(1, 700, (200, BANDS)).astype(np.uint64)
    rows[::17] = 0
    found = near_dedup.find_clusters([rows[:50], rows[50:50], rows[50:]], 200, tmp_path)
    first = np.arange(200)
    before = None
    while not np.array_equal(before, first):
        before = first.copy()
        for a in np.flatnonzero(rows.any(axis=1)):
            shared = (rows == rows[a]).any(axis=1)
            first[shared] = first[shared].min()
    assert np.array_equal(found, first)
    alone = found == np.arange(200)
    assert 10 < alone.sum() < 180 and alone[::17].all()

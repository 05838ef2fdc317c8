"""Languages are kept as by datatrove's filter with the same model."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_prep
from data_prep import language
from data_prep.__main__ import main
from data_prep.language import LanguageRule
from data_prep.lookup import why
from nearlinear.errors import DataError

pytest.importorskip("fasttext")
pytest.importorskip("numba")
pytest.importorskip("spacy")
from ci.benchmarks.filters import by_datatrove, by_rules, language_of_datatrove  # noqa: E402

SENTENCES = {
    "en": "The harbour was empty when the ships came back, and nobody knew what had happened.",
    "de": "Der Hafen war leer, als die Schiffe zurückkamen, und niemand wusste, was geschehen war.",
    "fr": "Le port était vide quand les navires sont revenus, et personne ne savait pourquoi.",
    "es": "El puerto estaba vacío cuando volvieron los barcos, y nadie sabía lo que había pasado.",
    "ru": "Гавань была пуста, когда корабли вернулись, и никто не знал, что там произошло.",
    "zh": "船只回来的时候，港口空无一人，没有人知道那里发生了什么事情。",
}


@pytest.fixture(scope="module")
def texts():
    """Sentences, parts of them, mixtures of two languages, and texts of no language."""
    draw, found = random.Random(7), [*SENTENCES.values(), "0101 2323", "\n", "a \ud800 b"]
    for _ in range(200):
        one, two = (SENTENCES[draw.choice([*SENTENCES])].split() for _ in range(2))
        words = draw.choices(one, k=draw.choice([1, 4, 12])) + draw.sample(two, k=min(len(two), 3))
        found.append(draw.choice([" ", "\n"]).join(words))
    return found


@pytest.mark.parametrize("languages", [["en"], ["de", "ru"]])
def test_decisions_equal_those_of_datatrove(languages, texts):
    pytest.importorskip("datatrove")
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    expected = by_datatrove(texts, [], [language_of_datatrove(languages)])
    assert by_rules(texts, [], more_rules=[("language", LanguageRule(languages))]) == expected
    assert 10 < sum(why is None for why, _ in expected) < len(texts) - 10


PARTS = st.one_of(
    st.sampled_from([word for text in SENTENCES.values() for word in text.split()]),
    st.sampled_from([" ", " ", "\n", "\t\x0b\x0c\r", "\0", "\u00a0", "</s>", "__label__en", "<"]),
    st.text(max_size=12),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(PARTS, max_size=40).map("".join))
def test_scores_equal_those_of_fasttext(model, text):
    (score, found), (expected, name) = model.predict(text), language.predict_by_fasttext(text)
    assert score == pytest.approx(expected, abs=1e-4)
    assert found == name or expected < 0.5


@pytest.fixture(scope="module")
def model():
    return language.LanguageModel.read(language._file())


def test_long_texts_and_words_are_scored(model):
    long = "Straße" * 5000
    for text in (" ".join(SENTENCES.values()) * 200, f"{long} {SENTENCES['de']}", long):
        for _ in range(2):  # the second time, all words are known
            score, found = language.predict_by_fasttext(text)
            assert model.predict(text) == (pytest.approx(score, abs=2e-3), found)


def test_fasttext_decides_near_the_threshold(monkeypatch):
    rule = LanguageRule(["de"])
    monkeypatch.setattr(language, "predict_by_fasttext", lambda text: (0.9, "fr"))
    for score, expected in ((0.655, "fr"), (0.645, "fr"), (0.7, None), (0.5, "uncertain")):
        monkeypatch.setattr(language.LanguageModel, "predict", lambda *_, s=score: (s, "de"))
        assert rule(None, "text") == (expected, "text")


def test_other_models_are_refused(tmp_path):
    data = bytearray(language._file().read_bytes())
    data[4] = 11  # an older version
    (tmp_path / "old.ftz").write_bytes(data)
    with pytest.raises(DataError, match="old.ftz is not fastText's compressed model"):
        language.LanguageModel.read(tmp_path / "old.ftz")


def test_preparation_keeps_languages(tmp_path, capsys):
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES.values()))
    out = tmp_path / "d"
    given = ["jsonl", str(corpus), "--languages", "de,en"]
    assert main([*given, "--out", str(out), "--workers", "1", "--backend", "tokenizers"]) == 0
    fates = [why(out, f"a.jsonl:{number}").fate for number in range(1, 7)]
    assert {*fates[:2]} <= {"train", "val"}
    assert fates[2:] == ["language: fr", "language: es", "language: ru", "language: zh"]
    capsys.readouterr()
    assert main(["audit", *given]) == 0
    assert f"{corpus}:3  language: fr" in capsys.readouterr().out
    assert main(["audit", *given[:3], "english"]) == 2
    with pytest.raises(DataError, match="'English'"):
        data_prep.prepare(data_prep.sources.jsonl(corpus), out, languages=["English"])

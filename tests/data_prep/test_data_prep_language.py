"""Languages are kept as by datatrove's filter with the same model."""

import json
import random

import numpy as np
import pytest

import data_prep
from data_prep import language
from data_prep.__main__ import main
from data_prep.documents import make_filters
from data_prep.lookup import why
from nearlinear.errors import DataError

pytest.importorskip("fasttext")
pytest.importorskip("numba")
pytest.importorskip("spacy")

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
    from datatrove.data import Document
    from datatrove.pipeline.filters import LanguageFilter
    from datatrove.utils.lid import FT176LID

    class Model:
        """fastText's Python class, which the package for prediction has in another form."""

        def predict(self, text, k):
            found = language._model().predict(text + "\n", k, 0.0, "strict")
            return [label for _, label in found], np.array([score for score, _ in found])

    # datatrove's constructor needs the package for training
    reference = object.__new__(LanguageFilter)
    reference.languages, reference.language_threshold = languages, 0.65
    reference.backend, reference.label_only, reference.keep_top_pairs_threshold = "ft176", False, -1
    reference.model = FT176LID(languages)
    reference.model._model = Model()
    rules = make_filters([], languages=languages)
    kept = 0
    for text in texts:
        text = text.encode("utf-8", "replace").decode()
        expected = bool(reference.filter(Document(text, id="")))
        assert (rules.judge(text)[0] is None) == expected, text
        kept += expected
    assert 10 < kept < len(texts) - 10


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

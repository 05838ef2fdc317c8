"""`ci.prose`: the English of every area stays within its limits, and the figures are correct."""

import pytest

from ci import prose
from ci.prose import AREAS, measure_area, measure_texts, texts_of, violations


@pytest.mark.parametrize("name", AREAS)
def test_prose_stays_within_the_limits_of_its_area(name):
    figures = measure_area(AREAS[name])
    assert figures.words > 100
    message = violations(name, figures)
    assert not message, message


def found(tmp_path, name, source):
    path = tmp_path / name
    path.write_text(source, encoding="utf-8")
    return [(text.line, " ".join(text.text.split())) for text in texts_of(path)]


def test_python_texts_are_docstrings_and_comment_blocks(tmp_path):
    source = '''"""Module."""
# A comment
# of two lines.
x = 1  # beside code
# Alone.


class A:
    """Class."""

    y: int
    """Attribute."""

    def f(self):  # noqa: D102
        """Function,
        two lines."""
        return "not a text"
'''
    assert sorted(found(tmp_path, "a.py", source)) == [
        (1, "Module."),
        (2, "A comment of two lines."),
        (4, "beside code"),
        (5, "Alone."),
        (9, "Class."),
        (12, "Attribute."),
        (15, "Function, two lines."),
    ]


def test_markdown_texts_are_paragraphs_and_list_items_outside_code(tmp_path):
    source = "# Title\nA paragraph\nof two lines.\n\n- one\n- two\n  more\n\n```sh\nwhat\n```\n"
    assert found(tmp_path, "a.md", source) == [
        (1, "# Title"),
        (2, "A paragraph of two lines."),
        (5, "one"),
        (6, "two more"),
    ]


def test_notebook_texts_are_markdown_cells_and_comments(tmp_path):
    source = "# %% [markdown]\n# # Title\n# Text.\n\n# %%\n# comment\nx = 1\n"
    assert sorted(found(tmp_path, "01_a.py", source)) == [
        (2, "# Title"),
        (3, "Text."),
        (6, "comment"),
    ]


def test_figures_count_what_and_openers():
    texts = [
        prose.Text("a.py", 1, "What it does, and what it returns."),
        prose.Text("a.py", 2, "Return the shape."),
        prose.Text("a.md", 3, "| what | table |", has_opener=False),
        prose.Text("a.md", 4, "Does it hold?"),
    ]
    figures = measure_texts(texts)
    assert (figures.words, figures.whats) == (15, 3)
    assert (figures.texts, figures.openers) == (3, 1)
    assert figures.what_rate == 200 and figures.opener_rate == pytest.approx(100 / 3)
    assert figures.worst(1) == ["a.py:1: What it does, and what it returns."]


def test_violation_names_the_area_the_figure_and_the_worst_places(monkeypatch):
    monkeypatch.setitem(AREAS, "here", prose.Area(("x",), max_what=1.0, max_openers=60.0))
    figures = measure_texts([prose.Text("x.py", 7, "What is done."), prose.Text("x.py", 8, "Go.")])
    message = violations("here", figures)
    assert 'here: 250.0 "what" per 1,000 words (limit 1.0). Rewrite' in message
    assert "x.py:7: What is done." in message and "open without" not in message
    monkeypatch.setitem(AREAS, "here", prose.Area(("x",), max_what=300.0, max_openers=60.0))
    assert violations("here", figures) == ""

"""Conversations as JSON lines, and pairs of conversations of which one is preferred.

A line of the first is {"messages": [{"role": ..., "content": ...}, ...]}, and of the second
{"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES}.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from data_prep.sources.files import (
    describe_inputs,
    find_inputs,
    read_lines,
    split_by_lines,
    uncompressed_bytes,
)
from data_prep.sources.source import (
    InputSplit,
    Rows,
    Skipped,
    Source,
    documents_of_splits,
    value_as_text,
)
from data_prep.sources.tables import JSON_FILES, line_location
from nearlinear.errors import DataError


def chat(
    files: Sequence[str | Path],
    skip_bad_lines: bool = False,
    allow_unread: bool = False,
    fields: Sequence[str] = (),
) -> Source:
    """Read conversations, one per line, for supervised fine-tuning.

    A document is the JSON of a conversation, which `data_prep.chat.ChatTokenizer` tokenizes.

    Args:
        files: JSON lines (`.jsonl`, `.ndjson` or `.json`, also compressed), or folders of them.
        skip_bad_lines: Skip lines that are no conversation and count them in a warning.
        allow_unread: Leave out other files below a folder instead of raising an error.
        fields: Other fields of the lines to keep with each conversation.

    Raises:
        DataError: A line is no conversation; the message names file and line.
    """
    options = skip_bad_lines, allow_unread, fields
    return _json_lines("chat", "conversations", conversation_text, files, *options)


def preference(
    files: Sequence[str | Path],
    skip_bad_lines: bool = False,
    allow_unread: bool = False,
    fields: Sequence[str] = (),
) -> Source:
    """Read pairs of conversations, one pair per line, for training on preferences (DPO).

    A document is the JSON of a pair, which `data_prep.chat.PairTokenizer` tokenizes. The arguments
    are those of `chat`.

    Raises:
        DataError: A line is no pair; the message names file and line.
    """
    options = skip_bad_lines, allow_unread, fields
    return _json_lines("preference", "pairs", pair_text, files, *options)


def _json_lines(
    name: str,
    contents: Literal["conversations", "pairs"],
    text_of: Callable[[Any], str],
    files: Sequence[str | Path],
    skip_bad_lines: bool,
    allow_unread: bool,
    fields: Sequence[str],
) -> Source:
    inputs, unread = find_inputs(files, JSON_FILES, allow_unread)
    line_kind = contents.removesuffix("s")

    def read(split: InputSplit, rows: Rows | None = None) -> Iterator[list[str]]:
        path, skipped = inputs[split.input].path, Skipped("bad lines")
        for number, line in enumerate(read_lines(path, split.start, split.end), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = text_of(row)
            except ValueError as error:
                where = line_location(split, path, number)
                if not skip_bad_lines:
                    raise DataError(
                        f"{where} is no {line_kind}: {error}; correct the line, or pass "
                        "--skip-bad-lines to skip such lines"
                    ) from None
                skipped.add(f"{where}: {error}")
                continue
            if rows is not None:
                rows.append(tuple(value_as_text(row.get(name)) for name in fields))
            yield [text]
        skipped.warn()

    def plan(target: int) -> list[InputSplit]:
        return split_by_lines(inputs, target)

    return Source(
        name=name,
        documents=documents_of_splits(plan, read),
        description=describe_inputs(inputs),
        settings={"skip_bad_lines": skip_bad_lines},
        expected_bytes=uncompressed_bytes(inputs),
        inputs=inputs,
        unread=unread,
        plan=plan,
        reader=read,
        fields=tuple(fields),
        spec={"kind": name, "files": [file.path for file in inputs],
              "skip_bad_lines": skip_bad_lines},
        contents=contents,
    )  # fmt: skip


def conversation_text(row: Any) -> str:
    """Return the canonical JSON of the conversation in a row. Raises ValueError."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    return _canonical_json(row, messages=_checked(row["messages"]))


def pair_text(row: Any) -> str:
    """Return the canonical JSON of the pair in a row: two whole conversations. Raises ValueError.

    ``prompt`` holds the messages before both, or the text of the user's first message. A prompt
    that ``chosen`` and ``rejected`` begin with already is not repeated.
    """
    names = ("chosen", "rejected")
    if not (isinstance(row, dict) and all(isinstance(row.get(name), list) for name in names)):
        raise ValueError(
            'expected {"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES}, with lists '
            'of {"role": ..., "content": ...}'
        )
    prompt = row.get("prompt") or []
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise ValueError("prompt is neither text nor a list of messages")
    found = {}
    for name in names:
        # a whole conversation repeats the prompt, perhaps after a system message
        repeats = any(row[name][start : start + len(prompt)] == prompt for start in (0, 1))
        found[name] = _checked(row[name] if repeats else [*prompt, *row[name]])
    if found["chosen"] == found["rejected"]:
        raise ValueError("chosen and rejected are the same")
    return _canonical_json(row, **found)


def _checked(messages: list[Any]) -> list[Any]:
    """Return ``messages`` if they are a conversation with an answer. Raises ValueError."""
    for number, message in enumerate(messages, 1):
        known = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not known:
            raise ValueError(f"message {number} has no text in role and content")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError('no message has the role "assistant", so that there is nothing to learn')
    return messages


def _canonical_json(row: dict[str, Any], **document: Any) -> str:
    document |= {"tools": row["tools"]} if row.get("tools") else {}
    return json.dumps(document, ensure_ascii=False, sort_keys=True)

"""Conversations as JSON lines: {"messages": [{"role": ..., "content": ...}, ...]} on each line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    inputs, unread = find_inputs(files, JSON_FILES, allow_unread)

    def read(split: InputSplit, rows: Rows | None = None) -> Iterator[list[str]]:
        path, skipped = inputs[split.input].path, Skipped("bad lines")
        for number, line in enumerate(read_lines(path, split.start, split.end), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = conversation_text(row)
            except ValueError as error:
                where = line_location(split, path, number)
                if not skip_bad_lines:
                    raise DataError(
                        f"{where} is no conversation: {error}; correct the line, or pass "
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
        name="chat",
        documents=documents_of_splits(plan, read),
        description=describe_inputs(inputs),
        settings={"skip_bad_lines": skip_bad_lines},
        expected_bytes=uncompressed_bytes(inputs),
        inputs=inputs,
        unread=unread,
        plan=plan,
        reader=read,
        fields=tuple(fields),
        spec={"kind": "chat", "files": [file.path for file in inputs],
              "skip_bad_lines": skip_bad_lines},
        conversations=True,
    )  # fmt: skip


def conversation_text(row: Any) -> str:
    """Return the canonical JSON of the conversation in a row. Raises ValueError."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    messages = row["messages"]
    for number, message in enumerate(messages, 1):
        known = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not known:
            raise ValueError(f"message {number} has no text in role and content")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError('no message has the role "assistant", so that there is nothing to learn')
    document = {"messages": messages} | ({"tools": row["tools"]} if row.get("tools") else {})
    return json.dumps(document, ensure_ascii=False, sort_keys=True)

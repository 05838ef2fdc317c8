"""Tokenize conversations by a chat template, and mark the tokens that are no targets.

Only the assistant's messages are targets. If the template marks them (``{% generation %}``),
transformers' own mask is used. Otherwise the text of an assistant message is the text that its turn
adds to the prompt for it. Templates that render earlier turns differently later, as some do with
reasoning, are refused. `PairTokenizer` marks pairs of conversations, of which one is preferred.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from data_prep.sources.source import Source
from data_prep.tokenizer import TextTokenizer
from nearlinear.errors import DataError

_GENERATION = "generation %}"


@dataclass(frozen=True)
class ChatTokenizer(TextTokenizer):
    """A tokenizer of conversations: JSON of {"messages": [{"role", "content"}, ...], "tools"}.

    Ids are those of `apply_chat_template`, up to the end of the last assistant message. The id of a
    token that is no target is larger by the size of the vocabulary (`Manifest.marks_targets`).
    """

    marks_targets = True

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> Self:
        """Raises `DataError` if the tokenizer has no chat template."""
        found = cls(tokenizer.name, tokenizer.json_text, tokenizer.eos_token, tokenizer.config)
        if not found.chat_template:
            raise DataError(
                f"the tokenizer {found.name} has no chat template: use that of a chat model "
                "(--tokenizer FOLDER, with a tokenizer_config.json or chat_template.jinja), or "
                "name a template with --chat-template FILE"
            )
        return found

    @cached_property
    def _chat(self) -> Any:
        """The tokenizer of transformers, which renders the template."""
        from transformers import PreTrainedTokenizerFast

        names = ("bos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        config = json.loads(self.config)
        tokens = {name: token_text(config.get(name)) for name in names}
        return PreTrainedTokenizerFast(
            tokenizer_object=self._plain,
            eos_token=self.eos_token,
            chat_template=self.chat_template,
            **{name: token for name, token in tokens.items() if token},
        )

    @cached_property
    def _plain(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.json_text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _special(self) -> list[str]:
        return [token.content for token in self.added_tokens if token.special]

    def encode_batch(self, texts) -> list[list[int]]:
        """Encode conversations, without EOS, which the caller appends as a target."""
        return [self._encode(json.loads(text)) for text in texts]

    def _encode(self, conversation: dict[str, Any]) -> list[int]:
        found = self._ids_and_targets(conversation["messages"], conversation.get("tools"))
        return self._marked(*found)

    def _marked(self, ids: Sequence[int], targets: Sequence[int]) -> list[int]:
        size = self.vocab_size
        return [
            token if target else token + size for token, target in zip(ids, targets, strict=True)
        ]

    def _ids_and_targets(
        self, messages: list[dict[str, Any]], tools: Any
    ) -> tuple[list[int], list[int]]:
        """Return the ids up to the end of the last answer without EOS, and which are targets."""
        last = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
        messages = messages[: last + 1]  # later messages have no effect on the loss
        for message in messages:
            for token in self._special:
                if token in message["content"]:
                    raise DataError(
                        f"a message contains the control token {token}, which could forge a turn "
                        f"({message['content'][:60]!r}): remove it from the text"
                    )
        if _GENERATION in self.chat_template:
            found = self._chat.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
            ids, targets = list(found["input_ids"]), list(found["assistant_masks"])
        else:
            ids, targets = self._by_prompts(messages, tools)
        if not any(targets):
            raise DataError(
                "the chat template renders no token of the assistant's messages "
                f"({messages[last]['content'][:60]!r}): check the template"
            )
        while ids and ids[-1] == self.eos_id:  # the caller appends it
            del ids[-1], targets[-1]
        return ids, targets

    def _by_prompts(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list, list]:
        """Return ids and targets, where an assistant's text is that after the prompt for it."""
        whole = self._render(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:number], tools, add_generation_prompt=True)
            answered = self._render(messages[: number + 1], tools)
            if not (answered.startswith(prompt) and whole.startswith(answered)):
                raise DataError(
                    "the chat template renders the turns of a conversation differently once later "
                    "turns follow, so that the assistant's tokens are unknown: add {% generation "
                    "%} and {% endgeneration %} around the assistant's text in the template, or "
                    "split the conversations"
                )
            spans.append((len(prompt), len(answered)))
        encoded = self._plain.encode(whole, add_special_tokens=False)
        targets, upcoming = [], iter(spans)
        begin, end = next(upcoming)
        for first, after in encoded.offsets:
            while first >= end and (span := next(upcoming, None)):
                begin, end = span
            targets.append(first < end and after > begin)
        return encoded.ids, targets

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            return self._chat.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses a conversation ({error}): its roles are "
                f"{', '.join(message['role'] for message in messages)}"
            ) from None


class PairTokenizer(ChatTokenizer):
    """A tokenizer of pairs: JSON of {"chosen": MESSAGES, "rejected": MESSAGES, "tools"}.

    A document is the chosen conversation with EOS, and the rejected one, whose first id is larger
    by twice the size of the vocabulary. Tokens before the first difference are no targets, because
    they are as likely in both.
    """

    pairs = True

    def _encode(self, conversation: dict[str, Any]) -> list[int]:
        (chosen, chosen_targets), (rejected, rejected_targets) = (
            self._ids_and_targets(conversation[name], conversation.get("tools"))
            for name in ("chosen", "rejected")
        )
        if chosen == rejected:
            answer = conversation["chosen"][-1]["content"]
            raise DataError(
                f"the tokens of a chosen and a rejected conversation are the same ({answer[:60]!r})"
                ": remove the pair, or check the template"
            )
        equal = next(
            (n for n, (one, other) in enumerate(zip(chosen, rejected, strict=False))
             if one != other),
            min(len(chosen), len(rejected)),
        )  # fmt: skip
        halves = [
            self._marked(ids, [0] * equal + targets[equal:])
            for ids, targets in ((chosen, chosen_targets), (rejected, rejected_targets))
        ]
        halves[1][0] = rejected[0] + 2 * self.vocab_size
        return [*halves[0], self.eos_id, *halves[1]]


def tokenizer_of(source: Source, tokenizer: TextTokenizer) -> TextTokenizer:
    """Return the tokenizer of what ``source`` holds."""
    if source.contents == "text":
        return tokenizer
    kind = PairTokenizer if source.contents == "pairs" else ChatTokenizer
    return kind.from_tokenizer(tokenizer)


def token_text(token: Any) -> str | None:
    """Return the text of a special token in a tokenizer_config.json."""
    return token.get("content") if isinstance(token, dict) else token

"""Conversations, and a tokenizer with control tokens of roles and a chat template."""

import json
from pathlib import Path

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Template from whose prompts the assistant's text is known."""
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The same text with marks, so that transformers gives an independent mask."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def conversation(number: int, turns: int = 2) -> list[dict]:
    """Return messages with questions about numbers and their answers."""
    messages = [{"role": "system", "content": "Answer with numbers."}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"Which number follows {number + turn}?"},
            {"role": "assistant", "content": f"After it comes {number + turn + 1}."},
        ]
    return messages


def write_tokenizer(folder: Path, template: str = TURNS) -> Path:
    """Write a tokenizer as transformers does, with ``template`` if it is not empty."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for n in range(30) for message in conversation(n)]
    tokenizer.train_from_iterator(texts, trainer)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    if template:
        words.chat_template = template
    words.save_pretrained(folder)
    return folder


def write_conversations(path: Path, talks: list[list[dict]]) -> Path:
    """Write one conversation per line."""
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path

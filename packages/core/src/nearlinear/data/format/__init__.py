"""Token shards: the file format written by data preparation and read by training, version 2.

A shard is a pair of files. `shard-00000.bin` holds raw little-endian token ids, the payload read by
nanoGPT, OLMo and datatrove. `shard-00000.idx` is a Megatron MMIDIDX version 1 index, so
Megatron-Core opens the pair unchanged. The manifest `index.json` lists every shard with its size,
its sha256 and the checksums of its 4 MiB blocks. The manifest is written last: a folder without it
is not a dataset. The package needs only numpy and xxhash.

`shards` reads and writes shard pairs, `checksums` computes block checksums, `manifest` is
`index.json`, and `verify` compares a folder with its manifest.
"""

from .manifest import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Manifest,
    encode_with_hash,
    has_own_hash,
    verify,
    verify_shard,
)
from .shards import (
    BLOCK_BYTES,
    DEFAULT_SHARD_TOKENS,
    SPLITS,
    Checksums,
    Shard,
    ShardWriter,
    dtype_for,
    encode_index,
    read_index,
)

__all__ = [
    "BLOCK_BYTES",
    "DEFAULT_SHARD_TOKENS",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MANIFEST_FILE",
    "SPLITS",
    "TOKENIZER_CONFIG_FILE",
    "TOKENIZER_FILE",
    "Checksums",
    "Manifest",
    "Shard",
    "ShardWriter",
    "dtype_for",
    "encode_index",
    "encode_with_hash",
    "has_own_hash",
    "read_index",
    "verify",
    "verify_shard",
]

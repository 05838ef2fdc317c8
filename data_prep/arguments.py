"""The arguments of the command line, with what `--help` says. Imports nothing heavy."""

import argparse

SOURCES = ("botocore", "openwebtext", "jsonl", "text", "parquet", "hf")
FORMATS = ("smp-json", "hf-arrow", "nanogpt", "datatrove")
PEERS = ("nanogpt", "datatrove", "huggingface")

_EXAMPLES = """examples:
  python -m data_prep prepare botocore                  19 MB of English, needs no network
  python -m data_prep prepare openwebtext --max-tokens 100000000
  python -m data_prep prepare jsonl corpus/*.jsonl.gz --text-field content --out data/corpus
  python -m data_prep prepare parquet crawl/ --workers 32 --dedup exact
  python -m data_prep prepare jsonl crawl/ --filters gopher,c4,fineweb --near-duplicates minhash
  python -m data_prep prepare text books/ --document paragraph --tokenizer llama/tokenizer.json
  python -m data_prep prepare hf HuggingFaceFW/fineweb-edu --config sample-10BT
  python -m data_prep prepare jsonl crawl/ --engine slurm --tasks 200 \\
      --engine-option time=2:00:00 --engine-option partition=cpu
  python -m data_prep prepare jsonl s3://crawl/2024/ --out s3://tokens/mine
  python -m data_prep plan jsonl corpus/                what would be done, in which pieces
  python -m data_prep verify data/botocore              every byte, by its checksums
  python -m data_prep stats data/botocore --report report.html
  python -m data_prep inspect data/botocore             lengths, and the first document
  python -m data_prep export data/botocore --format nanogpt --out nanogpt/data/mine
  python -m data_prep bench corpus.jsonl                against other tools, on your text

A preparation that is stopped, however it is stopped, goes on when it is started again.
`python -m data_prep SOURCE` is short for `python -m data_prep prepare SOURCE`.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m data_prep`."""
    whole = argparse.ArgumentParser(
        prog="python -m data_prep",
        description="Turn text into token shards for training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, about in (
        ("prepare", "make token shards of a source of text, or go on where it was stopped"),
        ("plan", "say in which pieces a source would be prepared, and do nothing"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        _add_sources(command)
    for name, about in (
        ("verify", "check every byte of a prepared folder, by the checksums of its blocks"),
        ("stats", "documents, lengths, duplicates, and what each way of packing keeps"),
        ("inspect", "counts, document lengths and the first document of a prepared folder"),
        ("export", "write a prepared folder as other tools read it"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("folder", metavar="DIR")
        _add_common(command)
        if name == "stats":
            command.add_argument("--report", metavar="FILE", help="also write a page of HTML")
        if name == "export":
            _add_export(command)
    _add_bench(commands)
    return whole


def _add_sources(command: argparse.ArgumentParser) -> None:
    sources = command.add_subparsers(dest="source", required=True, metavar="SOURCE")
    preparing = _preparing_options()

    def source(name: str, about: str) -> argparse.ArgumentParser:
        return sources.add_parser(name, help=about, description=about, parents=[preparing])

    source("botocore", "AWS API documentation in the installed botocore package; no network")
    source("openwebtext", "OpenWebText, 9 billion tokens, streamed from the Hugging Face hub")
    jsonl = source("jsonl", "JSON lines, plain, .gz or .zst, or folders of them")
    jsonl.add_argument("files", nargs="+", metavar="FILE")
    _add_text_field(jsonl)
    jsonl.add_argument("--skip-bad-lines", action="store_true", help="leave out unreadable lines")
    text = source("text", "plain text: files, or folders of .txt and .md files")
    text.add_argument("paths", nargs="+", metavar="PATH")
    text.add_argument("--document", choices=("file", "line", "paragraph"), default="file",
                      help="what one document is (default: file)")  # fmt: skip
    parquet = source("parquet", "Parquet files, or folders of them: a row is a document")
    parquet.add_argument("files", nargs="+", metavar="FILE")
    _add_text_field(parquet)
    hub = source("hf", "a text dataset of the Hugging Face hub, streamed, or one saved to disk")
    hub.add_argument("name", help="such as allenai/c4, or a folder")
    hub.add_argument("--split", default="train", help="split of the dataset (default: train)")
    hub.add_argument("--config", help="configuration of the dataset, such as en")
    _add_text_field(hub)


def _add_text_field(command: argparse.ArgumentParser) -> None:
    command.add_argument("--text-field", default="text", help="field of the text (default: text)")


def _add_common(command) -> None:
    command.add_argument(
        "--json", action="store_true", help="lines of JSON on stdout, for programs"
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")


def _preparing_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("preparing")
    add = group.add_argument
    add("--out", metavar="DIR", help="a folder, or s3://bucket/prefix (default: data/SOURCE)")
    add("--tokenizer", default="gpt2", metavar="gpt2|PATH",
        help="gpt2, or the path of a tokenizer.json (default: gpt2)")  # fmt: skip
    add("--eos-token", metavar="TOKEN", help="end-of-text token, if the tokenizer does not say")
    add("--val-fraction", type=float, default=0.01, metavar="F",
        help="share of the documents held out for validation (default: 0.01)")  # fmt: skip
    add("--seed", type=int, default=0, help="which documents are held out (default: 0)")
    add("--dedup", choices=("exact",), help="drop documents whose text came before")
    add("--filters", default="", metavar="NAMES",
        help="datatrove's quality filters: some of gopher,c4,fineweb")  # fmt: skip
    add("--near-duplicates", choices=("minhash",), help="keep the first of texts nearly alike")
    add("--max-documents", type=int, metavar="N", help="stop after N documents")
    add("--max-tokens", type=int, metavar="N", help="stop after the document that reaches N tokens")
    add("--shard-tokens", type=int, metavar="N", help="tokens per shard file (default: 64 Mi)")
    add("--workers", type=int, metavar="N", help="processes (default: one per core)")
    add("--backend", choices=("fastokens", "gigatoken", "tokenizers"), metavar="NAME",
        help="encoder to try: fastokens, gigatoken, tokenizers (default: in turn)")  # fmt: skip
    add("--engine", choices=("local", "slurm", "ray"), help="an executor of datatrove's to use")
    add("--tasks", type=int, metavar="N", help="tasks of the engine (default: one per core)")
    add("--engine-option", action="append", default=[], metavar="KEY=VALUE",
        help="of datatrove's executor, such as time=2:00:00; may be repeated")  # fmt: skip
    add("--overwrite", action="store_true", help="replace a dataset of other settings, "
        "or go on with what a cluster's jobs left")  # fmt: skip
    _add_common(group)
    return options


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=FORMATS, required=True, help="who is to read it")
    command.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    command.add_argument("--sequence-length", type=int, default=512, metavar="N",
                         help="tokens of a row of smp-json, hf-arrow (default: 512)")  # fmt: skip


def _add_bench(commands) -> None:
    about = "prepare a file with this and with other tools, and compare CPU seconds"
    bench = commands.add_parser("bench", help=about, description=about)
    bench.add_argument("file", metavar="FILE", help="JSON lines, not compressed")
    bench.add_argument("--peers", default=",".join(PEERS), metavar="NAMES",
                       help=f"of {', '.join(PEERS)}; empty for none (default: all)")  # fmt: skip
    bench.add_argument("--folder", metavar="DIR", help="where to work (default: a temporary one)")
    _add_common(bench)

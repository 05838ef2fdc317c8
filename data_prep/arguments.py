"""Command line arguments and their help. Imports nothing heavy, so that `--help` is fast."""

import argparse

SOURCES = ("botocore", "openwebtext", "jsonl", "text", "chat", "preference", "parquet",
           "webdataset", "hf")  # fmt: skip
FORMATS = ("smp-json", "hf-arrow", "nanogpt", "datatrove", "litdata", "mds", "webdataset")
PEERS = ("nanogpt", "datatrove", "huggingface")

_EXAMPLES = """examples:
  nearlinear data prepare botocore                  19 MB of English, needs no network
  nearlinear data prepare openwebtext --max-tokens 100000000
  nearlinear data prepare jsonl corpus/*.jsonl.gz --text-field content --out data/corpus
  nearlinear data prepare parquet crawl/ --workers 32 --dedup exact
  nearlinear data prepare jsonl crawl/ --filters gopher,c4,fineweb --near-duplicates minhash
  nearlinear data prepare jsonl crawl/ --languages en,de --keep-fields url
  nearlinear data prepare jsonl crawl/ --filters pii --decontaminate evals/mmlu.jsonl
  nearlinear data prepare text books/ --document paragraph --tokenizer llama/tokenizer.json
  nearlinear data prepare chat dialogs.jsonl --tokenizer models/my-chat-model
  nearlinear data prepare preference pairs.jsonl --tokenizer models/my-chat-model
  nearlinear data prepare webdataset shards/ --text-member json --keep-fields __key__
  nearlinear data prepare hf HuggingFaceFW/fineweb-edu --config sample-10BT
  nearlinear data prepare jsonl crawl/ --engine slurm --tasks 200 \\
      --engine-option time=2:00:00 --engine-option partition=cpu
  nearlinear data prepare jsonl s3://crawl/2024/ --out s3://tokens/mine
  nearlinear data plan jsonl corpus/                print the input splits only
  nearlinear data audit jsonl crawl/ --filters gopher,c4 --json > dropped.jsonl
  nearlinear data verify data/botocore              compare every byte with its checksum
  nearlinear data stats data/botocore --report report.html
  nearlinear data inspect data/botocore             lengths, and the first document
  nearlinear data find data/corpus "lorem ipsum"    documents with this text, and their files
  nearlinear data why data/corpus corpus.jsonl:17   is it in the dataset, and if not, why
  nearlinear data export data/botocore --format nanogpt --out nanogpt/data/mine
  nearlinear data push data/botocore s3://my-bucket/tokens/botocore
  nearlinear data bench corpus.jsonl                compare with other tools

Run the same command again to resume a stopped preparation.
`nearlinear data SOURCE` is short for `nearlinear data prepare SOURCE`.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of `nearlinear data`."""
    main = argparse.ArgumentParser(
        prog="nearlinear data",
        description="Turn text into token shards for training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    planning = argparse.ArgumentParser(add_help=False)
    _add_common(planning)
    for name, about, options in (
        ("prepare", "write a source of text as token shards, or resume a stopped preparation",
         _preparing_options()),
        ("plan", "print the input splits of a source without preparing it", planning),
        ("audit", "print the documents of a source that quality rules drop, each with its rule",
         _auditing_options()),
    ):  # fmt: skip
        _add_sources(commands.add_parser(name, help=about, description=about), options)
    for name, about in (
        ("verify", "compare every byte of a prepared folder with its checksums"),
        (
            "stats",
            "print documents, lengths, duplicates, and the tokens kept by each packing method",
        ),
        ("inspect", "print counts, document lengths and the first document of a prepared folder"),
        ("find", "print the documents of a prepared folder that contain a text, and their origin"),
        ("why", "print the origin of documents, and why they are in a prepared folder or not"),
        ("export", "write a prepared folder in the format of another tool"),
        ("push", "upload a prepared folder to S3, or resume an upload"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("folder", metavar="DIR")
        _add_common(command)
        if name == "stats":
            command.add_argument(
                "--report", metavar="FILE", help="also write an HTML page with figures"
            )
        if name == "export":
            _add_export(command)
        if name == "find":
            command.add_argument("text", metavar="TEXT")
            command.add_argument("--limit", type=int, default=20, metavar="N",
                                 help="places to print, 0 for all (default: 20)")  # fmt: skip
        if name == "why":
            command.add_argument(
                "documents",
                nargs="+",
                metavar="DOCUMENT",
                help="FILE:NUMBER of the source, as `audit` prints it, "
                "train:NUMBER of a split, both from 1, or train@TOKEN, from 0",
            )
        if name == "push":
            command.add_argument("address", metavar="s3://BUCKET/PREFIX")
    _add_bench(commands)
    return main


def _add_sources(command: argparse.ArgumentParser, options: argparse.ArgumentParser) -> None:
    """Add a subcommand per source, each with `options` as well."""
    sources = command.add_subparsers(dest="source", required=True, metavar="SOURCE")

    def source(name: str, about: str) -> argparse.ArgumentParser:
        return sources.add_parser(name, help=about, description=about, parents=[options])

    source("botocore", "AWS API documentation of the installed botocore package; needs no network")
    _add_revision(
        source("openwebtext", "OpenWebText, 9 billion tokens, streamed from the Hugging Face Hub")
    )
    jsonl = source("jsonl", "JSON lines (.jsonl, .ndjson, .json, also .gz, .bz2, .xz, .zst), or "
                   "folders of them")  # fmt: skip
    jsonl.add_argument("files", nargs="+", metavar="FILE")
    _add_text_field(jsonl)
    _add_skip_bad_lines(jsonl)
    _add_allow_unread(jsonl)
    text = source("text", "plain text: files, or folders of .txt and .md files, also compressed")
    text.add_argument("paths", nargs="+", metavar="PATH")
    _add_allow_unread(text)
    text.add_argument("--document", choices=("file", "line", "paragraph"), default="file",
                      help="unit of a document (default: file)")  # fmt: skip
    for talks in (
        source("chat", "conversations as JSON lines of messages with role and content; only the "
               "assistant's tokens are targets"),
        source("preference", "pairs of conversations as JSON lines of prompt, chosen and rejected, "
               "for training on preferences (DPO)"),
    ):  # fmt: skip
        talks.add_argument("files", nargs="+", metavar="FILE")
        _add_skip_bad_lines(talks)
        _add_allow_unread(talks)
        _add_keep_fields(talks)
        talks.add_argument("--chat-template", metavar="FILE",
                           help="template (Jinja) instead of the tokenizer's")  # fmt: skip
    parquet = source("parquet", "Parquet files, or folders of them; each row is a document")
    parquet.add_argument("files", nargs="+", metavar="FILE")
    _add_text_field(parquet)
    _add_skip_bad_lines(parquet)
    _add_allow_unread(parquet)
    archives = source("webdataset", "WebDataset archives (.tar, also compressed), or folders; "
                      "each sample is a document")  # fmt: skip
    archives.add_argument("files", nargs="+", metavar="FILE")
    archives.add_argument("--text-member", default="txt", metavar="EXTENSION",
                          help="extension of the member that holds the text, such as txt or json "
                          "(default: txt)")  # fmt: skip
    _add_text_field(archives)
    _add_skip_bad_lines(archives)
    _add_allow_unread(archives)
    hub = source("hf", "a text dataset of the Hugging Face Hub, streamed, or one saved to disk")
    hub.add_argument("name", help="dataset, such as allenai/c4, or a folder")
    hub.add_argument("--split", default="train", help="split of the dataset (default: train)")
    hub.add_argument("--config", help="configuration of the dataset, such as en")
    _add_revision(hub)
    _add_text_field(hub)


def _add_skip_bad_lines(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--skip-bad-lines", action="store_true", help="skip rows without readable text"
    )


def _add_allow_unread(command: argparse.ArgumentParser) -> None:
    command.add_argument("--allow-unread", action="store_true",
                         help="leave out other files below a folder")  # fmt: skip


def _add_revision(command: argparse.ArgumentParser) -> None:
    command.add_argument("--revision", metavar="COMMIT",
                         help="commit of the dataset (default: the current one)")  # fmt: skip


def _add_text_field(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--text-field", default="text", help="field that holds the text (default: text)"
    )
    _add_keep_fields(command)


def _add_keep_fields(command: argparse.ArgumentParser) -> None:
    command.add_argument("--keep-fields", default="", metavar="NAMES",
                         help="other fields to keep with each document, such as url,id; `why` and "
                         "`find` show them")  # fmt: skip


def _add_common(command: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    command.add_argument("--json", action="store_true", help="print lines of JSON on stdout")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _preparing_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("preparation")
    add = group.add_argument
    add("--out", metavar="DIR", help="output folder, or s3://bucket/prefix (default: data/SOURCE)")
    add("--tokenizer", default="gpt2", metavar="gpt2|PATH|NAME",
        help="gpt2, the path of a tokenizer.json or of a model, or a model of the Hugging Face Hub "
        "(default: gpt2)")  # fmt: skip
    add("--eos-token", metavar="TOKEN", help="end-of-text token, if the tokenizer does not name it")
    add("--bos-token", metavar="TOKEN", help="token to write before every document (default: none)")
    add("--val-fraction", type=float, default=0.01, metavar="F",
        help="share of the documents held out for validation (default: 0.01)")  # fmt: skip
    add("--seed", type=int, default=0, help="seed that selects the documents held out (default: 0)")
    add("--dedup", choices=("exact",), help="drop documents whose text occurred before")
    _add_filters(group)
    add(
        "--near-duplicates",
        choices=("minhash",),
        help="keep only the first of nearly equal documents",
    )
    add("--max-documents", type=int, metavar="N", help="stop after N documents")
    add("--max-tokens", type=int, metavar="N", help="stop after the document that reaches N tokens")
    add("--shard-tokens", type=int, metavar="N", help="tokens per shard file (default: 64 Mi)")
    add("--workers", type=int, metavar="N", help="worker processes (default: one per core)")
    add("--backend", choices=("fastokens", "gigatoken", "tokenizers"), metavar="NAME",
        help="encoder: fastokens, gigatoken or tokenizers "
        "(default: the fastest that works)")  # fmt: skip
    add("--engine", choices=("local", "slurm", "ray"), help="run under this executor of datatrove")
    add("--tasks", type=int, metavar="N", help="tasks of the engine (default: one per core)")
    add("--engine-option", action="append", default=[], metavar="KEY=VALUE",
        help="option of datatrove's executor, such as time=2:00:00; may be repeated")  # fmt: skip
    add("--overwrite", action="store_true", help="replace a dataset of other settings, "
        "or resume from finished splits of cluster jobs")  # fmt: skip
    _add_common(group)
    return options


def _auditing_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    _add_filters(options)
    _add_common(options)
    return options


def _add_filters(options: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    options.add_argument("--filters", default="", metavar="NAMES",
                         help="quality rules, some of gopher,c4,fineweb, and pii, which masks "
                         "e-mail and public IP addresses")  # fmt: skip
    options.add_argument(
        "--languages",
        default="",
        metavar="CODES",
        help="keep documents in these languages only, such as en,de",
    )
    options.add_argument("--decontaminate", action="append", default=[], metavar="FILE",
                         help="leave out documents that share 12 words in a row with this "
                         "evaluation set: JSON lines with text, or with query and label; may be "
                         "repeated")  # fmt: skip


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", choices=FORMATS, required=True, help="file format")
    command.add_argument("--out", metavar="DIR", required=True, help="new folder to write")
    command.add_argument(
        "--sequence-length",
        type=int,
        default=512,
        metavar="N",
        help="tokens per row of smp-json, hf-arrow, mds and webdataset (default: 512)",
    )


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = "prepare a file with this and with other tools, and compare their CPU seconds"
    bench = commands.add_parser("bench", help=about, description=about)
    bench.add_argument("file", metavar="FILE", help="uncompressed JSON lines")
    bench.add_argument("--peers", default=",".join(PEERS), metavar="NAMES",
                       help=f"some of {', '.join(PEERS)}; empty: none (default: all)")  # fmt: skip
    bench.add_argument("--folder", metavar="DIR", help="work folder (default: a temporary one)")
    _add_common(bench)

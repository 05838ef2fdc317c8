"""The command line: `python -m data_prep SOURCE ...`, `verify DIR`, `inspect DIR`.

Exit codes: 0 done, 2 an error the user can act on (one line on stderr; `--debug` adds the
traceback), 130 interrupted. Everything heavy is imported after the arguments are parsed.
"""

import argparse
import sys

_EXAMPLES = """examples:
  python -m data_prep botocore                          19 MB of English, needs no network
  python -m data_prep openwebtext --max-tokens 100000000
  python -m data_prep jsonl corpus/*.jsonl.gz --text-field content --out data/corpus
  python -m data_prep text books/ --document paragraph --tokenizer llama/tokenizer.json
  python -m data_prep hf HuggingFaceFW/fineweb-edu --config sample-10BT --max-documents 50000
  python -m data_prep verify data/botocore
  python -m data_prep inspect data/botocore
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to the process's."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        print("interrupted: the output folder is as it was before", file=sys.stderr)
        return 130
    except Exception as error:
        message = None if options.debug else _message(error)
        if message is None:
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command == "verify":
        from nearlinear.data.format import verify

        manifest = verify(options.folder)
        print(
            f"ok: {options.folder}, {manifest.total('tokens'):,} tokens in "
            f"{sum(map(len, manifest.splits.values()))} shards, every byte as written"
        )
        return 0
    from data_prep import report

    if options.command == "inspect":
        print(report.inspect(options.folder))
        return 0
    from data_prep.build import prepare

    source = _source(options)
    out = options.out or f"data/{source.name}"
    limits = {"shard_tokens": options.shard_tokens} if options.shard_tokens is not None else {}
    prepare(
        source,
        out,
        tokenizer=options.tokenizer,
        eos_token=options.eos_token,
        val_fraction=options.val_fraction,
        seed=options.seed,
        max_documents=options.max_documents,
        max_tokens=options.max_tokens,
        overwrite=options.overwrite,
        **limits,
    )
    print(report.summary(out))
    return 0


def _source(options: argparse.Namespace):
    from data_prep import sources

    if options.command == "jsonl":
        return sources.jsonl(options.files, options.text_field, options.skip_bad_lines)
    if options.command == "text":
        return sources.text(options.paths, options.document)
    if options.command == "hf":
        return sources.huggingface(options.name, options.split, options.config, options.text_field)
    return {"botocore": sources.botocore, "openwebtext": sources.openwebtext}[options.command]()


def _message(error: Exception) -> str | None:
    """What to tell the user about `error`; None when it is a defect of ours."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"the package {error.name.split('.')[0]} is not installed: run "
            "`pip install -e 'packages/core[data]'` in the repository's folder"
        )
    from nearlinear.errors import NearlinearError

    return str(error) if isinstance(error, (NearlinearError, OSError)) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep",
        description="Turn text into token shards for training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    preparing = _preparing_options()

    def source(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=about, parents=[preparing])

    source("botocore", "AWS API documentation in the installed botocore package; no network")
    source("openwebtext", "OpenWebText, 9 billion tokens, streamed from the Hugging Face hub")
    jsonl = source("jsonl", "JSON lines, plain or .gz: one object per line")
    jsonl.add_argument("files", nargs="+", metavar="FILE")
    jsonl.add_argument("--text-field", default="text", help="field of the text (default: text)")
    jsonl.add_argument("--skip-bad-lines", action="store_true", help="leave out unreadable lines")
    text = source("text", "plain text: files, or folders of .txt and .md files")
    text.add_argument("paths", nargs="+", metavar="PATH")
    text.add_argument("--document", choices=("file", "line", "paragraph"), default="file",
                      help="what one document is (default: file)")  # fmt: skip
    hub = source("hf", "any text dataset of the Hugging Face hub, streamed")
    hub.add_argument("name", help="such as allenai/c4")
    hub.add_argument("--split", default="train", help="split of the dataset (default: train)")
    hub.add_argument("--config", help="configuration of the dataset, such as en")
    hub.add_argument("--text-field", default="text", help="field of the text (default: text)")
    for name, about in (
        ("verify", "check every byte of a prepared folder"),
        ("inspect", "counts, document lengths and the first document of a prepared folder"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("folder", metavar="DIR")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _preparing_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("preparing")
    add = group.add_argument
    add("--out", metavar="DIR", help="output folder (default: data/SOURCE)")
    add("--tokenizer", default="gpt2", metavar="gpt2|PATH",
        help="gpt2, or the path of a tokenizer.json (default: gpt2)")  # fmt: skip
    add("--eos-token", metavar="TOKEN", help="end-of-text token, if the tokenizer does not say")
    add("--val-fraction", type=float, default=0.01, metavar="F",
        help="share of the documents held out for validation (default: 0.01)")  # fmt: skip
    add("--seed", type=int, default=0, help="which documents are held out (default: 0)")
    add("--max-documents", type=int, metavar="N", help="stop after N documents")
    add("--max-tokens", type=int, metavar="N", help="stop after the document that reaches N tokens")
    add("--shard-tokens", type=int, metavar="N", help="tokens per shard file (default: 64 Mi)")
    add("--overwrite", action="store_true", help="replace a dataset of other settings")
    add("--debug", action="store_true", help="show tracebacks")
    return options


if __name__ == "__main__":
    sys.exit(main())

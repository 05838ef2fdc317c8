"""Command line: `nearlinear data prepare SOURCE`, `verify DIR` and more (`--help`).

Exit codes: 0 for success, 2 for an error that the user can act on (one line on stderr; `--debug`
shows the traceback), 130 for an interruption. Heavy modules are imported after parsing.
"""

import argparse
import errno
import json
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from data_prep.arguments import SOURCES, parser

if TYPE_CHECKING:
    from data_prep.sources import Source
    from data_prep.tokenizer import TextTokenizer


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` default to `sys.argv`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in SOURCES:
        arguments = ["prepare", *arguments]
    options = parser().parse_args(arguments)
    try:
        _COMMANDS[options.command](options)
        return 0
    except KeyboardInterrupt:
        print(
            "interrupted: the output folder is unchanged; run the same command to resume",
            file=sys.stderr,
        )
        return 130
    except Exception as error:
        message = None if options.debug else _user_message(error, options)
        if message is None:
            raise
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _prepare(options: argparse.Namespace) -> None:
    from data_prep import output, report
    from data_prep.build import prepare

    source = _source(options)
    out = options.out or f"data/{source.name}"
    given: dict[str, Any] = {}
    if options.shard_tokens is not None:
        given["shard_tokens"] = options.shard_tokens
    if options.backend is not None:
        given["backends"] = (options.backend,)
    manifest = prepare(
        source,
        out,
        tokenizer=_tokenizer(options),
        eos_token=options.eos_token,
        bos_token=options.bos_token,
        val_fraction=options.val_fraction,
        seed=options.seed,
        dedup=options.dedup,
        filters=_listed(options.filters),
        decontaminate=options.decontaminate,
        languages=_listed(options.languages),
        near_duplicates=options.near_duplicates,
        max_documents=options.max_documents,
        max_tokens=options.max_tokens,
        workers=options.workers,
        engine=options.engine,
        tasks=options.tasks,
        engine_options=_parse_pairs(options.engine_option),
        overwrite=options.overwrite,
        progress="json" if options.json else True,
        **given,
    )
    if manifest is None and options.json:
        _print_json(
            {"event": "submitted", "folder": str(out), "logs": str(output.logs_folder(out))}
        )
    elif manifest is None:
        print(f"submitted: {out} will exist when the jobs are done; their logs are in "
              f"{output.logs_folder(out)}")  # fmt: skip
    elif options.json:
        _print_json({"event": "prepared", "folder": str(out), "fingerprint": manifest.fingerprint})
    else:
        print(report.summary(out))


def _plan(options: argparse.Namespace) -> None:
    source = _source(options)
    splits = source.splits()
    if options.json:
        _print_json({"source": source.name, "inputs": source.inputs, "splits": splits,
                     "unread": source.unread})  # fmt: skip
        return
    sizes = [split.bytes for split in splits]
    known = [size for size in sizes if size is not None]
    print(f"{source.name}: {len(source.inputs) or 1} inputs in {len(splits)} splits")
    if sizes and len(known) == len(sizes):
        print(f"  {sum(known) / 1e6:,.1f} MB, the largest split {max(known) / 1e6:,.1f} MB")
    print("  a split is the unit of work of one worker, and of resumption")
    for unread in source.unread:
        print(f"  not read: {unread.path} ({unread.reason})")


def _audit(options: argparse.Namespace) -> None:
    from data_prep.audit import dropped_documents

    names, languages = _listed(options.filters), _listed(options.languages)
    for dropped in dropped_documents(_source(options), names, options.decontaminate, languages):
        if options.json:
            _print_json(dropped._asdict())
        else:
            shown = " ".join(dropped.text.split())
            print(f"{dropped.input}:{dropped.document}  {dropped.rule}  {shown}")


def _verify(options: argparse.Namespace) -> None:
    from data_prep.provenance import check_table
    from data_prep.resume import check_history
    from nearlinear.data.format import verify

    start = time.perf_counter()
    manifest = verify(options.folder)
    check_history(options.folder)
    check_table(options.folder, manifest)
    seconds = time.perf_counter() - start
    tokens, size = manifest.total("tokens"), manifest.total("bytes")
    if options.json:
        _print_json({"event": "verified", "folder": options.folder, "tokens": tokens,
                     "bytes": size, "seconds": seconds,
                     "fingerprint": manifest.fingerprint})  # fmt: skip
        return
    print(
        f"ok: {options.folder}, {tokens:,} tokens in {sum(map(len, manifest.splits.values()))} "
        f"shards, every byte as written ({size / 1e9 / seconds:.1f} GB/s)"
    )


def _stats(options: argparse.Namespace) -> None:
    from data_prep import report
    from nearlinear.data.format import Manifest

    if options.report:
        report.write_page(options.folder, options.report)
    if options.json:
        _print_json(Manifest.read(options.folder).statistics)
    else:
        print(report.stats(options.folder))


def _inspect(options: argparse.Namespace) -> None:
    from data_prep import report

    if options.json:
        _print_json({"event": "inspected", "folder": options.folder,
                     **report.inspect_json(options.folder)})  # fmt: skip
    else:
        print(report.inspect(options.folder))


def _find(options: argparse.Namespace) -> None:
    from data_prep.lookup import find

    count = 0
    for match in islice(find(options.folder, options.text), options.limit or None):
        count, origin = count + 1, match.origin
        if options.json:
            _print_json({**match._asdict(), "origin": origin and origin._asdict()})
            continue
        shown = " ".join(f"...{match.before}{match.text}{match.after}...".split())
        where = f"  {origin.input}:{origin.number}" if origin else ""
        print(f"{match.split}:{match.document}{where}  {shown}")
    if not options.json and not count:
        print(f"no document of {options.folder} contains it")
    elif not options.json and count == options.limit:  # to look for more may read the whole dataset
        print(f"stopped after {count} places: --limit {2 * count} prints more, --limit 0 all")


def _why(options: argparse.Namespace) -> None:
    from data_prep.lookup import why

    for document in options.documents:
        origin = why(options.folder, document)
        if options.json:
            _print_json(origin._asdict())
        else:
            print(origin)


def _export(options: argparse.Namespace) -> None:
    from data_prep.export import export

    rows = export(options.folder, options.out, options.format, options.sequence_length)
    if options.json:
        _print_json({"event": "exported", "folder": options.out, "format": options.format, **rows})
    else:
        counts = ", ".join(f"{count:,} {name}" for name, count in rows.items())
        print(f"{options.folder} -> {options.out} as {options.format}: {counts}")


def _push(options: argparse.Namespace) -> None:
    from data_prep.push import push

    sent = push(options.folder, options.address, progress=not options.json)
    if options.json:
        _print_json({"address": options.address, "bytes": sent})
    else:
        print(f"complete: {options.address} ({sent / 2**20:.1f} MiB sent)")
        print(f'read it in a job: [job.inputs.train] s3 = "{options.address}"')


def _bench(options: argparse.Namespace) -> None:
    from data_prep.bench import bench

    peers = [name for name in options.peers.split(",") if name]
    found = bench(options.file, peers, options.folder, verbose=not options.json)
    if options.json:
        _print_json(found)


_COMMANDS = {
    "prepare": _prepare,
    "plan": _plan,
    "audit": _audit,
    "verify": _verify,
    "stats": _stats,
    "inspect": _inspect,
    "find": _find,
    "why": _why,
    "export": _export,
    "push": _push,
    "bench": _bench,
}


def _listed(names: str) -> list[str]:
    """Return the names of a list with commas."""
    return [name for name in names.split(",") if name]


def _source(options: argparse.Namespace) -> "Source":
    from data_prep import sources

    fields = _listed(getattr(options, "keep_fields", ""))
    if options.source in ("jsonl", "parquet", "webdataset"):
        members = {"text_member": options.text_member} if options.source == "webdataset" else {}
        return getattr(sources, options.source)(
            options.files,
            text_field=options.text_field,
            skip_bad_lines=options.skip_bad_lines,
            allow_unread=options.allow_unread,
            fields=fields,
            **members,
        )
    if options.source in ("chat", "preference"):
        read = sources.chat if options.source == "chat" else sources.preference
        return read(options.files, options.skip_bad_lines, options.allow_unread, fields)
    if options.source == "text":
        return sources.text(options.paths, options.document, options.allow_unread)
    if options.source == "hf":
        return sources.huggingface(
            options.name,
            options.split,
            options.config,
            options.text_field,
            options.revision,
            fields,
        )
    if options.source == "openwebtext":
        return sources.openwebtext(options.revision)
    return sources.botocore()


def _tokenizer(options: argparse.Namespace) -> "str | TextTokenizer":
    """Return the tokenizer's name, or the tokenizer with the template of --chat-template."""
    if not getattr(options, "chat_template", None):
        return options.tokenizer
    from dataclasses import replace
    from pathlib import Path

    from data_prep.tokenizer import load

    found = load(options.tokenizer, options.eos_token)
    config = json.loads(found.config)
    config["chat_template"] = Path(options.chat_template).read_text(encoding="utf-8")
    return replace(found, config=json.dumps(config))


def _parse_pairs(options: list[str]) -> dict[str, int | str]:
    """Parse KEY=VALUE pairs; integers become numbers."""
    from nearlinear.errors import ConfigError

    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"--engine-option {option} has no value: write KEY=VALUE")
        found[key] = int(value) if value.isdigit() else value
    return found


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def _user_message(error: Exception, options: argparse.Namespace) -> str | None:
    """Return the message for a user error, or None for a defect of this package."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # often without a file name
        places = [error.filename, *(getattr(options, name, None) for name in ("out", "folder"))]
        place = next(filter(None, places), "data")
        return (
            f"no space is left on the file system of {place}: free space, or name another folder, "
            "and run the same command again to resume"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"the package {error.name.split('.')[0]} is not installed: run "
            "`pip install 'nearlinear[data]'`"
        )
    from nearlinear.errors import NearlinearError

    return str(error) if isinstance(error, (NearlinearError, OSError)) else None


if __name__ == "__main__":
    sys.exit(main())

"""The tables of a terminal: a row per size, all backends side by side."""

from __future__ import annotations

from nearlinear_collectives.bench.sizes import show

from .plan import CEILING, show_rate

LEGEND = f"""\
per node: what a node contributes to all_gather, gets from reduce_scatter; all_reduce's buffer is
that times the nodes. size: all_gather's output, reduce_scatter's input, all_reduce's buffer.
link: bytes that must cross a node's NIC / time / rate, the median (best) of blocks; Ethernet, IP
and TCP headers leave {100 * CEILING:.1f} % to data. sent: bytes that the busiest NIC sent / bytes
it must send, by its counter."""


def head(operation: str, nodes: int, ranks: int, rate: int, labels: list[str]) -> str:
    """The lines above the rows."""
    names = ["per node", "size", *(f"{label} link" for label in labels)]
    names += [f"{label} sent" for label in labels]
    names += [f"{label}/{labels[0]} time" for label in labels[1:]]
    widths = _widths(labels)
    cells = [name.rjust(width) for name, width in zip(names, widths, strict=True)]
    rule = "|".join("-" * (width + 1) + ":" for width in widths)
    title = f"{operation}, {nodes} nodes x {ranks} rank{'s' * (ranks > 1)}, {show_rate(rate)}"
    return f"\n{title}\n\n| {' | '.join(cells)} |\n|{rule}|"


def row(records: list[dict]) -> str:
    """One size's records, in the order of the head's labels."""
    first = records[0]
    texts = [show(first["bytes_per_node"]), show(first["bytes"])]
    texts += [link(record) for record in records]
    texts += [f"{record['sent_over_necessary']:.2f}" for record in records]
    texts += [f"{record['median_us'] / first['median_us']:.2f}" for record in records[1:]]
    widths = _widths([record["contender"] for record in records])
    cells = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
    return f"| {' | '.join(cells)} |"


def link(record: dict) -> str:
    """``94.7 % (95.2)``: the share of the link that was used, the median and the best block."""
    text = f"{100 * record['link_used']:.1f} % ({100 * record['link_used_at_best']:.1f})"
    return text + (f" {record['wrong']} WRONG" if record["wrong"] else "")


def _widths(labels: list[str]) -> list[int]:
    names = [len(label) + 5 for label in labels]
    ratios = [len(f"{label}/{labels[0]} time") for label in labels[1:]]
    return [8, 8, *(max(14, width) for width in names), *names, *ratios]

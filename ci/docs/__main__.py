"""Build the site: ``python -m ci.docs``; ``./run docs`` installs its packages first.

    ./run docs                 build artifacts/docs; nothing is done if nothing changed
    ./run docs --serve         build, and serve it on http://127.0.0.1:8000
    ./run docs --draft         with the outputs of notebooks at hand, also old ones or none

Notebooks whose code or libraries changed are executed first. Warnings, broken links, misspelled
words, weak English (`ci.prose`) and resources from a network are errors.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from ci import api_reference
from ci.docs import PAGES, REPOSITORY, ROOT, SITE, checks, figures, reference, tutorials, twins

STAMP = ".sources"
CONF = Path(__file__).parent
PACKAGES = ("sphinx", "myst-nb", "myst-parser", "furo", "sphinx-design", "sphinx-copybutton")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run docs", description="Build the documentation site.")
    parser.add_argument("--serve", action="store_true", help="serve the site after the build")
    parser.add_argument("--port", type=int, default=8000, help="port of --serve (default: 8000)")
    parser.add_argument("--draft", action="store_true", help="do not execute stale notebooks")
    parser.add_argument("--output", type=Path, default=SITE, metavar="FOLDER")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    if (stale := tutorials.stale()) and not options.draft:
        print(f"notebooks to execute: {', '.join(stale)}", flush=True)
        if code := tutorials.execute(stale):
            return code
    site = options.output.resolve()
    key = sources_key()
    stamp = site / STAMP
    if stamp.exists() and stamp.read_text() == key:
        print(f"nothing changed; the site is {site}/index.html")
    elif code := build(site):
        return code
    else:
        stamp.write_text(key)
        print(f"built in {time.monotonic() - begin:.0f} s: {site}/index.html")
    return serve(site, options.port) if options.serve else 0


def build(site: Path) -> int:
    """Build and check the site; return 1 and print the faults if there are any."""
    (site / STAMP).unlink(missing_ok=True)
    write_generated()
    if api_reference.PAGE.read_text(encoding="utf-8") != api_reference.render():
        print("the API reference differs from the docstrings: python -m ci.api_reference")
        return 1
    doctrees = site.parent / f"{site.name}-doctrees"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-j", "auto"]
    command += ["-c", str(CONF), "-d", str(doctrees), str(PAGES), str(site)]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        return code
    names = twins.write(site)
    for left in sorted({*site.rglob("*.html")}):  # pages whose source is gone
        name = str(left.relative_to(site).with_suffix(""))
        if name not in names and left.name not in checks.IGNORED and "_static" not in left.parts:
            left.unlink()
    faults = [*checks.links_and_structure(site), *checks.remote_resources(site)]
    faults += [*checks.spelling(), *checks.english()]
    for fault in faults:
        print(fault)
    print(f"{len(names)} pages, {len(faults)} faults")
    return 1 if faults else 0


def write_generated() -> None:
    """Write the generated pages, figures and tutorials beside the other pages."""
    for name, text in reference.pages().items():
        path = PAGES / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    figures.draw_all(PAGES / "_figures")
    tutorials.write_pages()


def sources_key() -> str:
    """Return a hash of everything that the site is made from."""
    digest = hashlib.sha256(json.dumps({name: version(name) for name in PACKAGES}).encode())
    digest.update(os.environ.get(REPOSITORY, "").encode())
    folders = (PAGES, CONF, *reference.SOURCES.values(), ROOT / "notebooks", tutorials.EXECUTED)
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    files |= {ROOT / "run", ROOT / "CONTRIBUTING.md", ROOT / "ci/benchmarks/compare/README.md"}
    generated = {PAGES / name for name in (*reference.PAGES, "_figures")}
    generated |= set(PAGES.glob("tutorials/*.ipynb"))
    for path in sorted(files):
        if path.suffix in (".pyc", ".so", ".html", ".png") or generated & {path, path.parent}:
            continue
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def serve(site: Path, port: int) -> int:
    """Serve the site on this machine until Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell may ignore it
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"serving on http://127.0.0.1:{server.server_address[1]} until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

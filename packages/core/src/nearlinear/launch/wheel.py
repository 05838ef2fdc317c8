"""Pack the installed nearlinear as a wheel, to ship to machines whose image does not contain it.

The wheel holds the code that runs here, also of an editable install, and its requirements. On the
other machine pip installs missing requirements and keeps an installed torch.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from ..errors import ConfigError

PACKAGES = ("nearlinear", "data_prep")
"""Packages of the wheel, as in a release."""
WHEEL_NAME = f"nearlinear-{__version__}-py3-none-any.whl"
_TIME = (1980, 1, 1, 0, 0, 0)  # of every file: the same code gives the same bytes


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the running code to ``folder`` and return its path.

    Raises:
        ConfigError: The metadata of the installation is missing.
    """
    try:
        metadata = importlib.metadata.distribution("nearlinear").read_text("METADATA") or ""
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            'image = "auto" ships the installed nearlinear, but only its source folder is on the '
            "path: install it with pip install -e packages/core, or name an image with nearlinear"
        ) from None
    info = f"nearlinear-{__version__}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: nearlinear\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    scripts = "[console_scripts]\nnearlinear = nearlinear.cli:main\n"
    contents = dict(_package_files())
    contents[f"{info}/METADATA"] = metadata.encode()
    contents[f"{info}/WHEEL"] = tags.encode()
    contents[f"{info}/entry_points.txt"] = scripts.encode()
    record = [f"{name},{_digest(data)},{len(data)}" for name, data in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    path = folder / WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED, 9)
    return path


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files of `PACKAGES`, without bytecode."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(root).as_posix()}", path.read_bytes()


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"

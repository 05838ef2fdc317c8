"""Files that a command writes beside what it prints: checked before the work, written after it."""

import os
from pathlib import Path

from .errors import ConfigError


def check(flag: str, path: str, suffix: str, source: str = "") -> None:
    """Raise ConfigError where ``path`` cannot be written, or is the config file ``source``.

    ``flag`` is what named it; an empty path is none.
    """
    if not path:
        return
    file = Path(path)
    if file.suffix != suffix:
        raise ConfigError(f"{flag} {path}: the file's name must end in {suffix}")
    if source and file.resolve() == Path(source).resolve():
        raise ConfigError(f"{flag} {path} is the config itself: name another file")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: name a file in a folder that can")


def write(path: str, text: str) -> None:
    """Write ``text`` and say so; an empty path is none. Raises ConfigError."""
    if not path:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    print(f"wrote {path}", flush=True)

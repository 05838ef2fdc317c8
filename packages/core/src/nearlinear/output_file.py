"""Output files named by command-line flags: checked before the work, written after it."""

import os
from pathlib import Path

from .errors import ConfigError


def check_output_file(flag: str, path: str, suffix: str, source: str = "") -> None:
    """Raise ConfigError if ``path`` cannot be written.

    Args:
        flag: Command-line flag that named the file, for messages.
        path: File to write. An empty path is accepted and means no file.
        suffix: Required suffix of the file name, such as ".json".
        source: Config file of the command, which must not be overwritten.
    """
    if not path:
        return
    file = Path(path)
    if file.suffix != suffix:
        raise ConfigError(f"{flag} {path}: the file name must end in {suffix}")
    if source and file.resolve() == Path(source).resolve():
        raise ConfigError(f"{flag} {path} is the config file itself: choose another file")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: choose a file in a writable folder")


def write_output_file(path: str, text: str) -> None:
    """Write ``text`` to ``path`` and print the path. An empty path means no file.

    Raises ConfigError if the file cannot be written.
    """
    if not path:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})") from None
    print(f"wrote {path}", flush=True)

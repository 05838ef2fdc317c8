"""Errors meant for the person who runs nearlinear.

Every message is one line that names the cause and the remedy. The command line prints the
message alone and exits with the error's code; a traceback appears only with ``--debug``. Anything
that is not a `NearlinearError` is a defect of ours and keeps its traceback.
"""


class NearlinearError(Exception):
    """The base of every error a user can act on."""

    exit_code = 2
    """of the command line"""
    word = "error"
    """what the command line calls it"""
    everywhere = False
    """whether all ranks of a job meet with it together, so that none waits for another"""


class ConfigError(NearlinearError, ValueError):
    """A configuration key, value or combination that cannot be used."""


class DataError(NearlinearError, ValueError):
    """Token shards or input text that are missing, empty, altered or of another kind."""


class CheckpointError(NearlinearError, ValueError):
    """A checkpoint that cannot be written, or is not whole, altered, or of another run."""

    everywhere = True


class StorageError(CheckpointError, DataError):
    """A folder or a bucket, of checkpoints or of data, that is not there or does not let us in."""

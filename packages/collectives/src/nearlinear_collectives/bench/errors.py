"""What a user can correct: the command line prints the message alone and exits with status 2."""


class UsageError(ValueError):
    """The request cannot be carried out; the message names the cause and the remedy."""

"""Version of the package, read by the build backend."""

__version__ = "0.1.0"

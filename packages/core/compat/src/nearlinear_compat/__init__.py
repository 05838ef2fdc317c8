"""Run scripts of other libraries on nearlinear, unmodified.

::

    torchrun --nproc-per-node 2 -m nearlinear_compat run train.py --my-arguments

provides the modules of `finder.ALIASES` to ``train.py`` and nothing to any other program. In a
program of your own call `install` before the imports. A library that is installed is never
replaced.
"""

from .finder import install

__all__ = ["install"]

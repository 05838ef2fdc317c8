"""The engine against MPI, C against C: ``python -m ci.benchmarks.mpi`` (needs a C/C++ compiler).

Open MPI, MPICH and Intel MPI come from PyPI into a folder that is thrown away afterwards. One
measuring program (measure.c) is linked with each library and with the engine; for each round,
operation and number of ranks every contender's program runs in turn.
"""

"""Compare the engine with MPI libraries in C: ``python -m ci.benchmarks.mpi`` (needs a compiler).

Open MPI, MPICH and Intel MPI are installed from PyPI into a temporary folder. One measuring program
(measure.c) is linked with each library and with the engine. For each round, operation and number
of ranks, the programs of all contenders run in turn.
"""

"""Link utilization of collectives on an emulated cluster of this machine.

All backends live in the same processes and run block by block in turn, as in the single-node
benchmark of the collectives. Ranks are started once per number of ranks per node.
Command line: `python -m ci.benchmarks.network --help`.
"""

"""How much of its NIC a node uses in a collective, on an emulated cluster of this machine.

Every backend lives in the same processes and takes its turn block by block, as in
`nearlinear_collectives.bench`; ranks are started once per number of ranks per node.
Command line: `python -m ci.benchmarks.network --help`.
"""

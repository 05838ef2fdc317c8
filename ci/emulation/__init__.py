"""Emulated infrastructure on one machine, for tests, notebooks and benchmarks.

``cluster`` emulates nodes and links with Linux namespaces, ``aws`` is an AWS account on loopback,
``lustre`` a folder that behaves like an FSx for Lustre mount, and ``slurm`` a two-node Slurm.
"""

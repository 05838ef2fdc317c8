"""Benchmark of `torch.distributed` backends on CPU tensors.

All backends run in the same processes, each as a process group over the same ranks. They are
measured in turn, block by block, so that background load affects all of them equally.
Run ``python -m ci.benchmarks.collectives --help``.
"""

"""How far apart two of this machine's cores are: ``python -m ci.benchmarks.cores``.

On a virtual machine the host may move cores about. Two of them within one core complex pass a
cache line on in some 60 ns, in two complexes in some 250 ns, and ranks that share memory are as
much slower. Whoever compares timings wants to know in which state they were taken.
"""

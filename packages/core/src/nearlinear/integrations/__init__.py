"""Sharding and two-hop synchronization inside other training programs.

Each module extends one host by its documented extension points: `accelerate` (an ``Accelerator``),
`hugging_face` (a ``Trainer``), `lightning` (a ``Strategy``), `ray` (calls in a worker function) and
`torchtitan` (a ``parallelize_fn``). The host keeps its loop, data loaders, logging and schedulers.
The modules import their host, an optional dependency.
"""

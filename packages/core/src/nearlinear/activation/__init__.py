"""Activation checkpointing and offload.

`api` has the public functions. `wrapper` intercepts the call of each block and runs it with
`checkpointing` (each block, groups of blocks, or selective) or a `memory_budget`. `offload` moves
saved tensors to a `host_buffer` and back.
"""

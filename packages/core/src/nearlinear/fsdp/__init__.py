"""Sharded data parallelism: MiCS on PyTorch's FSDP2, two-hop gradient synchronization, overlap."""

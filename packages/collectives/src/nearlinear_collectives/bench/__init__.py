"""Backends of `torch.distributed` side by side: ``python -m nearlinear_collectives.bench``.

Every backend lives in the same processes, as a group over the same ranks; they are measured in
turn, block by block, so that what else the machine does meets all of them alike.
"""

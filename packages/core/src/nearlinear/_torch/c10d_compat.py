"""Collectives of torch.distributed whose names differ between releases."""

import torch.distributed as dist

# torch 2.13 deprecates the old names, which are the only ones before it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

"""Names of torch.distributed that have changed, the same on every release."""

import torch.distributed as dist

# The old ones are deprecated since torch 2.13 and all that is there before it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

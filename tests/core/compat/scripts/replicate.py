"""Data parallelism in the way of SMDDP's documentation: the backend's name is the only change."""

import sys

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(8, 4).chunk(size)[rank]
for _ in range(2):
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
mean = loss.detach().clone()
dist.all_reduce(mean)
if rank == 0:
    print(f"{sys.argv[1]} {dist.get_backend()} {mean.item() / size:.6f}")
dist.destroy_process_group()

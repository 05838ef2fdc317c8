"""Scripts of SMDDP (`nearlinear.compat.smddp`): the backend name, DDP, FSDP, older names."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

import nearlinear as nl
from nearlinear.compat import tsm
from nearlinear.distributed.collectives import backend_of
from tests.support import parity


def losses_of(model, rank, ranks):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    found = []
    for step in range(2):
        ids = parity.rows(step)["input_ids"].chunk(ranks)[rank]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if ranks > 1:
            dist.all_reduce(loss)
        found.append(loss.item() / ranks)
    return found


def script(rank, folder, hide):
    """DDP, FSDP2, and SMP v2's FSDP over the backend "smddp", in one job of processes."""
    dist.destroy_process_group()
    if hide:
        sys.modules["nearlinear_collectives"] = None
        sys.modules.pop("nearlinear.compat.smddp.torch_smddp", None)
    from nearlinear.compat.smddp import distributed as smddp
    from nearlinear.compat.smddp.parallel.distributed import DistributedDataParallel

    store = dist.FileStore(f"{folder}/store", 2)
    smddp.init_process_group(store=store, rank=rank, world_size=2)
    assert dist.get_backend() == "smddp" and smddp.get_rank() == rank
    assert smddp.get_local_rank() == rank and smddp.get_world_size() == 2
    subgroup = dist.new_group([0, 1])
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=subgroup)
    found = {"mean": mean.item(), "stands for": backend_of()}
    ddp = DistributedDataParallel(parity.build("llama"), device_ids=[rank])
    found["ddp"] = losses_of(ddp, rank, 2)
    fsdp = parity.build("llama")
    for block in fsdp.model.layers:
        fully_shard(block)
    found["fsdp"] = losses_of(fully_shard(fsdp), rank, 2)
    tsm.init({"hybrid_shard_degree": 2})
    found["tsm"] = losses_of(FSDP(parity.build("llama")), rank, 2)
    return found


@pytest.mark.parametrize(("hide", "stands_for"), [(False, "nearlinear"), (True, "gloo")])
def test_scripts_over_smddp(tmp_path, hide, stands_for):
    """With nearlinear-collectives, and as if it were not installed."""
    if not hide:
        pytest.importorskip("nearlinear_collectives")
    expected = losses_of(parity.build("llama"), 0, 1)
    for found in nl.spmd.run(script, 2, args=(str(tmp_path), hide), processes=True):
        assert found.pop("stands for") == stands_for and found.pop("mean") == 0.5
        for losses in found.values():
            assert losses == pytest.approx(expected, abs=1e-5)


def test_environment_variables_are_accepted(caplog, monkeypatch):
    from nearlinear.compat.smddp import torch_smddp

    caplog.set_level("INFO")
    monkeypatch.setattr(torch_smddp, "BACKEND_ALIASES", {})
    monkeypatch.setenv("SMDATAPARALLEL_SERVER_PORT", "7592")
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *args, **kwargs: None)
    stands_for = torch_smddp.register()
    assert f"smddp stands for {stands_for}" in caplog.text
    assert "SMDATAPARALLEL_SERVER_PORT has no effect here: there are no servers" in caplog.text

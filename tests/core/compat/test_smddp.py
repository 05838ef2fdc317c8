"""Scripts of SMDDP (`nearlinear.compat.smddp`): the backend name, DDP, FSDP, older names."""

import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

import nearlinear as nl
from nearlinear.compat import tsm
from nearlinear.compat.smddp import distributed as smddp
from nearlinear.compat.smddp import torch_smddp
from nearlinear.compat.smddp.parallel.distributed import DistributedDataParallel
from nearlinear.distributed.collectives import backend_of
from tests.core.compat.test_smp_v2_page import block
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


def leave():
    """Leave the job of both ranks, once both have joined it.

    Gloo fails in a rank that still connects to one that has already left.
    """
    dist.barrier()
    dist.destroy_process_group()


def join_by_page(rank, port, words):
    """Run a block of the migration page, which joins the ranks; return a gradient."""
    leave()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables = {"model": parity.build("llama")}
    exec(block(words), variables)
    model = variables["model"]
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    model(**parity.rows(rank)).loss.backward()
    return next(iter(model.parameters())).grad


def script(rank, folder, ports):
    """DDP, FSDP2, and SMP v2's FSDP over the backend "smddp", in one job of processes.

    Without ``ports`` as if nearlinear-collectives were not installed, and by the older names.
    """
    if not ports:
        sys.modules["nearlinear_collectives"] = None
        torch_smddp.BACKEND_ALIASES.clear()
        torch_smddp.register()
    found = {}
    if ports:
        gradient = join_by_page(rank, ports[0], "nl.init()\nmodel = Distributed")
        assert dist.get_backend() == "gloo"
        torch.testing.assert_close(join_by_page(rank, ports[1], "torch_smddp"), gradient)
    else:
        leave()
        store = dist.FileStore(f"{folder}/store", 2)
        smddp.init_process_group(store=store, rank=rank, world_size=2)
    assert dist.get_backend() == "smddp" and smddp.get_rank() == rank
    assert smddp.get_local_rank() == rank and smddp.get_world_size() == 2
    subgroup = dist.new_group([0, 1])
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=subgroup)
    found |= {"mean": mean.item(), "stands for": backend_of()}
    ddp = DistributedDataParallel(parity.build("llama"), device_ids=[rank])
    found["ddp"] = losses_of(ddp, rank, 2)
    fsdp = parity.build("llama")
    for layer in fsdp.model.layers:
        fully_shard(layer)
    found["fsdp"] = losses_of(fully_shard(fsdp), rank, 2)
    tsm.init({"hybrid_shard_degree": 2})
    found["tsm"] = losses_of(FSDP(parity.build("llama")), rank, 2)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("stands_for", ["nearlinear", "gloo"])
def test_scripts_over_smddp(tmp_path, stands_for):
    ports = None
    if stands_for == "nearlinear":
        pytest.importorskip("nearlinear_collectives")
        ports = free_port(), free_port()
    expected = losses_of(parity.build("llama"), 0, 1)
    for found in nl.spmd.run(script, 2, args=(str(tmp_path), ports), processes=True):
        assert found.pop("stands for") == stands_for and found.pop("mean") == 0.5
        for losses in found.values():
            assert losses == pytest.approx(expected, abs=1e-5)


def test_environment_variables_are_accepted(caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(torch_smddp, "BACKEND_ALIASES", {})
    monkeypatch.setenv("SMDATAPARALLEL_SERVER_PORT", "7592")
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *args, **kwargs: None)
    stands_for = torch_smddp.register()
    assert f"smddp stands for {stands_for}" in caplog.text
    assert "SMDATAPARALLEL_SERVER_PORT has no effect here: there are no servers" in caplog.text


@pytest.mark.gpu
def test_smddp_stands_for_nccl_on_gpus(tmp_path):
    assert torch_smddp.register() == "nccl"
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("smddp", store=store, rank=0, world_size=1)
    value = torch.ones(2, device="cuda")
    dist.all_reduce(value)
    assert value.tolist() == [1.0, 1.0] and dist.get_backend() == "smddp"
    tsm.init()
    losses = losses_of(FSDP(parity.build("llama")), 0, 1)
    assert losses == pytest.approx(losses_of(parity.build("llama"), 0, 1), abs=1e-4)

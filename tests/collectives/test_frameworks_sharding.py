"""FSDP2, FSDP1 and DeepSpeed ZeRO-3 train as on gloo."""

import importlib.util
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.collectives import training, worker
from tests.collectives.ranks import BACKEND, open_store
from tests.collectives.training import make_model, on_nearlinear, same_as_gloo, summary

both = pytest.mark.parametrize("ranks", [2, 4])


def fsdp2(rank, *features):
    size = dist.get_world_size()
    shape = (2, size // 2) if "hybrid" in features else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options = {"mesh": mesh}
    if "bf16" in features:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "gathered" in features:
        options["reshard_after_forward"] = False
    # Shards of a wide block are large enough for every data path of the engine.
    model = make_model(blocks=2, width=720) if "wide" in features else make_model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if "pool" in features and on_nearlinear():
        for module in parts:
            module.set_allocate_memory_from_process_group_for_comm(True)
    if "factor" in features and on_nearlinear():  # the same mean as a premultiplied sum
        for module in parts:
            module.set_gradient_divide_factor(float(size))
    if "async" in features:
        model._set_unshard_async_op(True)
        for first, second in zip(model.blocks[:-1], model.blocks[1:], strict=True):
            first.set_modules_to_forward_prefetch([second])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if "wide" in features else 1e-2)

    def clip(largest: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest)

    return training.train(model, optimizer, rank, clip=clip) + summary(model)


@both
@pytest.mark.parametrize(
    "features",
    [
        (),
        ("bf16",),
        ("pool",),
        ("bf16", "pool"),
        ("hybrid",),
        ("hybrid", "pool"),
        ("gathered", "async", "pool"),
        ("wide", "pool"),
        ("wide", "pool", "async"),
        ("factor",),
    ],
    ids="-".join,
)
def test_fsdp2_trains_as_on_gloo(pool, features, ranks):
    tolerance = 2e-2 if "bf16" in features else 1e-6
    same_as_gloo(pool, fsdp2, *features, ranks=ranks, tolerance=tolerance)


def accumulate(rank):
    """Run two micro-batches per step; replicas synchronize at the second only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(training.STEPS):
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            x = training.batch(step, 10 * micro + rank)
            loss = training.loss_of(model(x), x)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses + summary(model)


def test_fsdp2_synchronizes_replicas_once_per_step(pool):
    same_as_gloo(pool, accumulate, ranks=4)


def fsdp1(rank, strategy):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")
    model = FullyShardedDataParallel(
        make_model(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({training.Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = training.train(model, optimizer, rank, clip=model.clip_grad_norm_)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses + summary(model)


@both
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_trains_as_on_gloo(pool, strategy, ranks):
    same_as_gloo(pool, fsdp1, strategy, ranks=ranks)


def zero3(rank, backend, port):
    """Let DeepSpeed create the default group from a launcher's environment variables."""
    os.environ.update(
        DS_ACCELERATOR="cpu",
        DS_BUILD_OPS="0",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(worker.current_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the test provides the store, like torchrun
    )
    import deepspeed

    from ci.benchmarks.compare.training import without_inference_kernel

    without_inference_kernel()
    if backend == "nearlinear":
        import nearlinear_collectives  # noqa: F401
    deepspeed.init_distributed(dist_backend=backend)
    assert dist.get_backend() == backend
    engine, *_ = deepspeed.initialize(
        model=make_model(),
        optimizer=None,
        config={
            "train_micro_batch_size_per_gpu": training.BATCH,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {
                "stage": 3,
                "stage3_prefetch_bucket_size": 5000,
                "stage3_param_persistence_threshold": 100,
                "stage3_max_live_parameters": 10_000,
            },
        },
    )
    losses = []
    for step in range(training.STEPS):
        x = training.batch(step, rank)
        loss = training.loss_of(engine(x), x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    dist.destroy_process_group()
    return losses


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_deepspeed_zero3_trains_as_on_gloo(pool):
    ranks, found = 4, []
    for backend in ("gloo", BACKEND):
        store = open_store()
        arguments = (backend, store.port)
        # DeepSpeed keeps its groups for the lifetime of a process, so new processes are needed.
        found.append(
            pool.run(zero3, *arguments, ranks=ranks, backend=None, limit=240, discard=True)
        )
    for other, mine in zip(*found, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)

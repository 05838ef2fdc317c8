"""Collectives on CUDA tensors, CUDA graphs, copies between processes, and all-gather codecs.

Processes on one GPU do not compute at the same time, so that bandwidths are those of one rank while
the others wait. `ranks.run` describes the backend of the checks of results.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing

import nearlinear as nl
from nearlinear._torch import all_gather, reduce_scatter
from nearlinear.config.parallel import HOST_MEMORY_BACKEND
from nearlinear.distributed import runtime
from nearlinear.fsdp.all_gather_codec import CODECS

from . import ranks
from .measure import (
    Recorder,
    Refused,
    seconds_per_call,
    seconds_per_kernel,
    significant,
    synchronize,
)
from .models import LLAMA3_8B, TINY_LLAMA, build_model, leave, random_batch, start, train_config

MAX_CODEC_SHARE = 0.02
SHARDS = 8  # ranks of the gathers whose codecs are timed


# --- codecs -------------------------------------------------------------------------------------


def run_codecs(recorder: Recorder) -> None:
    """Time packing one shard and unpacking all shards of a Llama-3-8B block."""
    device = recorder.device
    overrides = TINY_LLAMA if recorder.rehearse else {
        **LLAMA3_8B, "num_hidden_layers": 1, "vocab_size": 1024}  # fmt: skip
    config = train_config("llama-tiny" if recorder.rehearse else "llama2-7b", overrides,
                          32 if recorder.rehearse else 4096, 1)  # fmt: skip
    block_seconds = 0.0
    with recorder.check("forward and backward pass of one block") as figures:
        block_seconds = time_block(config, device, recorder.rehearse)
        figures["seconds"] = significant(block_seconds)
    model = build_model(config.model, torch.device("meta"))
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    elements = -(-block // SHARDS)
    repeat = 2 if recorder.rehearse else 20
    copy_rate = time_copy(SHARDS * elements, device, repeat)
    with recorder.check("copy on the device, the limit") as figures:
        figures |= {"gb_per_second": significant(copy_rate), "elements": SHARDS * elements}
    codecs = {name: codec for name, codec in CODECS.items() if codec is not None}
    for name, codec in codecs.items():
        with recorder.check(
            f"{name}, block of {block:,} parameters over {SHARDS} ranks"
        ) as figures:
            shard = torch.randn(elements, device=device)
            packed = codec.pack(shard)
            received = packed.repeat(SHARDS, 1)
            output = torch.empty(SHARDS, elements, device=device)
            codec.unpack(output, received)
            for row in output[1:]:
                if not torch.equal(row, output[0]):
                    raise AssertionError("equal shards are unpacked to different values")
            worst = ((output[0] - shard).abs().max() / shard.abs().max()).item()
            if not worst < 0.1:
                raise AssertionError(f"values change by {worst:.2g} of the largest")
            pack = seconds_per_kernel(functools.partial(codec.pack, shard), device, repeat)
            unpack = seconds_per_kernel(
                functools.partial(codec.unpack, output, received), device, repeat
            )
            share = 2 * (pack + unpack) / block_seconds if block_seconds else float("nan")
            figures |= {
                "pack_us": significant(pack * 1e6),
                "unpack_us": significant(unpack * 1e6),
                "pack_of_copy_limit": significant(
                    (shard.nbytes + packed.nbytes) / pack / 1e9 / copy_rate),
                "unpack_of_copy_limit": significant(
                    (output.nbytes + received.nbytes) / unpack / 1e9 / copy_rate),
                "share_of_a_block": round(share, 4),
                "largest_error": significant(worst, 2),
            }  # fmt: skip
            if not recorder.rehearse and share > MAX_CODEC_SHARE:
                raise AssertionError(
                    f"two gathers of the block take {share:.1%} of its compute time; the target is "
                    f"{MAX_CODEC_SHARE:.0%}"
                )


def time_copy(elements: int, device: torch.device, repeat: int) -> float:
    """Return the GB/s, read and written, of a copy of float32 on the device."""
    source, target = (torch.ones(elements, device=device) for _ in range(2))
    return (
        2 * source.nbytes / seconds_per_kernel(lambda: target.copy_(source), device, repeat) / 1e9
    )


def time_block(config: Any, device: torch.device, rehearse: bool) -> float:
    """Return the seconds of one block's forward and backward pass in bfloat16."""
    model = build_model(config.model, device).to(torch.bfloat16)
    inner, ids = model.model, random_batch(config, device)["input_ids"]
    hidden = inner.embed_tokens(ids).detach().requires_grad_()
    positions = torch.arange(ids.shape[1], device=device)[None]
    embeddings = inner.rotary_emb(hidden, positions)

    def run_block() -> None:
        output = inner.layers[0](hidden, position_embeddings=embeddings)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        inner.zero_grad()
        hidden.grad = None

    return seconds_per_call(run_block, device, 2 if rehearse else 10)


# --- collectives --------------------------------------------------------------------------------


def run(recorder: Recorder) -> None:
    rehearse, device = recorder.rehearse, recorder.device
    with recorder.check("all operations through host memory, 2 ranks") as figures:
        [found, *_] = ranks.run(check_operations, 2, device.type)
        figures |= found
    with recorder.check("NCCL, 2 ranks on one GPU") as figures:
        if rehearse:
            raise Refused("needs CUDA")
        try:
            [found, *_] = ranks.run(check_operations, 2, device.type, backend="nccl", timeout=90.0)
        except nl.errors.NearlinearError as error:
            raise Refused(f"NCCL refuses: {_last_line(str(error))}") from None
        figures |= found
    with recorder.check("NCCL, 1 rank") as figures:
        nl.init({})
        try:
            figures |= check_operations(0, device.type)
            figures |= time_operations(device, rehearse)
        finally:
            leave()
    with recorder.check("the nearlinear backend on CUDA tensors, 1 rank") as figures:
        figures |= nearlinear_backend(device)
    with recorder.check("CUDA graph of an all-gather and a product") as figures:
        figures |= captured(device, rehearse)
    with recorder.check("all-gather by copies between processes, 2 ranks") as figures:
        [found, *_] = ranks.run(copy_between_processes, 2, device.type, rehearse)
        figures |= found
    with recorder.check("copies beside a matrix product") as figures:
        figures |= copies_beside_products(device, rehearse)
    with recorder.check("CUDA graph of a sharded step") as figures:  # last: it may end the context
        figures |= captured_step(recorder)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def check_operations(rank: int, device_type: str) -> dict[str, Any]:
    """Run every operation on tensors of the device and compare it with arithmetic."""
    if device_type == "cuda":
        torch.cuda.set_device(0)
    size = dist.get_world_size()
    device = torch.device(device_type)

    def value(of: int, count: int = 6) -> torch.Tensor:
        return torch.arange(count, device=device, dtype=torch.float32) + 100 * of

    total = sum(value(each) for each in range(size))
    assert isinstance(total, torch.Tensor)
    results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    output = value(0, 6 * size)
    all_gather(output, value(rank))
    results["all_gather"] = output, torch.cat([value(each) for each in range(size)])
    long = [value(each, 6 * size) for each in range(size)]
    part = value(0)
    reduce_scatter(part, long[rank].clone())
    results["reduce_scatter"] = part, sum(long[1:], long[0]).view(size, -1)[rank]  # pyright: ignore[reportArgumentType]
    mine = value(rank)
    dist.all_reduce(mine)
    results["all_reduce"] = mine, total
    mine = value(rank)
    if dist.get_backend() != "gloo":  # gloo has no mean in every release
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        results["mean"] = mine, total / size
    mine = value(rank)
    dist.broadcast(mine, 0)
    results["broadcast"] = mine, value(0)
    sent, received = long[rank].clone(), value(0, 6 * size)
    dist.all_to_all_single(received, sent)
    expected = torch.cat([each.view(size, -1)[rank] for each in long])
    results["all_to_all"] = received, expected
    if size > 1:
        received = value(0)
        peers = (rank + 1) % size, (rank - 1) % size
        sending = dist.isend(value(rank), peers[0])
        dist.recv(received, peers[1])
        assert sending is not None
        sending.wait()
        results["send_recv"] = received, value(peers[1])
    synchronize(device)
    wrong = [name for name, (found, right) in results.items() if not found.equal(right)]
    if wrong:
        raise AssertionError(f"wrong results: {', '.join(wrong)}")
    return {"operations": ", ".join(results), "backend": dist.get_backend(), "ranks": size}


def time_operations(device: torch.device, rehearse: bool) -> dict[str, float]:
    """Time the group of one rank, which copies on the device: the floor of a sharded step."""
    elements = 2**10 if rehearse else 2**28
    source, target = (torch.ones(elements, device=device) for _ in range(2))
    repeat = 2 if rehearse else 10
    timed: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: all_gather(target, source),
        "reduce_scatter": lambda: reduce_scatter(target, source),
        "copy": lambda: target.copy_(source),
    }
    return {
        f"{name}_gb_per_second": significant(
            2 * source.nbytes / seconds_per_kernel(call, device, repeat) / 1e9)
        for name, call in timed.items()
    }  # fmt: skip


def nearlinear_backend(device: torch.device) -> dict[str, Any]:
    """Run every operation over the nearlinear backend, which passes CUDA tensors to NCCL."""
    runtime.register_backend(HOST_MEMORY_BACKEND)
    dist.init_process_group(HOST_MEMORY_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return check_operations(0, device.type)
    finally:
        dist.destroy_process_group()


def captured(device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Capture an all-gather and a product in a CUDA graph, replay it on new values, compare."""
    width = 64 if rehearse else 2048
    nl.init({})
    try:
        source, gathered, result = (torch.zeros(width, width, device=device) for _ in range(3))

        def work() -> None:
            all_gather(gathered, source)
            torch.mm(gathered, gathered, out=result)

        replay = _capture(work, device)
        source.copy_(torch.randn(width, width, device=device))
        replay()
        synchronize(device)
        if not torch.equal(result, source @ source):
            raise AssertionError("the graph's result differs from the eager one")
        repeat = 2 if rehearse else 50
        return {
            "eager_us": significant(seconds_per_call(work, device, repeat) * 1e6),
            "graph_us": significant(seconds_per_call(replay, device, repeat) * 1e6),
        }
    finally:
        leave()


def captured_step(recorder: Recorder) -> dict[str, Any]:
    """Capture forward and backward pass of a sharded model."""
    device = recorder.device
    config = train_config("llama-tiny", TINY_LLAMA, 32, 2, clip=0.0)
    try:
        model, _ = start(config, device)
        batch = random_batch(config, device)

        def work() -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            return loss.detach()

        expected = float(work())
        model.zero_grad(set_to_none=False)
        losses: list[torch.Tensor] = []
        try:
            replay = _capture(lambda: losses.append(work()), device)
        except RuntimeError as error:
            raise Refused(f"a step of FSDP2 cannot be captured: {_last_line(str(error))}") from None
        replay()
        synchronize(device)
        found = float(losses[-1])
        if abs(found - expected) > 1e-3 * expected:
            raise AssertionError(f"the graph's loss is {found}, the eager one {expected}")
        return {"loss": significant(found), "eager_loss": significant(expected)}
    finally:
        with contextlib.suppress(RuntimeError):  # a failed capture may leave CUDA unusable
            leave()


def _capture(work: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Return a function that replays ``work``; on the CPU, one that runs it."""
    if device.type != "cuda":
        work()
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is one
        work()
    return graph.replay


# --- copies between processes -------------------------------------------------------------------


def copy_between_processes(rank: int, device_type: str, rehearse: bool) -> dict[str, Any]:
    """All-gather by copies from the other ranks' memory, mapped through CUDA IPC.

    The shards are written by their owners and read by the others' copies; no kernel of a collective
    runs. On the CPU, shared memory takes the place of CUDA IPC.
    """
    if device_type == "cuda":
        torch.cuda.set_device(0)
    else:
        torch_multiprocessing.set_sharing_strategy("file_system")
    device, size = torch.device(device_type), dist.get_world_size()
    elements = 2**12 if rehearse else 2**28  # 1 GiB of float32 per rank
    shard = torch.full((elements,), float(rank + 1), device=device)
    output = torch.zeros(size, elements, device=device)
    synchronize(device)
    handles: list[bytes] = [b""] * size
    dist.all_gather_object(handles, bytes(ForkingPickler.dumps(shard)))
    mapped = [shard if each == rank else pickle.loads(handles[each]) for each in range(size)]

    def gather() -> None:
        for each in range(size):
            output[each].copy_(mapped[each])

    gather()
    synchronize(device)
    for each in range(size):
        if not output[each].eq(each + 1).all():
            raise AssertionError(f"rank {rank} read wrong values of rank {each}")
    dist.barrier()
    found: dict[str, Any] = {}
    for turn in range(size):  # one rank at a time: processes share the GPU by time slices
        if turn == rank:
            seconds = seconds_per_kernel(gather, device, 2 if rehearse else 10)
            found = {
                "mib_per_rank": significant(shard.nbytes / 2**20),
                "gb_per_second": significant(2 * output.nbytes / seconds / 1e9),
            }
        dist.barrier()
    if rank == 0:
        shard.fill_(7.0)
        synchronize(device)
    dist.barrier()
    gather()
    synchronize(device)
    if not output[0].eq(7.0).all():
        raise AssertionError("a write of rank 0 is not visible to the others")
    dist.barrier()
    mapped.clear()
    dist.barrier()  # the owner outlives the mappings
    return found


def copies_beside_products(device: torch.device, rehearse: bool) -> dict[str, Any]:
    """Slow-down of a matrix product by copies on another stream: SMs that the copies use.

    Copies to and from the host run on copy engines; copies on the device may run on SMs.
    """
    width = 64 if rehearse else 8192
    dtype = torch.float32 if rehearse else torch.bfloat16
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    size = 2**12 if rehearse else 2**28
    here, there = (torch.empty(size, device=device, dtype=torch.uint8) for _ in range(2))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    repeat = 2 if rehearse else 20
    alone = seconds_per_kernel(lambda: left @ right, device, repeat)
    found = {"product_ms": significant(alone * 1e3)}
    copies: dict[str, Callable[[], Any]] = {
        "on_the_device": lambda: there.copy_(here, non_blocking=True),
        "to_the_host": lambda: host.copy_(here, non_blocking=True),
    }
    for name, copy in copies.items():
        found[f"{name}_gb_per_second"] = significant(
            size / seconds_per_kernel(copy, device, repeat) / 1e9
        )
        beside = _beside(copy, lambda: left @ right, device, repeat)
        found[f"slowdown_by_copies_{name}"] = round(beside / alone - 1, 4)
    return found


def _beside(
    copy: Callable[[], Any], product: Callable[[], Any], device: torch.device, repeat: int
) -> float:
    """Return the seconds of ``product`` while ``copy`` runs without a break beside it."""
    if device.type != "cuda":
        stop = threading.Event()

        def copy_on() -> None:
            while not stop.is_set():
                copy()

        thread = threading.Thread(target=copy_on)
        thread.start()
        try:
            return seconds_per_kernel(product, device, repeat)
        finally:
            stop.set()
            thread.join()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(40 * repeat):  # longer than the products
            copy()
    seconds = seconds_per_kernel(product, device, repeat)
    torch.cuda.synchronize(device)
    return seconds

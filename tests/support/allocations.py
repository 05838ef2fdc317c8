"""Bytes allocated by PyTorch in a training step, according to its profiler."""

import gc

import torch

import nearlinear as nl
from nearlinear.fsdp.model_state import local_tensor
from nearlinear.train.model import build_model, parallelize
from nearlinear.train.optimizer import build_optimizer

STEPS = 2


def step_of(rank: int, config, vocabulary: int) -> tuple[int, int]:
    """Return (bytes between two steps, peak bytes in a step) of this rank, as in the trainer.

    The steps use random tokens and follow a first step. A rank that waits for the collectives of
    another rank may hold more memory by chance; the smallest peak of ``STEPS`` steps counts.
    """
    nl.init(config.parallel)
    model, _ = parallelize(build_model(config.model, vocabulary), config)
    optimizer = build_optimizer(model, config.optimizer)
    _step(model, optimizer, config, vocabulary)
    gc.collect()
    most = []
    for _ in range(STEPS):
        with torch.profiler.profile(profile_memory=True) as profile:
            _step(model, optimizer, config, vocabulary)
        most.append(_most(profile))
    held = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = (local_tensor(tensor).untyped_storage() for tensor in held)
    between = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    return between, between + min(most)


def _step(model, optimizer, config, vocabulary: int) -> None:
    torch.manual_seed(0)  # model-parallel ranks receive the same batch
    size = config.batch.micro_batch_size, config.sequence_length
    ids = [torch.randint(vocabulary, size) for _ in range(config.batch.accumulation)]
    for batch in nl.accumulate(model, [{"input_ids": each, "labels": each} for each in ids]):
        if config.parallel.pipeline_parallel_degree > 1:
            model.step(batch)
        else:
            model(**batch).loss.backward()
    nl.clip_grad_norm_(model, config.optimizer.clip)
    optimizer.step()
    optimizer.zero_grad()


def _most(profile) -> int:
    events = profile.profiler.kineto_results.events()
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most

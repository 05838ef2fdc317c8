"""Ray Train with a sharded model: losses, communication, checkpoints, death of a worker."""

import json
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from tests.core.integrations.hosts import Tokens, documented, loaded, model

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "nearlinear[ray]"')
pytest.importorskip("ray.train.torch")

STEPS, ROWS = 20, 8


def micro_batches(step):
    """Return this worker's share of a step's rows, in two micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [Tokens(even=True)[ROWS * step + row] for row in range(rank, ROWS, world)]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return [{n: part[i] for n, part in _halves(stacked).items()} for i in (0, 1)]


def _halves(batch):
    return {name: values.chunk(2) for name, values in batch.items()}


def mean(loss):
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def write(settings, step, loss):
    if dist.get_rank() == 0:
        with open(settings["losses"], "a") as file:
            file.write(json.dumps([step, loss]) + "\n")


def alone(settings):
    prepared = ray.train.torch.prepare_model(model())
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-3)
    for step in range(settings["steps"]):
        total = torch.zeros(())
        for batch in micro_batches(step):
            loss = prepared(**batch).loss / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        write(settings, step, mean(total))
    ray.train.report({"steps": settings["steps"]})


def sharded(settings):
    from nearlinear.integrations.ray import prepare_model, report, resume

    prepared = prepare_model(model(), settings["sharding"])
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-3)
    for step in range(resume(prepared, optimizer), settings["steps"]):
        total = torch.zeros(())
        for batch in nl.accumulate(prepared, micro_batches(step)):
            loss = prepared(**batch).loss
            loss.backward()
            total += loss.detach() / 2
        optimizer.step()
        optimizer.zero_grad()
        write(settings, step, mean(total))
        if step == settings.get("dies_at") and dist.get_rank() == 1:
            killed = settings["losses"] + ".killed"
            if not os.path.exists(killed):
                open(killed, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % settings["every"] == 0:
            report({"step": step}, prepared, optimizer, step + 1)


def counted(settings):
    """Write the number of all-reduces of a step, with and without two-hop synchronization."""
    from nearlinear.integrations.ray import prepare_model

    found = []
    for two_hop in (True, False):
        sharding = {"hybrid_shard_degree": 1, "gradient_reduction": "micro_batch"}
        prepared = prepare_model(model(), sharding)
        with count_collectives() as counts:
            for batch in nl.accumulate(prepared, micro_batches(0), two_hop=two_hop):
                prepared(**batch).loss.backward()
        found.append(counts.calls["all_reduce"])
    write(settings, 0, found)
    ray.train.report({})


def refused(settings):
    from nearlinear.integrations.ray import prepare_model

    prepare_model(model(), {"tensor_parallel_degree": 2})


def batch_of(step):
    return {
        name: torch.cat([part[name] for part in micro_batches(step)])
        for name in ("input_ids", "labels")
    }


def trained(folder, function, name, workers=2, **settings):
    """Run ``function`` on workers and return the losses of its steps."""
    settings["losses"] = str(folder / f"losses-{name}")
    run = ray.train.RunConfig(
        name=name.split("-")[0],
        storage_path=str(folder),
        failure_config=ray.train.FailureConfig(max_failures=1 if "dies_at" in settings else 0),
    )
    scaling = ray.train.ScalingConfig(num_workers=workers)
    ray.train.torch.TorchTrainer(
        function, train_loop_config=settings, scaling_config=scaling, run_config=run
    ).fit()
    with open(settings["losses"]) as file:
        return [tuple(json.loads(line)) for line in file]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", path)  # of the workers
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
        )
        yield tmp_path_factory.mktemp("ray")
        ray.shutdown()


def test_losses_equal_those_of_the_host_alone(folder):
    expected = trained(folder, alone, "alone", steps=STEPS)
    found = trained(
        folder, sharded, "sharded", steps=STEPS, every=STEPS, sharding={"hybrid_shard_degree": 2}
    )
    assert len(expected) == STEPS
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_killed_worker_is_replaced_and_the_run_resumes(folder):
    sharding = {"hybrid_shard_degree": 2}
    expected = dict(trained(folder, sharded, "undisturbed", steps=8, every=2, sharding=sharding))
    found = trained(folder, sharded, "killed", steps=8, every=2, sharding=sharding, dies_at=4)
    assert [step for step, _ in found] == [*range(5), *range(4, 8)]  # saved after four steps
    assert all(loss == expected[step] for step, loss in found)


@pytest.mark.slow
def test_run_resumes_on_another_layout(folder):
    trained(folder, sharded, "resumed-2", steps=2, every=2, sharding={"hybrid_shard_degree": 2})
    rest = trained(
        folder,
        sharded,
        "resumed-4",
        workers=4,
        steps=4,
        every=2,
        sharding={"hybrid_shard_degree": 2},
    )
    expected = trained(folder, alone, "four", steps=4)
    torch.testing.assert_close(rest, expected[2:], atol=1e-5, rtol=0)
    saved = sorted((folder / "resumed").glob("step-*"))
    assert len(saved) == 2
    values = nl.spmd.run(loaded, 4, args=(saved[-1], 4, 1))
    assert all(torch.equal(values[0][name], values[3][name]) for name in values[0])


def test_replicas_synchronize_once_per_step(folder):
    ((_, (once, every)),) = trained(folder, counted, "counted")
    assert every - once == 3  # units


def test_layouts_whose_ranks_share_batches_are_refused(folder):
    with pytest.raises(Exception, match="tensor_parallel_degree = 2 inside Ray Train"):
        trained(folder, refused, "refused")


def test_documented_script_trains_as_the_host_alone(folder):
    losses = []
    for number, script in enumerate(documented("ray")):
        settings = {"steps": 4, "losses": str(folder / f"losses-documented-{number}")}
        variables = {"ray": ray, "torch": torch, "build_model": model, "batch_of": batch_of}
        variables["record"] = lambda step, loss, s=settings: write(s, step, mean(loss.detach()))
        exec(script, variables | {"settings": settings})
        with open(settings["losses"]) as file:
            losses.append([json.loads(line) for line in file])
    assert len(losses[0]) == 4
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=0)

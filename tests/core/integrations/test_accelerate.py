"""accelerate's Accelerator with a sharded model: losses, communication, checkpoints."""

import os

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin

import nearlinear as nl
from nearlinear.distributed import runtime
from nearlinear.distributed.collectives import count_collectives
from nearlinear.integrations.accelerate import Accelerator
from tests.core.integrations.hosts import Tokens, documented, loaded, model

STEPS = 20


class Run:
    """A script for accelerate, with 2 micro-batches per step."""

    def __init__(self, kind, **options):
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=2, **options)
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
        loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            net, optimizer, scheduler, loader
        )

    def train(self, steps, skipped=0, start=0):
        """Return the losses of ``steps`` steps, and the norms of their gradients."""
        accelerator, losses, norms = self.accelerator, [], []
        batches = accelerator.skip_first_batches(self.loader, 2 * skipped)
        for batch, _ in zip(batches, range(2 * steps), strict=False):
            batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        return [losses, norms]

    def weights(self):
        state = self.accelerator.get_state_dict(self.model)
        return {name.removeprefix("module."): value for name, value in state.items()}


def collectives(sync_each_batch):
    plugin = accelerate.utils.GradientAccumulationPlugin(2, sync_each_batch=sync_each_batch)
    host = Accelerator(
        cpu=True, gradient_accumulation_plugin=plugin,
        sharding={"hybrid_shard_degree": 1, "gradient_reduction": "micro_batch"},
    )  # fmt: skip
    net = model()
    net, optimizer = host.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = {"input_ids": torch.ones(1, 4).long(), "labels": torch.ones(1, 4).long()}
    with count_collectives() as counts:
        for _ in range(2):
            with host.accumulate(net):
                host.backward(net(**batch).loss)
                optimizer.step()
    return counts.calls["all_reduce"]


def explicit_no_sync():
    """Micro-batches under ``no_sync`` add up, and a loss outside of the model is measured."""
    host = Accelerator(cpu=True)
    net = model()
    net, optimizer = host.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ids = torch.arange(4).view(1, 4)

    def loss():
        logits = net(input_ids=ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    with host.no_sync(net):
        host.backward(loss())
    assert host.clip_grad_norm_(net.parameters(), 0.0) is None  # no whole gradients yet
    host.backward(loss())
    found = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    assert host.hosted.completed.targets == 2 * 2 * 3  # ranks, micro-batches, tokens
    optimizer.step()
    alone = model()
    logits = alone(input_ids=ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-6, rtol=1e-4)


def refusals():
    AcceleratorState._reset_state(reset_partial_state=True)
    if accelerate.Accelerator().num_processes == 1:  # accelerate 1.10 joins without being asked
        with pytest.raises(nl.errors.ConfigError, match="1 process of 2: on CPUs"):
            Accelerator()
    AcceleratorState._reset_state(reset_partial_state=True)
    frozen = model().requires_grad_(False)
    host = Run(Accelerator)
    assert host.accelerator.prepare(frozen) is frozen
    other = torch.nn.Linear(2, 2)
    attempts = {
        "fsdp": lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()),
        "compile": lambda: Accelerator(dynamo_backend="inductor"),
        "autocast": lambda: Accelerator(kwargs_handlers=[AutocastKwargs()]),
        "layout": lambda: Accelerator(cpu=True, sharding={"pipeline_parallel_degree": 2}),
        "second": lambda: host.accelerator.prepare(other),
        "optimizer": lambda: host.accelerator.prepare(torch.optim.SGD(other.parameters())),
        "norm": lambda: host.accelerator.clip_grad_norm_(host.model.parameters(), 1.0, 1),
        "backward": lambda: host.accelerator.backward(torch.ones(()), retain_graph=True),
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(nl.errors.ConfigError) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def documented_loss(script):
    net = model()
    batches = torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(even=True), range(32)), 4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    variables = {"model": net, "optimizer": optimizer, "batches": batches}
    exec(script, variables)
    return variables["accelerator"].gather(variables["loss"].detach()).mean().item()


def saved_and_resumed(sharding, folder):
    """Train two steps, and two more after saving and loading."""
    host = Run(Accelerator, sharding=sharding)
    losses, norms = host.train(2)
    host.accelerator.save_state(folder)
    resumed = Run(Accelerator, sharding=sharding)
    resumed.accelerator.load_state(folder)
    more = resumed.train(2, skipped=2)
    return [losses + more[0], norms + more[1]]


def work(rank, folder):
    result = {"refusals": refusals()}
    result["alone"] = Run(accelerate.Accelerator).train(STEPS)
    host = Run(Accelerator, sharding={"hybrid_shard_degree": 2})
    losses, norms = host.train(STEPS - 2)
    host.accelerator.save_state(folder / "run")
    result["saved"] = host.weights()
    more = host.train(2, skipped=STEPS - 2)
    result["sharded"] = [losses + more[0], norms + more[1]]
    resumed = Run(Accelerator, sharding={"hybrid_shard_degree": 1})
    resumed.accelerator.load_state(folder / "run")
    result["more"], result["resumed"] = more, resumed.train(2, skipped=STEPS - 2)
    result["rate"] = [each.scheduler.get_last_lr() for each in (host, resumed)]
    result["collectives"] = [collectives(each) for each in (False, True)]
    explicit_no_sync()
    sliced = {"hybrid_shard_degree": 1, "shard_optimizer_state": True}
    result["sliced"] = saved_and_resumed(sliced, folder / "sliced")
    AcceleratorState._reset_state(reset_partial_state=True)
    result["half"] = Run(Accelerator, mixed_precision="bf16").train(2)
    assert runtime.current().config.precision == "bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
    os.chdir(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    result["documented"] = [documented_loss(script) for script in documented("accelerate")]
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerate")
    return folder, nl.spmd.run(work, 2, args=(folder,), processes=True)[0]


def test_losses_equal_those_of_the_host_alone(found):
    _, result = found
    assert len(result["alone"][0]) == 2 * STEPS
    torch.testing.assert_close(result["sharded"], result["alone"], atol=1e-5, rtol=0)


def test_run_resumes_on_another_layout(found):
    _, result = found
    torch.testing.assert_close(result["resumed"], result["more"], atol=1e-5, rtol=0)
    assert result["rate"][0] == result["rate"][1]


def test_replicas_may_shard_the_optimizer_state(found):
    _, result = found
    expected = [result["alone"][0][:8], result["alone"][1][:4]]
    torch.testing.assert_close(result["sliced"], expected, atol=1e-5, rtol=0)


def test_mixed_precision_sets_the_compute_dtype(found):
    _, result = found
    losses, expected = result["half"][0], result["alone"][0][:4]
    torch.testing.assert_close(losses, expected, atol=0.02, rtol=0)
    assert losses != pytest.approx(expected, abs=1e-5)


def test_load_reads_a_state_on_another_layout(found):
    folder, result = found
    for values in nl.spmd.run(loaded, 4, args=(folder / "run" / "nearlinear", 0, 1)):
        for name, value in values.items():
            assert torch.equal(value, result["saved"][name]), name


def test_replicas_synchronize_once_per_step(found):
    units, agreement = 3, 2
    assert found[1]["collectives"] == [units + agreement, 2 * units + agreement]


def test_arguments_that_change_results_are_refused(found):
    reasons = found[1]["refusals"]
    assert "fsdp_plugin=...) beside sharding" in reasons["fsdp"]
    assert "nl.compile_blocks" in reasons["compile"]
    assert "without autocast" in reasons["autocast"]
    assert "pipeline_parallel_degree = 2 inside accelerate" in reasons["layout"]
    assert "two trained models" in reasons["second"]
    assert "not one of the prepared model's" in reasons["optimizer"]
    assert "norm_type = 1" in reasons["norm"]
    assert "retain_graph" in reasons["backward"]


def test_documented_script_trains_as_the_host_alone(found):
    alone, sharded = found[1]["documented"]
    assert sharded == pytest.approx(alone, abs=1e-5)

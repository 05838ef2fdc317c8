"""Lightning with a sharded model: losses, communication, checkpoints."""

import os

import pytest
import torch

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from tests.core.integrations.hosts import Tokens, documented, loaded, model

pl = pytest.importorskip("lightning.pytorch")

STEPS = 20


class Module(pl.LightningModule):
    """Fine-tunes a causal language model."""

    def __init__(self):
        super().__init__()
        self.net, self.losses = model(), []

    def training_step(self, batch, index):
        loss = self.net(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch, index):
        loss = self.net(**batch).loss
        self.log("validation", loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4)]


def fit(folder, strategy, steps, resume=None, module=None, **options):
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, default_root_dir=folder,
        accumulate_grad_batches=2, gradient_clip_val=0.5, logger=False, limit_val_batches=2,
        val_check_interval=2 * steps, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    module = Module() if module is None else module
    loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer, module


def collectives(folder, two_hop):
    from nearlinear.integrations.lightning import ShardedStrategy

    sharding = {"hybrid_shard_degree": 1, "gradient_reduction": "micro_batch"}
    with count_collectives() as counts:
        fit(folder, ShardedStrategy(sharding, two_hop=two_hop), 2)
    return counts.calls["all_reduce"]


def refusals(folder):
    from nearlinear.integrations.lightning import ShardedStrategy

    class OwnBackward(Module):
        def backward(self, loss):
            loss.backward()

    attempts = {
        "hook": lambda: ShardedStrategy(ddp_comm_hook=print),
        "layout": lambda: fit(folder, ShardedStrategy({"tensor_parallel_degree": 2}), 1),
        "precision": lambda: fit(folder, ShardedStrategy(), 1, precision="bf16-mixed"),
        "backward": lambda: fit(folder, ShardedStrategy(), 1, module=OwnBackward()),
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises(nl.errors.ConfigError) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def documented_losses(script):
    batches = torch.utils.data.DataLoader(Tokens(), batch_size=2)
    variables = {"module": Module(), "batches": batches}
    exec(script, variables)
    return variables["module"].losses


def work(rank, folder):
    from nearlinear.integrations.lightning import ShardedStrategy

    result = {}
    trainer, module = fit(folder, "ddp", STEPS)
    result["alone"] = [module.losses, trainer.callback_metrics["validation"].item()]
    trainer, module = fit(folder, ShardedStrategy({"hybrid_shard_degree": 2}), STEPS)
    result["sharded"] = [module.losses, trainer.callback_metrics["validation"].item()]
    fit(folder, "ddp", 2)[0].save_checkpoint(folder / "alone.ckpt")
    result["resumed_alone"] = fit(folder, "ddp", 4, resume=folder / "alone.ckpt")[1].losses
    trainer, _ = fit(folder, ShardedStrategy(), 2)
    trainer.save_checkpoint(folder / "two.ckpt")
    if rank == 0:
        state = torch.load(folder / "two.ckpt", weights_only=True)["state_dict"]
        result["saved"] = {name.removeprefix("net."): value for name, value in state.items()}
    _, module = fit(
        folder, ShardedStrategy({"hybrid_shard_degree": 1}), 4, resume=folder / "two.ckpt"
    )
    result["resumed"] = module.losses
    result["collectives"] = [collectives(folder, two_hop) for two_hop in (True, False)]
    result["refusals"] = refusals(folder)
    os.chdir(folder)
    result["documented"] = [documented_losses(script) for script in documented("lightning")]
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    return folder, nl.spmd.run(work, 2, args=(folder,), processes=True)[0]


def test_losses_equal_those_of_the_host_alone(found):
    _, result = found
    assert len(result["alone"][0]) == 2 * STEPS
    torch.testing.assert_close(result["sharded"], result["alone"], atol=1e-5, rtol=0)


def test_run_resumes_on_another_layout(found):
    _, result = found
    assert len(result["resumed"]) == 4
    torch.testing.assert_close(result["resumed"], result["resumed_alone"], atol=1e-5, rtol=0)


def test_load_reads_a_checkpoint_on_another_layout(found):
    folder, result = found
    for values in nl.spmd.run(loaded, 4, args=(folder / "two.ckpt.nearlinear", 2, 1)):
        for name, value in values.items():
            assert torch.equal(value, result["saved"][name]), name


def test_replicas_synchronize_once_per_step(found):
    once, every = found[1]["collectives"]
    assert every - once == 2 * 3  # steps, units


def test_arguments_that_change_results_are_refused(found):
    reasons = found[1]["refusals"]
    assert "ddp_comm_hook" in reasons["hook"]
    assert "tensor_parallel_degree = 2 inside Lightning" in reasons["layout"]
    assert "OwnBackward.backward" in reasons["backward"]
    assert "precision='bf16-mixed'" in reasons["precision"]


def test_documented_script_trains_as_the_host_alone(found):
    alone, sharded = found[1]["documented"]
    assert len(alone) == 4
    torch.testing.assert_close(sharded, alone, atol=1e-5, rtol=0)

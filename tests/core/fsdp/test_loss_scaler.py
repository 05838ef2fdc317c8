"""Float16: its numbers, how the loss scale moves, and overflows, which all ranks skip alike."""

import functools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear import _torch
from nearlinear.compat import smp
from nearlinear.config.parallel import ParallelConfig
from nearlinear.distributed.runtime import current_mesh
from nearlinear.errors import ConfigError, NearlinearError
from nearlinear.fsdp.loss_scaler import LossScaler
from nearlinear.fsdp.model_state import find_blocks, local_tensor
from nearlinear.fsdp.targets import SHIFTED
from tests.support import parity, tiny
from tests.support.releases import needs_hooks

FP16 = {"fp16": True, "init_scale": 2.0**14}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
BOUND = 5e-3  # of losses, gradients and values after 2 AdamW steps; bfloat16 is 8 times coarser
reference = functools.cache(parity.alone)


@pytest.mark.parametrize(
    ("family", "ranks", "config"),
    [
        ("gpt2", 1, {}),
        ("llama", 4, {"hybrid_shard_degree": 2}),
        ("gpt2", 2, TENSOR),
        ("llama", 2, PIPELINE),
        ("gpt2", 2, {"context_parallel_degree": 2}),
        ("llama", 2, {"context_parallel_degree": 2}),
        ("gpt2", 8, PIPELINE | TENSOR | {"hybrid_shard_degree": 2}),
    ],
    ids=str,
)
def test_fp16_training_equals_fp32_within_rounding(family, ranks, config):
    accumulation = 1 if "context_parallel_degree" in config else 2
    found = nl.spmd.run(parity.together, ranks, args=(family, FP16 | config, accumulation))
    parity.assert_equal(found, reference(family), bound=BOUND)


def test_fp16_training_of_experts():
    config = FP16 | {"expert_parallel_degree": 2}
    found = nl.spmd.run(parity.together, 2, args=("mixtral", config, 2))
    parity.assert_equal(found, reference("mixtral"), bound=BOUND)


@needs_hooks
def test_compressed_and_hierarchical_gathers_compute_in_fp16():
    def dtypes(rank, config):
        nl.init(FP16 | config, ranks_per_node=2)
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        seen, blocks = set(), find_blocks(nl.shard(model))
        for block in blocks:
            block.register_forward_hook(lambda b, *_: seen.update(p.dtype for p in b.parameters()))
        for batch in nl.accumulate(model, [tiny.batch(tiny.rows(rank, 2))]):
            loss = model(**batch).loss
            loss.backward()
        return seen, loss.item(), nl.clip_grad_norm_(model, math.inf)

    plain = nl.spmd.run(dtypes, 4, args=({},))
    for config, bound in [({"hierarchical_all_gather": "on"}, 0), ({"gather_dtype": "fp8"}, 0.05)]:
        found = nl.spmd.run(dtypes, 4, args=(config,))
        for (seen, loss, norm), (_, expected, usual) in zip(found, plain, strict=True):
            assert seen == {torch.float16}
            assert loss == pytest.approx(expected, abs=bound)
            assert norm == pytest.approx(usual, rel=bound)


# The rule


def by_iterations(overflows, config):
    """The scale after each of ``overflows``, by the iteration of the last one."""
    scale, last, tries, scales = config.init_scale, -1, config.delayed_shift, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if tries <= 1:
                scale = max(scale / config.scale_factor, config.min_scale)
            tries, last = max(tries - 1, 1), iteration
        else:
            through = (iteration - last) % config.scale_window == 0
            if through:
                scale *= config.scale_factor
            if through or config.consecutive_hysteresis:
                tries = config.delayed_shift
        scales.append(scale)
    return scales


@given(
    st.lists(st.booleans(), max_size=60),
    st.builds(
        ParallelConfig,
        fp16=st.just(True),
        init_scale=st.sampled_from([8.0, 100.0, 2.0**20]),
        scale_factor=st.sampled_from([1.5, 2.0, 4.0]),
        scale_window=st.integers(1, 5),
        min_scale=st.sampled_from([0.25, 1.0, 7.0]),
        delayed_shift=st.integers(1, 4),
        consecutive_hysteresis=st.booleans(),
    ),
)
def test_loss_scale_follows_the_update_rule(overflows, config):
    scaler, expected, before = LossScaler(config), by_iterations(overflows, config), []
    for overflow, scale in zip(overflows, expected, strict=True):
        # Two overflows in a row at the minimum: the run ends there.
        least = scaler.loss_scale <= config.min_scale
        before = [*before, least] if overflow else []
        if len(before) >= 2 and all(before[-2:]):
            with pytest.raises(NearlinearError, match="min_scale: the model itself"):
                scaler.update(overflow)
            return
        scaler.update(overflow)
        assert (scaler.loss_scale, scaler.overflow) == (scale, overflow)
    assert scaler.skipped == sum(overflows)


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_restored_loss_scale_continues_as_saved(overflows, at):
    config = ParallelConfig(fp16=True, scale_window=3, delayed_shift=2, min_scale=2.0**-40)
    straight, broken = LossScaler(config), LossScaler(config)
    for position, overflow in enumerate(overflows):
        if position == at:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = LossScaler(config)
            broken.load_state_dict(state)
        straight.update(overflow)
        broken.update(overflow)
    assert straight.state_dict() == broken.state_dict()


def test_loss_scale_defaults_equal_smp():
    now = ParallelConfig()
    assert (now.init_scale, now.scale_factor, now.scale_window) == (2.0**32, 2.0, 1000)
    assert (now.min_scale, now.delayed_shift, now.consecutive_hysteresis) == (1.0, 1, False)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"min_scale": 4.0, "init_scale": 2.0}, "min_scale = 4 and init_scale = 2"),
        ({"min_scale": 0.0}, "must be above 0"),
        ({"init_scale": math.inf}, "init_scale = inf"),
        ({"scale_factor": 1.0}, "scale_factor = 1: must be above 1"),
        ({"scale_window": 0}, "scale_window = 0: must be at least 1"),
        ({"delayed_shift": 0}, "delayed_shift = 0: must be at least 1"),
        ({"gather_dtype": "bf16"}, "'same' or 'fp8'"),
    ],
)
def test_invalid_loss_scale_settings_are_refused(data, words):
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**FP16 | data).check_supported()


def test_loss_scale_settings_without_fp16_have_no_effect(caplog):
    ParallelConfig(scale_window=5).check_supported()
    assert "scale_window = 5 has no effect without fp16" in caplog.text

    def refused(rank):
        model = sharded({})
        with pytest.raises(ConfigError, match="fp16 = true"):
            nl.loss_scaler(model)

    nl.spmd.run(refused, 1)


# Overflows


def sharded(config, **options):
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("gpt2")
    model = nl.transform(model)
    return nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model, **options)


class Spoiler:
    """Makes infinities of the gradients that reach the output of a block, where ``armed``."""

    def __init__(self, model):
        self.armed = False
        blocks = model.blocks() if hasattr(model, "blocks") else find_blocks(model)
        blocks[0].register_forward_hook(self._after)

    def _after(self, block, args, output):
        def spoil(tensor):
            if self.armed and tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * math.inf)
            return tensor

        _torch.map_tensors(spoil, output)


def snapshot(model, optimizer):
    """Copies of all values on this rank: parameters, and the optimizer's states."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [local_tensor(tensor).detach().clone() for tensor in (*model.parameters(), *states)]


def with_an_overflow(rank, config, spoiled_rank, steps=5, spoiled_steps=(2,)):
    """Scales, gradient norms, and whether each step changed this rank's values; those at the end.

    One rank's gradients of one micro-batch of two are infinite in ``spoiled_steps``.
    """
    model, mesh = sharded(FP16 | {"scale_window": 3} | config), current_mesh()
    optimizer, spoiler = parity.adamw(model, 1e-3), Spoiler(model)
    scaler, story = nl.loss_scaler(model), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(steps):
        mine = parity.split(parity.rows(step), mesh.data_ranks)[mesh.data_rank(rank)]
        for position, batch in enumerate(nl.accumulate(model, parity.split(mine, 2))):
            hit = step in spoiled_steps and rank == spoiled_rank and position == 0
            spoiler.armed = hit
            parity.forward_and_backward(model, batch)
        norm = nl.clip_grad_norm_(model, 1.0)
        before = snapshot(model, optimizer)
        optimizer.step()
        if not scaler.overflow:
            scheduler.step()
        after = snapshot(model, optimizer)
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        optimizer.zero_grad()
        story.append((scaler.loss_scale, norm > 0, not same, optimizer.param_groups[0]["lr"]))
    assert scaler.skipped == len(spoiled_steps)
    return story, parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize(
    ("ranks", "config", "spoiled_rank"),
    [
        (4, {"hybrid_shard_degree": 2}, 1),
        (4, {"hybrid_shard_degree": 1}, 3),
        (2, TENSOR, 1),
        (2, PIPELINE, 0),
        (2, PIPELINE, 1),
        (2, {"context_parallel_degree": 2}, 0),
    ],
    ids=str,
)
def test_overflow_on_one_rank_skips_the_step_on_all(ranks, config, spoiled_rank):
    runs = nl.spmd.run(with_an_overflow, ranks, args=(config, spoiled_rank))
    big, half = 2.0**14, 2.0**13
    rates = [5e-4, 2.5e-4, 2.5e-4, 1.25e-4, 6.25e-5]
    scales = [big, big, half, half, half]
    changed = [True, True, False, True, True]
    expected = list(zip(scales, changed, changed, rates, strict=True))
    for story, values in runs:
        assert story == expected
        for name, value in values.items():
            assert value.isfinite().all()
            same_stage = [other[name] for _, other in runs if name in other]
            assert all(map(value.equal, same_stage))


def test_one_non_finite_gradient_is_an_overflow():
    def finish(rank):
        model = sharded(FP16 | {"hybrid_shard_degree": 2})
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if rank == 2:
            local_tensor(next(model.parameters()).grad).view(-1)[0] = math.nan
        overflow = nl.loss_scaler(model).unscale(model)
        return overflow, all(p.grad is None for p in model.parameters())

    assert nl.spmd.run(finish, 4) == [(True, True)] * 4


def test_overflow_does_not_change_other_steps():
    def lone(rank, steps):
        """The same without the overflowing step at all."""
        model = sharded(FP16)
        optimizer, rate = parity.adamw(model, 1e-3), 1e-3
        for step in steps:
            for batch in nl.accumulate(model, parity.split(parity.rows(step), 2)):
                parity.forward_and_backward(model, batch)
            nl.clip_grad_norm_(model, 1.0)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            rate /= 2
        return parity.whole(model, lambda parameter: parameter.detach())

    _, spoiled = nl.spmd.run(with_an_overflow, 1, args=({}, 0))[0]
    expected = nl.spmd.run(lone, 1, args=([0, 1, 3, 4],))[0]
    for name, value in expected.items():
        torch.testing.assert_close(spoiled[name], value, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_fp16_over_processes():
    runs = nl.spmd.run(with_an_overflow, 2, args=({"hybrid_shard_degree": 2}, 1), processes=True)
    for story, values in runs:
        assert [changed for _, _, changed, _ in story] == [True, True, False, True, True]
        assert all(value.equal(runs[0][1][name]) for name, value in values.items())


@pytest.mark.parametrize(("ranks", "config"), [(4, {"hybrid_shard_degree": 2}), (2, PIPELINE)])
def test_repeated_overflows_stop_all_ranks(ranks, config):
    def endless(rank):
        with pytest.raises(NearlinearError, match="bf16 = true"):
            with_an_overflow(rank, config | {"min_scale": 2.0**13}, 0, spoiled_steps=(1, 2, 3))

    nl.spmd.run(endless, ranks)


# How it is used


def test_small_gradients_survive_for_losses_on_logits():
    """A millionth of the loss has gradients that float16 has no numbers for."""
    given = parity.rows(0, 2)

    def gradients(rank, scale, factor=1e-6):
        model = sharded(FP16 | {"init_scale": scale, "min_scale": 1e-3})
        for batch in nl.accumulate(model, [given]):
            logits = model(input_ids=batch["input_ids"]).logits
            assert logits.dtype == torch.float32
            flat = logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(flat, batch["labels"][:, 1:].flatten())
            (loss * factor).backward()
        return {name: p.grad.full_tensor() / factor for name, p in model.named_parameters()}

    model = parity.build("gpt2")
    model(**given).loss.backward()
    scaled = nl.spmd.run(gradients, 1, args=(2.0**32,))[0]
    plain = nl.spmd.run(gradients, 1, args=(1.0,))[0]

    def error(found):
        return max((found[n] - p.grad).abs().max() for n, p in model.named_parameters()).item()

    assert error(scaled) < 1e-3 < 0.02 < error(plain)


def test_two_accumulate_loops_before_one_step_add_up():
    def gradients(rank):
        model = sharded(FP16 | {"scale_window": 1, "hybrid_shard_degree": 2})
        for part in parity.split(parity.rows(rank), 2):  # the scale has doubled in between
            for batch in nl.accumulate(model, [part], weight=SHIFTED.count):
                model(**batch).loss.backward()
        return parity.whole(model, lambda parameter: parameter.grad)

    model = parity.build("gpt2")
    for half in range(2):
        parts = [parity.split(parity.rows(rank), 2)[half] for rank in range(2)]
        targets = [SHIFTED.count(part) for part in parts]
        for part, count in zip(parts, targets, strict=True):
            (model(**part).loss * count / sum(targets)).backward()
    for found in nl.spmd.run(gradients, 2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=2e-3, rtol=0)


def test_unscaled_backward_is_an_error():
    def alone(rank):
        with pytest.raises(NearlinearError, match="inside nl.accumulate only"):
            parity.forward_and_backward(sharded(FP16), parity.rows(0, 2))

    def piped(rank):
        with pytest.raises(NearlinearError, match="inside nl.accumulate only"):
            sharded(FP16 | PIPELINE).step(parity.rows(0, 2))

    nl.spmd.run(alone, 1)
    nl.spmd.run(piped, 2)


def test_fp16_evaluation_needs_no_loss_scale():
    def evaluate(rank):
        model = sharded({}, precision="fp16")
        with torch.no_grad():
            return model(**parity.rows(0)).loss.item()

    expected = parity.build("gpt2")(**parity.rows(0)).loss.item()
    assert nl.spmd.run(evaluate, 1) == pytest.approx([expected], abs=BOUND)


def test_smp_step_scales_the_loss():
    @smp.step
    def train_step(model, input_ids, labels):
        loss = model(input_ids=input_ids, labels=labels).loss
        model.backward(loss)
        return loss

    def norm(rank, config):
        model = sharded(config | {"microbatches": 2})
        train_step(model, **parity.rows(0))
        return nl.clip_grad_norm_(model, math.inf)

    for ranks, config in [(1, {}), (2, PIPELINE)]:
        plain = nl.spmd.run(norm, ranks, args=(config,))
        assert nl.spmd.run(norm, ranks, args=(config | FP16,)) == pytest.approx(plain, abs=BOUND)


# Its state


def test_checkpoint_contains_the_loss_scale(tmp_path):
    def save(rank):
        model = sharded(FP16)
        nl.loss_scaler(model).update(True)
        nl.save(tmp_path / "half", model)
        return nl.loss_scaler(model).state_dict()

    def load(rank, config):
        model = sharded(config)
        nl.load(tmp_path / "half", model)
        return nl.loss_scaler(model).state_dict() if "fp16" in config else None

    saved = nl.spmd.run(save, 2)[0]
    assert saved["loss_scale"] == 2.0**13 and saved["skipped"] == 1
    assert nl.spmd.run(load, 4, args=(FP16 | {"hybrid_shard_degree": 2},)) == [saved] * 4
    assert nl.spmd.run(load, 1, args=({"bf16": True},)) == [None]


def test_checkpoint_of_another_precision_starts_a_new_loss_scale(tmp_path):
    def there_and_back(rank):
        nl.save(tmp_path / "whole", sharded({}))
        model = sharded(FP16)
        nl.load(tmp_path / "whole", model)
        return nl.loss_scaler(model).loss_scale

    assert nl.spmd.run(there_and_back, 1) == [2.0**14]


@pytest.fixture
def fp16_run(small_run):
    """A run whose first steps overflow, because the scale exceeds float16."""
    small_run["parallel"] = {"fp16": True, "init_scale": 2.0**26, "scale_window": 4}
    small_run["train"] |= {"steps": 16, "eval_sequences": 0, "sample_tokens": 0}
    return small_run


def rows_of(config):
    with open(f"{config['run']['folder']}/metrics.jsonl") as file:
        return [json.loads(row) for row in file]


def train(rank, config):
    return nl.Trainer(config).fit()


def test_trainer_reports_the_loss_scale_and_skips_the_scheduler(fp16_run):
    nl.spmd.run(train, 2, args=(fp16_run,))
    rows = rows_of(fp16_run)
    skipped = [row["skipped"] for row in rows]
    assert 0 < skipped[-1] < 12 and skipped[0] == 1
    for before, row in zip(rows, rows[1:], strict=False):
        overflow = row["skipped"] > before["skipped"]
        assert (row["grad_norm"] is None) == overflow
        assert not overflow or row["loss_scale"] == before["loss_scale"] / 2
        first = before["skipped"] == before["step"]  # nothing has been trained yet
        assert (row["lr"] == before["lr"]) == (before["grad_norm"] is None) or first
    assert any(a["loss_scale"] < b["loss_scale"] for a, b in zip(rows, rows[1:], strict=False))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3


def test_resumed_fp16_run_is_bit_exact(fp16_run, tmp_path):
    def losses(name, **loop):
        config = fp16_run | {"checkpoint": {"folder": str(tmp_path / name)}}
        config["run"] = {"folder": str(tmp_path / f"{name}-run"), "tensorboard": False}
        nl.spmd.run(train, 2, args=(config | {"train": config["train"] | loop},))
        return [(row["loss"], row["loss_scale"], row["lr"]) for row in rows_of(config)]

    straight = losses("straight")
    assert losses("broken", stop_after=7) == straight[:7]
    assert losses("broken") == straight


def test_trainer_ends_at_the_minimum_loss_scale(fp16_run):
    fp16_run["parallel"]["min_scale"] = 2.0**25
    with pytest.raises(nl.spmd.RankError, match="min_scale"):
        nl.spmd.run(train, 2, args=(fp16_run,))
    assert len(rows_of(fp16_run)) == 2

"""Scripts written for SMP v1: losses on several ranks equal those of one process."""

import functools

import pytest
import torch

import nearlinear as nl

CASES = {
    "one_rank": (1, ""),
    "replicas": (2, "--shard_optimizer_state 1"),
    "tensor": (2, "--tensor_parallel_degree 2 --use_distributed_transformer 1"),
    "micro_batches": (2, "--microbatches 2"),
    "accumulation": (2, "--gradient_accumulation 2 --microbatches 2"),
    "tensor_parts": (2, "--tensor_parallel_degree 2 --prescaled_batch 0"),
    "tensor_parts_own_loss": (
        2,
        "--tensor_parallel_degree 2 --prescaled_batch 0 --own_loss 1 --microbatches 2",
    ),
    "pipeline": (2, "--pipeline_parallel_degree 2 --microbatches 4"),
    "pipeline_accumulation": (
        4,
        "--pipeline_parallel_degree 2 --microbatches 2 --gradient_accumulation 2 "
        "--placement_strategy spread --pipeline simple",
    ),
    "manual_partition": (
        2,
        "--pipeline_parallel_degree 2 --microbatches 2 --manual_partition 1 "
        "--activation_checkpointing 1",
    ),
    "pipeline_tensor_parts": (
        4,
        "--pipeline_parallel_degree 2 --tensor_parallel_degree 2 --prescaled_batch 0 "
        "--microbatches 2 --use_distributed_transformer 1 --checkpoint_sublayers 1",
    ),
    "clip": (2, "--clip 0.05 --checkpoint_sublayers 1"),
}


def run(script, ranks, options, **more):
    argv = options.split() + [f"--{name}={value}" for name, value in more.items()]
    return nl.spmd.run(lambda rank: script.main(argv), ranks, timeout=60)


@functools.cache
def alone(script, accumulation=1, clip=0.0, steps=2):
    """Train the same model in plain PyTorch; return losses, the loss of other data, and norms."""
    with nl.spmd.one_at_a_time(seed=7):
        model = script.AutoModelForCausalLM.from_config(script.config())
    plain = [p for name, p in model.named_parameters() if "bias" in name or "ln" in name]
    decayed = [p for name, p in model.named_parameters() if not ("bias" in name or "ln" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for part in range(accumulation):
            ids = script.batches(step * accumulation + part)
            loss = model(input_ids=ids, labels=ids).loss / accumulation
            loss.backward()
            total += loss.item()
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    ids = script.batches(99)
    with torch.no_grad():
        return losses, model(input_ids=ids, labels=ids).loss.item(), norms


def check(found, expected, tolerance=1e-5):
    losses, evaluated, norms = expected
    for each in found:
        assert each["losses"] == pytest.approx(losses, abs=tolerance)
        assert each["norms"] == pytest.approx(norms, rel=1e-4)
    mean = sum(each["evaluated"] for each in found) / len(found)
    assert mean == pytest.approx(evaluated, abs=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_one_process(train_gpt2, case):
    ranks, options = CASES[case]
    args = train_gpt2.arguments(options.split())
    check(run(train_gpt2, ranks, options), alone(train_gpt2, args.gradient_accumulation, args.clip))


def test_sums_over_micro_batches_equal_one_process(train_gpt2):
    found = run(train_gpt2, 2, "--sum_gradients 1 --microbatches 2")
    losses, evaluated, _ = alone(train_gpt2)
    for each in found:
        assert [2 * loss for loss in each["losses"]] == pytest.approx(losses, abs=1e-5)
    mean = sum(each["evaluated"] for each in found) / 2
    assert mean == pytest.approx(evaluated, abs=1e-5)


def test_fp16_with_dynamic_loss_scale_is_close_to_one_process(train_gpt2):
    found = run(train_gpt2, 2, "--fp16 1 --tensor_parallel_degree 2")
    check(found, alone(train_gpt2), tolerance=1e-3)


SHARDED = (
    "--sharded_data_parallel_degree 2 --delayed_param 1 --activation_checkpointing 1 "
    "--offload_activations 1"
)


def test_sharded_run_with_bf16_saves_and_resumes(train_gpt2, tmp_path):
    check(
        run(train_gpt2, 4, f"{SHARDED} --bf16 1 --save partial", checkpoint_dir=tmp_path),
        alone(train_gpt2, clip=1.0)[:2] + ([],),
        tolerance=2e-3,
    )
    straight = run(train_gpt2, 4, f"{SHARDED} --bf16 1 --steps 3")
    again = run(train_gpt2, 4, f"{SHARDED} --bf16 1 --steps 1 --load partial",
                checkpoint_dir=tmp_path)  # fmt: skip
    for there, here in zip(straight, again, strict=True):
        assert here["losses"] == there["losses"][2:]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, ""), (2, "--tensor_parallel_degree 2"), (2, "--pipeline_parallel_degree 2")],
)
def test_checkpoint_resumes_on_another_layout(train_gpt2, saved, ranks, options):
    losses, _, _ = alone(train_gpt2, clip=1.0, steps=4)
    found = run(train_gpt2, ranks, f"{options} --load partial", checkpoint_dir=saved)
    for each in found:
        assert each["losses"][0] == pytest.approx(losses[2], abs=1e-5)
        assert each["losses"][1] == pytest.approx(losses[3], abs=1e-3)  # these do not clip


@pytest.fixture(scope="module")
def saved(train_gpt2, tmp_path_factory):
    """A run sharded over 2 x 2 ranks, after two steps: partial and full checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in ("full", "partial"):
        found = run(train_gpt2, 4, f"{SHARDED} --save {kind}", checkpoint_dir=folder)
    check(found, alone(train_gpt2, clip=1.0)[:2] + ([],))
    return folder


def test_full_checkpoint_is_a_plain_state_dict(train_gpt2, saved):
    model = train_gpt2.AutoModelForCausalLM.from_config(train_gpt2.config())
    state = torch.load(saved / "step_2", weights_only=True)["model"]
    model.load_state_dict(state)
    ids = train_gpt2.batches(99)
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(alone(train_gpt2, clip=1.0)[1], abs=1e-5)
    options = "--pipeline_parallel_degree 2 --load full --learning_rate 0 --steps 1"
    found = run(train_gpt2, 2, options, checkpoint_dir=saved)
    assert found[0]["evaluated"] == found[1]["evaluated"] == pytest.approx(loss, abs=1e-5)

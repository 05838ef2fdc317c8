"""Compare pipelines with the unmodified model in one process over two AdamW steps."""

import json
from functools import cache

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear.config.parallel import ALLOWED_VALUES
from nearlinear.errors import RankError
from nearlinear.fsdp.model_state import model_state
from nearlinear.pipeline_parallel.schedules import SCHEDULES, SMP_SCHEDULES
from tests.support import families, parity, pipelines
from tests.support.processes import in_turn

FAMILIES = ["gpt2", "gpt2-untied", "gpt_neox", "llama", "llama-tied", "mistral", "mixtral"]
SEVERAL = [name for name, schedule in SCHEDULES.items() if schedule.stages_per_rank != 1]
reference = cache(pipelines.alone)


def check(found, expected, bound=1e-5, steps=2, accumulation=1):
    """Compare losses, norms, gradients and parameters of all ranks with the whole model's."""
    losses, norms, gradients, parameters = expected
    names, per_step = set(), [{} for _ in range(steps)]
    for of_rank in found:
        assert of_rank[1] == pytest.approx(norms, rel=bound, abs=bound)
        for here, there in ((of_rank[2], gradients), (of_rank[3], parameters)):
            for name, value in here.items():
                assert (value - there[name]).abs().max() <= bound, name
        names |= of_rank[3].keys()
        for step, (data_rank, weighted) in enumerate(of_rank[0]):
            # the same on all ranks of one pipeline
            assert per_step[step].setdefault(data_rank, weighted) == weighted
    assert names == parameters.keys()
    for step, loss in enumerate(losses):
        count = pipelines.targets(step, pipelines.ROWS * accumulation)
        assert sum(per_step[step].values()) / count == pytest.approx(loss, abs=bound)


def test_the_config_knows_every_schedule():
    assert set(ALLOWED_VALUES["pipeline"]) == {*SCHEDULES, *SMP_SCHEDULES}


@pytest.mark.parametrize("schedule", ALLOWED_VALUES["pipeline"])
def test_every_schedule_on_two_ranks(schedule):
    config = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": schedule}
    check(nl.spmd.run(pipelines.piped, 2, args=("gpt2", config)), reference("gpt2"))


@pytest.mark.parametrize("schedule", ALLOWED_VALUES["pipeline"])
def test_every_schedule_on_four_ranks(schedule):
    layers = 8 if schedule in SEVERAL else 4
    config = {"pipeline_parallel_degree": 4, "microbatches": 8, "pipeline": schedule}
    found = nl.spmd.run(pipelines.piped, 4, args=("gpt2", config, 2, layers))
    check(found, reference("gpt2", 2, layers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "family", "schedule"),
    [
        (at + order, family, schedule)
        for at, family in enumerate(FAMILIES[1:])
        for order, schedule in enumerate(SCHEDULES)
        if (at + order) % 4 < 2
    ],
)
def test_half_of_all_pairs_of_family_and_schedule(number, family, schedule):
    """Run one step, alternately on 2 and 4 ranks, so that both meet every family and schedule.

    Other tests run two steps with every schedule and every family.
    """
    ranks = (2, 4)[number % 2]
    layers = 8 if schedule in SEVERAL and ranks == 4 else 4
    config = {"pipeline_parallel_degree": ranks, "microbatches": 2 * ranks, "pipeline": schedule}
    found = nl.spmd.run(pipelines.piped, ranks, args=(family, config, 1, layers))
    check(found, reference(family, 1, layers), steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_sharded_stages(family):
    config = {"pipeline_parallel_degree": 2, "hybrid_shard_degree": 2, "microbatches": 2}
    check(nl.spmd.run(pipelines.piped, 4, args=(family, config)), reference(family))


@pytest.mark.parametrize(
    ("ranks", "family", "schedule"),
    [
        (4, "gpt2", "interleaved"),
        (4, "llama", "simple"),
        (4, "llama", "zbv_zero_bubble"),
        (8, "gpt2", "simple"),
        (8, "llama", "interleaved"),
        (8, "gpt2", "zbv_zero_bubble"),
    ],
)
def test_stages_are_sharded_and_replicated(ranks, family, schedule):
    """Two stages x two shards, and two replicas on 8 ranks; with gradient accumulation."""
    config = {
        "pipeline_parallel_degree": 2,
        "hybrid_shard_degree": 2,
        "microbatches": 2,
        "pipeline": schedule,
    }
    found = nl.spmd.run(pipelines.piped, ranks, args=(family, config, 2, 4, 2))
    check(found, reference(family, 2, 4, 2), accumulation=2)


def test_active_microbatches_splits_gpipe_into_waves():
    """Waves of three and one micro-batches; one reduction across replicas."""
    config = {"pipeline_parallel_degree": 2, "hybrid_shard_degree": 1, "microbatches": 4}
    config |= {"pipeline": "simple", "active_microbatches": 3}
    found = nl.spmd.run(pipelines.piped, 4, args=("gpt2", config))
    check(found, reference("gpt2"))


ZERO_BUBBLE = ["interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", *ZERO_BUBBLE])
def test_gradients_are_complete_with_resharded_parameters(schedule):
    """Zero-bubble schedules compute weight gradients after the backward pass of the inputs."""
    config = {"pipeline_parallel_degree": 2, "hybrid_shard_degree": 2, "microbatches": 4}
    config |= {"pipeline": schedule, "sdp_max_live_parameters": 0}
    check(nl.spmd.run(pipelines.piped, 4, args=("llama", config, 1)), reference("llama", 1), 1)


def frees(rank, schedule):
    nl.init({"pipeline_parallel_degree": 1, "microbatches": 2, "pipeline": schedule})
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build("gpt2")
    nl.shard(nl.pipeline(model), reshard_after_forward=True)


def test_zero_bubble_rejects_reshard_after_forward():
    with pytest.raises(RankError, match="choose another schedule"):
        nl.spmd.run(frees, 1, args=(ZERO_BUBBLE[0],))


@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs"])
def test_pipeline_on_one_rank(schedule):
    config = {"pipeline_parallel_degree": 1, "microbatches": 4, "pipeline": schedule}
    check(nl.spmd.run(pipelines.piped, 1, args=("gpt2", config)), reference("gpt2"))


def test_only_the_first_stage_needs_the_batch():
    losses, _, gradients, _ = pipelines.alone("gpt2", steps=1)
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline_batch": "first_stage"}

    def work(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        pipe = nl.shard(nl.pipeline(model))
        batch = families.batch(0, pipelines.ROWS) if rank == 0 else None
        evaluated = pipe.evaluate(batch).item()
        logits = pipe.last_logits(batch)
        for part in nl.accumulate(pipe, [batch]):
            loss = pipe.step(part).item()
        return (
            evaluated,
            loss,
            logits,
            {n: pipelines.whole(p.grad) for n, p in pipe.named_parameters()},
        )

    torch.manual_seed(0)
    expected = families.build("gpt2")(**families.batch(0, pipelines.ROWS)).logits[:, -1]
    for evaluated, loss, logits, found in nl.spmd.run(work, 2):
        assert evaluated == pytest.approx(losses[0], abs=1e-5)
        assert loss == pytest.approx(losses[0], abs=1e-5)
        assert torch.allclose(logits, expected, atol=1e-5)
        assert all(torch.allclose(value, gradients[n], atol=1e-5) for n, value in found.items())


def test_fewer_micro_batches_than_stages():
    config = {"pipeline_parallel_degree": 4, "microbatches": 1}
    check(nl.spmd.run(pipelines.piped, 4, args=("llama", config)), reference("llama"))


@pytest.mark.slow
def test_pipeline_over_processes():
    config = {"pipeline_parallel_degree": 2, "microbatches": 4}
    schedules = ("interleaved", "zbv_zero_bubble")
    runs = [("gpt2", config | {"pipeline": schedule}) for schedule in schedules]
    for found in in_turn(pipelines.piped, 2, runs):
        check(found, reference("gpt2"))


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zero_bubble"])
def test_bfloat16_pipeline_approximates_float32(schedule):
    """Gradients within 3 % of float32's, in norm; losses within 1 %."""
    config = {"pipeline_parallel_degree": 2, "microbatches": 4, "bf16": True, "pipeline": schedule}
    losses, _, gradients, _ = reference("llama", 1)
    for of_rank in nl.spmd.run(pipelines.piped, 2, args=("llama", config, 1)):
        assert of_rank[0][0][1] / pipelines.targets(0, pipelines.ROWS) == pytest.approx(
            losses[0], rel=0.01
        )
        for name, value in of_rank[2].items():
            assert (value - gradients[name]).norm() <= 0.03 * gradients[name].norm(), name


def messages(rank, config, layers):
    """Count the collectives of a second step, on 2 stages x 2 shards x 2 replicas or fewer."""
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build("gpt2", layers)
    pipe = nl.shard(nl.pipeline(model))
    for step in range(2):
        with nl.count_collectives() as counts:
            for batch in nl.accumulate(pipe, [families.batch(step, 8)] * 2):
                pipe.step(batch)
    return dict(counts.calls), dict(counts.bytes)


@pytest.mark.parametrize(
    ("schedule", "borders", "ends"),
    [
        ("interleaved", 1, (1, 1)),  # a rank's stages' borders with others, ends of the model
        ("interleaved_1f1b", 3, (1, 1)),  # 0 and 2, 1 and 3: inner ones have two
        ("zbv_zero_bubble", 2, (2, 0)),  # 0 and 3, 1 and 2: the border in the middle is one rank's
    ],
)
def test_collectives_of_a_step_match_theory(schedule, borders, ends):
    micro, steps = 4, 2
    config = {"pipeline_parallel_degree": 2, "hybrid_shard_degree": 2, "microbatches": micro}
    config["pipeline"] = schedule
    hidden = 2 * 16 * families.WIDTH * 4  # bytes of a micro-batch's (B, S, E) in float32
    found = nl.spmd.run(messages, 8, args=(config, 4), timeout=100)
    for rank, (calls, volume) in enumerate(found):
        assert calls["send"] == calls["recv"] == borders * micro * steps, rank
        assert volume["send"] == volume["recv"] == calls["send"] * hidden
        units = 2 + ends[rank // 4]  # blocks, and embedding or norm and head
        assert calls["all_gather"] == units * steps  # once per schedule, not per micro-batch
        assert calls["reduce_scatter"] == units * steps
        assert calls["broadcast"] == steps  # of the loss
        tied = ends == (1, 1)  # on two ranks
        # replicas meet once; so do the weights of micro-batches, and the tied table's ends
        assert calls["all_reduce"] == units + 1 + tied


def held(rank, ranks, schedule, delayed):
    nl.init({"pipeline_parallel_degree": ranks, "microbatches": ranks * 2, "pipeline": schedule})
    if delayed:
        with nl.deferred_init():
            model = families.build("gpt2", 8)
    else:
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2", 8)
    pipe = nl.shard(nl.pipeline(model))
    values = {name: pipelines.whole(parameter) for name, parameter in pipe.named_parameters()}
    tables = [p for stage in model_state(pipe).pipeline.stages.values() for p in stage.parameters()]
    return values, sum(parameter.to_local().numel() for parameter in tables)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv_zero_bubble"])
def test_parameters_per_rank_shrink_with_the_number_of_stages(schedule):
    model = families.build("gpt2", 8)
    table = model.transformer.wte.weight.numel()
    ends = table + model.transformer.wpe.weight.numel() + 2 * families.WIDTH
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    for ranks in (1, 2, 4):
        per_stage = 8 * block / ranks
        if ranks == 1 and schedule != "interleaved":
            continue
        sizes = [size for _, size in nl.spmd.run(held, ranks, args=(ranks, schedule, False))]
        copies = table * (ranks > 1)
        assert sum(sizes) == 8 * block + ends + copies  # the tied table is at both ends
        assert max(sizes) <= per_stage + block + ends + copies


@pytest.mark.parametrize("schedule", ["interleaved", "zbv_zero_bubble"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_deferred_init_of_stages_matches_the_whole_model(ranks, schedule):
    expected, _ = nl.spmd.run(held, 1, args=(1, "interleaved", True))[0]
    names = set()
    for values, _ in nl.spmd.run(held, ranks, args=(ranks, schedule, True)):
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
        names |= values.keys()
    assert names == expected.keys()


def evaluated(rank, config):
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build("gpt2")
    pipe = nl.shard(nl.pipeline(model))
    pipe.eval()
    modes = {m.training for s in model_state(pipe).pipeline.stages.values() for m in s.modules()}
    losses = [pipe.evaluate(families.batch(0, 8)).item() for _ in range(2)]
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe.train()
    return modes, [*losses, pipe.step(families.batch(0, 8)).item()]


@pytest.mark.parametrize("schedule", ["interleaved", "looped_bfs", "zbv_zero_bubble"])
def test_evaluate_returns_the_loss_on_all_ranks(schedule):
    config = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": schedule}
    torch.manual_seed(0)
    expected = families.build("gpt2")(**families.batch(0, 8)).loss.item()
    for modes, losses in nl.spmd.run(evaluated, 2, args=(config,)):
        assert modes == {False}
        assert losses == pytest.approx([expected] * 3, abs=1e-5)


def continued(rank, config, folder, first, last, load):
    """Run steps ``first`` .. ``last``, resumed from checkpoint ``load``, and save a checkpoint."""
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0 if first == 0 else 9):
        model = families.build("gpt2")
    if config.get("pipeline"):
        model = nl.pipeline(model)
    model = nl.shard(model)
    updates = parity.adamw(model, 1e-3)
    if load:
        assert nl.load(folder / load, model, updates) == first
    for step in range(first, last):
        for batch in nl.accumulate(model, [families.batch(step, 8)]):
            model.step(batch) if config.get("pipeline") else model(**batch).loss.backward()
        updates.step()
        updates.zero_grad()
    nl.save(folder / str(last), model, updates, step=last)
    return {name: pipelines.whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["interleaved", "zbv_zero_bubble"])
def test_checkpoint_is_independent_of_stages(schedule, tmp_path):
    """Resume without a pipeline, then on another one; tied tables are saved once."""
    piped = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": schedule}
    other = {"pipeline_parallel_degree": 2, "microbatches": 2, "pipeline": "looped_bfs"}
    nl.spmd.run(continued, 2, args=(piped, tmp_path, 0, 2, ""))
    names = json.loads((tmp_path / "2" / "index.json").read_text())["tensors"]
    assert not any("lm_head" in name for name in names)
    nl.spmd.run(continued, 1, args=({"hybrid_shard_degree": 1}, tmp_path, 2, 3, "2"))
    found = nl.spmd.run(continued, 2, args=(other, tmp_path, 3, 4, "3"))
    torch.manual_seed(0)
    model = families.build("gpt2")
    updates = parity.adamw(model, 1e-3)
    for step in range(4):
        model(**families.batch(step, 8)).loss.backward()
        updates.step()
        updates.zero_grad()
    for values in found:
        for name, value in values.items():
            assert (value - model.get_parameter(name)).abs().max() < 1e-5, name


def test_embedding_dropout_is_on_the_first_stage_only():
    def work(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        config = families.config_of("gpt2")
        config.embd_pdrop = 0.5
        with nl.spmd.one_at_a_time(seed=0):
            model = type(families.build("gpt2"))(config)
        pipe = nl.pipeline(model)
        (stage,) = model_state(pipe).pipeline.stages.values()
        return [m.p for m in stage.modules() if isinstance(m, torch.nn.Dropout) and m.p]

    assert nl.spmd.run(work, 2) == [[0.5], []]


def test_frozen_embeddings_and_padding_masks():
    """Padded rows have a mask; the first stage's input needs no gradient."""
    padded = families.batch(0, 8)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    padded["attention_mask"][::2, 12:] = 0
    padded["labels"][::2, 12:] = -100

    def built():
        model = families.build("llama")
        model.model.embed_tokens.requires_grad_(False)
        return model

    def work(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 4})
        with nl.spmd.one_at_a_time(seed=0):
            model = built()
        pipe = nl.shard(nl.pipeline(model))
        loss = pipe.step(padded)
        return loss.item(), {n: pipelines.whole(p.grad) for n, p in pipe.named_parameters()
                             if p.requires_grad}  # fmt: skip

    torch.manual_seed(0)
    model = built()
    expected = model(**padded).loss
    expected.backward()
    for loss, gradients in nl.spmd.run(work, 2):
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        for name, value in gradients.items():
            assert (value - model.get_parameter(name).grad).abs().max() < 1e-5, name


SCALED = {
    "Granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "Cohere": {"logit_scale": 0.5},
    "Gemma2": {"head_dim": 4, "num_key_value_heads": 4, "final_logit_softcapping": 2.0},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Bloom": {"n_head": 8, "n_layer": 2},
}


@pytest.mark.parametrize("kind", SCALED)
def test_operations_around_the_blocks_equal_one_process(kind):
    """Factors and caps on hidden states and logits; embeddings, norms and projections by name."""

    def make():
        torch.manual_seed(0)
        sizes = parity.FAMILIES["llama"][1] | {"pad_token_id": 0} | SCALED[kind]
        config = getattr(transformers, f"{kind}Config")(**sizes)
        return transformers.AutoModelForCausalLM.from_config(config)

    def run(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        with nl.spmd.one_at_a_time():
            model = make()
        pipe = nl.shard(nl.pipeline(model))
        loss = pipe.step(parity.rows(0))
        return loss.item(), {n: pipelines.whole(p.grad) for n, p in pipe.named_parameters()}

    model = make()
    expected = model(**parity.rows(0)).loss
    expected.backward()
    found = nl.spmd.run(run, 2)
    assert set().union(*(grads for _, grads in found)) == set(dict(model.named_parameters()))
    for loss, grads in found:
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        for name, value in grads.items():
            torch.testing.assert_close(value, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def gemma4(**changes):
    sizes = parity.FAMILIES["llama"][1] | {"head_dim": 4, "global_head_dim": 4} | changes
    sizes |= {"vocab_size_per_layer_input": 97, "num_key_value_heads": 4, "pad_token_id": 0}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}, "cannot be divided into"),
        (
            {
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 1,
                "layer_types": ["full_attention"] * 2,
            },
            "keys and values of earlier",
        ),
    ],
)
def test_models_whose_blocks_share_more_than_hidden_states_raise(changes, message):
    def run(rank):
        nl.init({"pipeline_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = gemma4(**changes)
        nl.pipeline(model)

    with pytest.raises(RankError, match=message):
        nl.spmd.run(run, 2)


def test_misannotated_blocks_return_tensors():
    """GLM 4's blocks are annotated as returning tuples, but return tensors."""

    def make():
        torch.manual_seed(0)
        config = transformers.Glm4Config(
            **parity.FAMILIES["llama"][1] | {"head_dim": 8, "pad_token_id": 0}
        )
        return transformers.AutoModelForCausalLM.from_config(config)

    def run(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = make()
        return nl.shard(nl.pipeline(model)).step(families.batch(0, 8)).item()

    expected = make()(**families.batch(0, 8)).loss.item()
    for loss in nl.spmd.run(run, 2):
        assert loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_items_in_batch": 9}, "num_items_in_batch: a pipeline weighs"),
        ({}, "measure=True. measures whole blocks"),
    ],
)
def test_unsupported_batches_and_measurements_raise(more, words):
    def run(rank):
        nl.init({"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("llama")
        model = nl.pipeline(nl.transform(model), measure=not more)
        nl.shard(model).step(families.batch(0, 8) | more)

    with pytest.raises(RankError, match=words):
        nl.spmd.run(run, 4)


def test_clip_grad_norm_of_parameters_on_one_stage():
    """Embeddings are on the first stage only; the norm is the same on all ranks."""

    def run(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("llama")
        model = nl.shard(nl.pipeline(model))
        model.step(families.batch(0, 8))
        embeddings = [p for name, p in model.named_parameters() if "embed" in name]
        return nl.clip_grad_norm_(embeddings, float("inf"))

    torch.manual_seed(0)
    alone = families.build("llama")
    alone(**families.batch(0, 8)).loss.backward()
    expected = alone.model.embed_tokens.weight.grad.norm().item()
    assert nl.spmd.run(run, 2, timeout=60) == pytest.approx([expected] * 2, abs=1e-5)


def test_a_composite_of_several_models_raises():
    """The config of an image and text model has the widths of both in configs of their own."""
    text = parity.FAMILIES["llama"][1] | {"model_type": "persimmon"}
    config = transformers.FuyuConfig(text_config=text, patch_size=2, num_channels=3)

    def run(rank):
        nl.init({"pipeline_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = transformers.FuyuForCausalLM(config)
        nl.pipeline(model)

    with pytest.raises(RankError, match="no hidden_size, but those of several models"):
        nl.spmd.run(run, 2)

"""All-gather codecs: rounding, bytes gathered, and training."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config.parallel import ALLOWED_VALUES
from nearlinear.distributed.collectives import count_collectives
from nearlinear.fsdp import all_gather_codec, overlap
from nearlinear.fsdp.all_gather_codec import CODECS, FP8_MAX, register_all_gather_codec
from tests.support import tiny
from tests.support.processes import in_turn
from tests.support.releases import needs_hooks

LENGTHS = st.integers(0, 1500)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def there_and_back(codec, ranks, elements, dtype, seed):
    """Random values (ranks, elements) of many magnitudes, before and after the codec."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ranks, elements, generator=generator)
    values *= torch.exp(4 * torch.randn(ranks, 1, generator=generator))
    values = values.to(dtype)
    packed = torch.stack([codec.pack(row) for row in values])
    assert packed.shape == (ranks, codec.packed_length(elements)) and packed.dtype == codec.dtype
    output = torch.full_like(values, float("nan"))
    codec.unpack(output, packed)
    return values.float(), output.float()


@given(st.integers(1, 4), LENGTHS, DTYPES, st.integers(0, 10**6))
def test_bf16_codec_rounds_to_the_last_bit(ranks, elements, dtype, seed):
    values, output = there_and_back(CODECS["bf16"], ranks, elements, dtype, seed)
    assert bool(((output - values).abs() <= values.abs() * 2**-8).all())


@given(st.integers(1, 4), LENGTHS, DTYPES, st.integers(0, 10**6))
def test_fp8_codec_rounds_to_the_last_bit_of_the_scaled_block(ranks, elements, dtype, seed):
    values, output = there_and_back(CODECS["fp8"], ranks, elements, dtype, seed)
    greatest = values.abs().amax(dim=1, keepdim=True) if elements else values
    bound = torch.maximum(values.abs() * 2**-4, greatest / FP8_MAX * 2**-10)
    slack = 1 + 2**-7  # rounding of the output dtype
    assert bool(((output - values).abs() <= bound * slack).all())


def test_fp8_codec_keeps_non_finite_values_visible():
    values = torch.zeros(1, 600)
    values[0, 300], values[0, 599] = float("inf"), float("nan")
    output = torch.zeros_like(values)
    CODECS["fp8"].unpack(output, CODECS["fp8"].pack(values[0])[None])
    assert output[0, :256].abs().sum() == 0
    assert output[0, 300].isnan() and output[0, 599].isnan()


def gathered_bytes(rank, gather_dtype, beside):
    nl.init(
        {
            "hybrid_shard_degree": 4,
            "gather_dtype": gather_dtype,
            "overlap_communication": beside,
        }
    )
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(2)
    nl.shard(model)
    with count_collectives() as counts:
        model(**tiny.batch(tiny.rows(0, 2)))
    return counts.bytes["all_gather"]


@needs_hooks
@pytest.mark.parametrize("beside", [True, False])
def test_codecs_reduce_gathered_bytes(beside):
    same, bf16, fp8 = (nl.spmd.run(gathered_bytes, 4, args=(name, beside))[0] for name in CODECS)
    assert bf16 == same / 2
    assert same / 4 < fp8 < 0.27 * same


@needs_hooks
def test_hierarchy_measurement_uses_packed_sizes(monkeypatch):
    def sharded(rank, gather_dtype):
        nl.init({"hybrid_shard_degree": 4, "gather_dtype": gather_dtype}, ranks_per_node=2)
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        nl.shard(model)

    def measured(gather_dtype):
        seen = []

        def spy(hierarchy, shards, memory, sizes, device):
            seen.append(sizes)
            return [False] * len(sizes)

        monkeypatch.setattr(overlap, "is_hierarchy_faster", spy)
        nl.spmd.run(sharded, 4, args=(gather_dtype,))
        return seen[0]

    plain = measured("same")
    assert {dtype for _, dtype in plain} == {torch.float32}
    assert measured("bf16") == [(elements, torch.bfloat16) for elements, _ in plain]
    scaled = CODECS["fp8"].packed_length
    assert measured("fp8") == [(scaled(elements), torch.uint8) for elements, _ in plain]


@needs_hooks
@pytest.mark.slow
def test_codecs_over_shared_memory_train_within_rounding():
    exact = tiny.train_alone("gpt2", "sgd", 32)
    runs = [({"gather_dtype": gather_dtype},) for gather_dtype in ("bf16", "fp8")]
    for found in in_turn(trained, 4, runs, backend="nearlinear"):
        assert 1e-6 < tiny.largest_difference(found[0], exact) < 3e-2


def trained(rank, config):
    return tiny.train_sharded(rank, "gpt2", 2, 4, "sgd", 32, **config)


@needs_hooks
@pytest.mark.parametrize(("gather_dtype", "bound"), [("bf16", 2e-3), ("fp8", 3e-2)])
@pytest.mark.parametrize("config", [{}, {"hierarchical_all_gather": "on", "ranks_per_node": 1}])
def test_codecs_train_within_rounding(gather_dtype, bound, config):
    exact = tiny.train_alone("gpt2", "sgd", 32)
    for run in nl.spmd.run(trained, 4, args=({"gather_dtype": gather_dtype, **config},)):
        difference = tiny.largest_difference(run, exact)
        assert 1e-6 < difference < bound


class Fp16Codec:
    """A new technique in one class: round to float16 for the all-gather."""

    dtype = torch.float16

    def packed_length(self, elements):
        return elements

    def pack(self, values):
        return values.to(torch.float16)

    def unpack(self, output, packed):
        output.copy_(packed)


@needs_hooks
def test_registered_codec_is_selected_by_gather_dtype(monkeypatch):
    monkeypatch.setattr(all_gather_codec, "CODECS", dict(CODECS))
    monkeypatch.setattr(overlap, "CODECS", all_gather_codec.CODECS)
    monkeypatch.setitem(ALLOWED_VALUES, "gather_dtype", ALLOWED_VALUES["gather_dtype"])
    register_all_gather_codec("fp16_example", Fp16Codec())
    same, fp16 = (
        nl.spmd.run(gathered_bytes, 4, args=(name, True))[0] for name in ("same", "fp16_example")
    )
    assert fp16 == same / 2
    exact = tiny.train_alone("gpt2", "sgd", 32)
    for run in nl.spmd.run(trained, 4, args=({"gather_dtype": "fp16_example"},)):
        assert 1e-7 < tiny.largest_difference(run, exact) < 1e-3
    with pytest.raises(ValueError, match="registered already"):
        register_all_gather_codec("fp16_example", Fp16Codec())

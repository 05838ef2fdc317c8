"""Compute time of one GPU: a block and the head, in forward, recomputation and backward.

A matrix product takes its FLOPs at the rate of large products, extended by the multiprocessors left
idle in its last wave of tiles, plus its memory traffic. All other operators are counted by the
bytes they read and write. Every kernel adds a launch gap.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from .cluster import Accelerator
from .fitted_constants import FittedConstants
from .model_shape import ACTIVATIONS
from .workload import Workload

TILE = (128, 256)  # rows and columns of the output tiles of fast matrix products
HALF_BYTES = 2  # bytes of a 16-bit activation
ROUTED = 6.0  # memory passes over a token's hidden states for each of its experts
FLASH_BACKWARD = 2.5  # backward over forward: five products against two (Dao et al. 2022)


@dataclass(frozen=True)
class BlockSeconds:
    """Compute time of the two halves of a block; tensor-parallel ranks communicate between them."""

    attention: float
    feed_forward: float

    @property
    def total(self) -> float:
        return self.attention + self.feed_forward

    def __mul__(self, factor: float) -> "BlockSeconds":
        return BlockSeconds(self.attention * factor, self.feed_forward * factor)


@dataclass(frozen=True)
class MeasuredMatmulRates:
    """Measured FLOPS of cubic matrix products, interpolated by the number of operations."""

    points: list[list[float]]
    """Pairs [edge of the cube, TFLOPS], ascending by edge."""

    def rate(self, m: float, k: float, n: float) -> float:
        """FLOPS of [m, k] x [k, n]: the rate of the cube with as many operations."""
        edge = math.log(m * k * n) / 3
        logs = self._logs
        if edge <= logs[0][0]:
            return math.exp(logs[0][1])
        for (low, first), (high, second) in zip(logs, logs[1:], strict=False):
            if edge <= high:
                share = (edge - low) / (high - low)
                return math.exp(first + share * (second - first))
        return math.exp(logs[-1][1])

    @cached_property
    def _logs(self) -> list[tuple[float, float]]:
        return [(math.log(edge), math.log(rate * 1e12)) for edge, rate in self.points]


class ComputeTimes:
    """Compute times of ``work`` on ``gpu``, in seconds."""

    def __init__(self, work: Workload, gpu: Accelerator, constants: FittedConstants):
        self.work: Workload = work
        self.gpu: Accelerator = gpu
        self.constants: FittedConstants = constants
        self.memory_rate: float = gpu.hbm_gb_s * 1e9 * constants.memory_share
        self.bytes = 4 if work.precision == "fp32" else HALF_BYTES
        share = constants.matmul_share * (constants.throttled_share if gpu.throttled else 1.0)
        self.rate: float = gpu.best_product(work.precision) * share
        self.fp8_rate: float = gpu.best_product("fp8") * share if work.fp8 else 0.0
        sizes = gpu.products.get(work.precision)
        self.measured_rates: MeasuredMatmulRates | None = (
            MeasuredMatmulRates(sizes) if sizes else None
        )
        mesh, shape = work.mesh, work.shape
        self.rows: int = work.tokens
        self.heads: float = shape.heads / mesh.tensor
        self.kv_width: float = shape.kv_width / mesh.tensor
        self.queries: float = shape.attention_width / mesh.tensor
        self.inner: float = shape.inner / mesh.tensor
        self.shared: float = shape.shared_inner / mesh.tensor

    def matmul(
        self, m: float, k: float, n: float, count: float = 1.0, in_fp8: bool = False
    ) -> float:
        """Seconds of ``count`` matrix products [m, k] x [k, n]."""
        if self.measured_rates is not None:
            return 2.0 * m * k * n * count / self.measured_rates.rate(m, k, n)
        tiles = count * math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
        waves = tiles / self.gpu.multiprocessors
        idle = math.ceil(waves) / waves - 1.0
        flops = 2.0 * m * k * n * count / (self.fp8_rate if in_fp8 else self.rate)
        operand = 1 if in_fp8 else self.bytes
        moved = operand * (m * k + k * n) + self.bytes * m * n
        traffic = moved * count / self.memory_rate
        busy = flops * (1.0 + self.constants.wave_share * min(idle, 1.0))
        return busy + traffic + self.constants.kernel_seconds

    def memory_pass(self, elements: float, kernels: float) -> float:
        """Seconds to move ``elements`` activations through memory with ``kernels`` kernels."""
        return elements * self.bytes / self.memory_rate + kernels * self.constants.kernel_seconds

    @cached_property
    def forward(self) -> BlockSeconds:
        attention = sum(self._attention_matmuls) + self._core + self._elementwise[0]
        feed_forward = sum(self._feed_forward_matmuls) + self._elementwise[1]
        return BlockSeconds(attention, feed_forward)

    @cached_property
    def backward(self) -> BlockSeconds:
        """Two products for each product of the forward pass, and about twice its memory traffic."""
        shape, mesh = self.work.shape, self.work.mesh
        attention = 2 * sum(self._attention_matmuls) + self._core_backward
        matrices = shape.attention_matrices + shape.router
        experts = shape.experts * shape.feed_forward_matrices / mesh.expert + shape.shared_matrices
        return BlockSeconds(
            attention + 2 * self._elementwise[0] + self.gradient_writes(matrices / mesh.tensor),
            2 * sum(self._feed_forward_matmuls)
            + 2 * self._elementwise[1]
            + self.gradient_writes(experts / mesh.tensor),
        )

    @cached_property
    def recompute(self) -> BlockSeconds:
        """Recomputation in the backward pass of an average block."""
        work, first, second = self.work, *self._elementwise
        last = self._feed_forward_matmuls[-1]
        if work.recompute == "none":
            seconds = BlockSeconds(0.0, 0.0)
        elif work.recompute == "attention":
            seconds = BlockSeconds(self._core, 0.0)
        elif work.recompute == "elementwise":
            seconds = BlockSeconds(first, second)
        elif work.recompute == "alternate":
            seconds = BlockSeconds(
                first + sum(self._attention_matmuls) / 2,
                second + (sum(self._feed_forward_matmuls) - last) / 2,
            )
        else:
            # the backward pass of an MoE block does not begin at its last product
            ends = work.early_stop and work.shape.experts == 1
            spared = last / work.recompute_group if ends else 0.0
            seconds = BlockSeconds(self.forward.attention, self.forward.feed_forward - spared)
        return seconds * work.recomputed_share

    @cached_property
    def weight_gradients(self) -> float:
        """Matrix products for weight gradients in a block's backward pass."""
        return sum(self._attention_matmuls) + sum(self._feed_forward_matmuls)

    @cached_property
    def input_weight_gradients(self) -> tuple[float, float]:
        """Weight gradients of the first matrices of attention and of the feed-forward half."""
        return self._attention_matmuls[0], self._feed_forward_matmuls[0]

    @cached_property
    def head(self) -> tuple[float, float]:
        """Forward and backward of the embedding, the head's matrix product and the loss."""
        words, rows, product = self._words, self.rows, self.head_weight_gradients
        passes = 6 if self.work.compiled else 14  # float32 logits, their softmax and its gradient
        loss = self.memory_pass(rows * words * passes / 2, 8)
        table = self.memory_pass(rows * self.work.shape.width * 2, 4)
        new = self.gradient_writes(words * self.work.shape.width)
        return product + loss + table, 2 * (product + new) + loss + table

    def gradient_writes(self, parameters: float) -> float:
        """Seconds to write gradients, and to accumulate them or copy them for the reduction.

        Counted only where first writes to memory are slow (CPU); on a GPU the traffic of the matrix
        products covers it.
        """
        size = parameters * self.bytes
        if not self.constants.fresh_seconds:
            return 0.0
        return self.first_write(size) + 3 * size / self.memory_rate

    def first_write(self, size: float) -> float:
        """Extra seconds to write ``size`` bytes of newly mapped memory."""
        return size * self.constants.fresh_seconds / 1e9

    @cached_property
    def head_weight_gradients(self) -> float:
        """The head's matrix product; the product for its weight gradients takes as long."""
        return self.matmul(self.rows, self.work.shape.width, self._words)

    @property
    def _words(self) -> float:
        return self.work.shape.vocabulary / self.work.mesh.tensor

    def optimizer_update(self, parameters: float) -> float:
        """Seconds of the optimizer for ``parameters`` in device memory."""
        return parameters * self.work.optimizer_bytes / self.memory_rate

    @cached_property
    def _attention_matmuls(self) -> list[float]:
        shape, full = self.work.shape, self.work.shape.width
        if shape.latent is not None:
            heads = shape.heads // self.work.mesh.tensor
            products = shape.latent.matrices(full, heads, shape.head_width)
            return [self._linear(inputs, outputs) for inputs, outputs in products]
        return [
            self._linear(full, self.queries + 2 * self.kv_width),
            self._linear(self.queries, full),
        ]

    @cached_property
    def _feed_forward_matmuls(self) -> list[float]:
        shape = self.work.shape
        used, full = shape.experts_per_token, shape.width
        up = [self._linear(full, self.inner, used)] * (2 if shape.gated else 1)
        if shape.shared_inner:
            up += [self._linear(full, self.shared)] * 2 + [self._linear(self.shared, full)]
        return [*up, self._linear(self.inner, full, used)]

    def _linear(self, k: float, n: float, used: float = 1.0) -> float:
        """Seconds of a linear layer of a block; with float8, both operands are cast first."""
        seconds = self.matmul(self.rows * used, k, n, in_fp8=self.work.fp8)
        if self.work.fp8 and self.work.fused_casts:  # two copies in 8 bits, one of them transposed
            written = self.rows * used * k + 2.5 * k * n / self.work.micro_batches
            seconds += self.memory_pass(written, 1)
        elif self.work.fp8:
            cast = (2.5 if self.work.compiled else 4.0) * (self.rows * used * k + k * n)
            seconds += self.memory_pass(cast, 4)
        return seconds

    @cached_property
    def _core(self) -> float:
        """Softmax and the two matrix products around it, forward."""
        work = self.work
        if work.fused_attention:
            kernels = 1.0 if work.newest_attention else self.gpu.older_kernels
            return self._core_flops / (self.rate * self.constants.flash_share * kernels)
        passes = 4 if work.fused_softmax else 12  # scale, mask, softmax in float32, casts, dropout
        return 2 * self._score_matmul + self._scores(passes)

    @cached_property
    def _core_backward(self) -> float:
        if self.work.fused_attention:
            return FLASH_BACKWARD * self._core
        return 4 * self._score_matmul + self._scores(5 if self.work.fused_softmax else 12)

    @property
    def _core_flops(self) -> float:
        """FLOPs of causal attention; the masked half is not computed."""
        shape, wide = self.work.shape, self.queries
        if shape.latent is not None:  # the scores take queries, their sums take values
            wide = (wide + self.heads * shape.latent.value) / 2
        return 2.0 * self.rows * self.work.sequence * wide

    @property
    def _score_matmul(self) -> float:
        length = self.work.sequence
        batch = self.heads * self.rows / length
        return self.matmul(length, self.work.shape.head_width, length, count=batch)

    def _scores(self, passes: float) -> float:
        return self.memory_pass(passes * self.heads * self.rows * self.work.sequence, passes)

    @cached_property
    def _elementwise(self) -> tuple[float, float]:
        """Forward time of elementwise operators in attention and in feed-forward.

        Traffic is counted in units of the hidden states: norms and residual sums, rotary positions
        or reshapes, and the activation function.
        """
        shape, compiled = self.work.shape, self.work.compiled
        split = self.work.mesh.tensor if self.work.sequence_parallel else 1
        hidden = self.rows * shape.width / split
        heads = self.rows * (self.queries + self.kv_width)
        inner = self.rows * (self.inner * shape.experts_per_token + self.shared)
        unary, binary = ACTIVATIONS[shape.activation]
        binary += shape.gated  # times the second matrix
        act = 2.0 + shape.gated if compiled else 2.0 * unary + 3.0 * binary
        if not shape.gated:  # LayerNorm, biases
            norm, turn, kernels = (4.0, 1.0, 12) if compiled else (5.0, 2.0, 19)
        else:  # RMSNorm in float32, rotary positions
            norm, turn, kernels = (4.0, 2.0, 14) if compiled else (21.0, 11.0, 58)
        kernels += 0 if compiled else unary + binary
        routed = ROUTED * shape.experts_per_token * hidden if shape.experts > 1 else 0.0
        return (
            self.memory_pass(norm * hidden + turn * heads, kernels / 2),
            self.memory_pass(norm * hidden + act * inner + routed, kernels / 2),
        )

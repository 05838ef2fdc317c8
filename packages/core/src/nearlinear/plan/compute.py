"""Seconds that one GPU computes: a block and the head, forward, recomputed and backward.

A matrix product takes its FLOPs at the rate of large products, lengthened by the multiprocessors
that its last wave of tiles leaves idle, and its bytes at the memory's rate. Everything else is
counted in bytes that pass through memory; kernels add a pause each.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from .hardware import Accelerator
from .machine import BySize
from .parameters import Parameters
from .shape import ACTIVATIONS
from .workload import Workload

TILE = (128, 256)  # rows and columns of the tiles that fast products are cut into
ACTIVATION = 2  # bytes of an activation in 16 bits
ROUTED = 6.0  # times that a token's rows pass through memory for each of its experts
FLASH_BACKWARD = 2.5  # five products for two: Dao et al. 2022


@dataclass(frozen=True)
class Seconds:
    """Of a block, in its two parts; between them tensor ranks communicate."""

    attention: float
    feed_forward: float

    @property
    def total(self) -> float:
        return self.attention + self.feed_forward

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.attention * factor, self.feed_forward * factor)


class Compute:
    """The times of ``work`` on ``gpu``."""

    def __init__(self, work: Workload, gpu: Accelerator, fitted: Parameters):
        self.work, self.gpu, self.fitted = work, gpu, fitted
        self.memory = gpu.hbm_gb_s * 1e9 * fitted.memory_share
        self.bytes = 4 if work.precision == "fp32" else ACTIVATION
        self.rate = gpu.best_product(work.precision) * fitted.matmul_share
        self.block_rate = self.rate
        if work.fp8:
            self.block_rate = gpu.best_product("fp8") * fitted.matmul_share
        sizes = gpu.products.get(work.precision)
        self.by_size = BySize(sizes) if sizes else None
        mesh, shape = work.mesh, work.shape
        self.rows = work.tokens
        self.heads = shape.heads / mesh.tensor
        self.kv_width = shape.kv_width / mesh.tensor
        self.width = shape.width / mesh.tensor
        self.inner = shape.inner / mesh.tensor

    def product(self, m: float, k: float, n: float, rate: float = 0.0, count: float = 1.0) -> float:
        """Seconds of ``count`` products of [m, k] with [k, n]."""
        if self.by_size is not None:
            return 2.0 * m * k * n * count / self.by_size.rate(m, k, n)
        tiles = count * math.ceil(m / TILE[0]) * math.ceil(n / TILE[1])
        waves = tiles / self.gpu.multiprocessors
        idle = math.ceil(waves) / waves - 1.0
        flops = 2.0 * m * k * n * count / (rate or self.rate)
        traffic = self.bytes * (m * k + k * n + m * n) * count / self.memory
        busy = flops * (1.0 + self.fitted.wave_share * min(idle, 1.0))
        return busy + traffic + self.fitted.kernel_seconds

    def passing(self, numbers: float, kernels: float) -> float:
        """Seconds that ``numbers`` activations take through memory, in so many kernels."""
        return numbers * self.bytes / self.memory + kernels * self.fitted.kernel_seconds

    @cached_property
    def forward(self) -> Seconds:
        attention = sum(self._attention_products) + self._core + self._between[0]
        feed_forward = sum(self._feed_forward_products) + self._between[1]
        return Seconds(attention, feed_forward)

    @cached_property
    def backward(self) -> Seconds:
        """Two products for each of the forward pass; what passes through memory, about twice."""
        shape, mesh = self.work.shape, self.work.mesh
        attention = 2 * sum(self._attention_products) + self._core_backward
        matrices = shape.attention_matrices + shape.router
        experts = shape.experts * shape.feed_forward_matrices / mesh.expert
        return Seconds(
            attention + 2 * self._between[0] + self.gradients(matrices / mesh.tensor),
            2 * sum(self._feed_forward_products)
            + 2 * self._between[1]
            + self.gradients(experts / mesh.tensor),
        )

    @cached_property
    def again(self) -> Seconds:
        """What the backward pass of an average block computes again."""
        work, first, second = self.work, *self._between
        last = self._feed_forward_products[-1]
        if work.recompute == "none":
            again = Seconds(0.0, 0.0)
        elif work.recompute == "attention":
            again = Seconds(self._core, 0.0)
        elif work.recompute == "elementwise":
            again = Seconds(first, second)
        elif work.recompute == "alternate":
            again = Seconds(
                first + sum(self._attention_products) / 2,
                second + (sum(self._feed_forward_products) - last) / 2,
            )
        else:
            # a mixture's last product is not where its backward pass begins
            ends = work.stops_early and work.shape.experts == 1
            spared = last / work.together if ends else 0.0
            again = Seconds(self.forward.attention, self.forward.feed_forward - spared)
        return again * work.recomputed_blocks

    @cached_property
    def weights(self) -> float:
        """Of a block's backward pass, the products for gradients of weights."""
        return sum(self._attention_products) + sum(self._feed_forward_products)

    @cached_property
    def input_weights(self) -> tuple[float, float]:
        """The gradients of the matrices that the two parts begin with."""
        return self._attention_products[0], self._feed_forward_products[0]

    @cached_property
    def head(self) -> tuple[float, float]:
        """Forward and backward of the embedding, the head's product and the loss."""
        words, rows, product = self._words, self.rows, self.head_weights
        passes = 6 if self.work.compiled else 14  # float32 logits, their softmax and its gradient
        loss = self.passing(rows * words * passes / 2, 8)
        table = self.passing(rows * self.work.shape.width * 2, 4)
        new = self.gradients(words * self.work.shape.width)
        return product + loss + table, 2 * (product + new) + loss + table

    def gradients(self, parameters: float) -> float:
        """Those of ``parameters`` are written, and then added to the ones before or copied to be
        reduced. Counted where new memory costs; elsewhere it is within the products' traffic."""
        size = parameters * self.bytes
        return self.new(size) + 3 * size / self.memory if self.fitted.fresh_seconds else 0.0

    def new(self, size: float) -> float:
        """Seconds more of ``size`` bytes that are written for the first time."""
        return size * self.fitted.fresh_seconds / 1e9

    @cached_property
    def head_weights(self) -> float:
        """The head's product; the one for gradients of its weights takes as long."""
        return self.product(self.rows, self.work.shape.width, self._words)

    @property
    def _words(self) -> float:
        return self.work.shape.vocabulary / self.work.mesh.tensor

    def optimizer(self, parameters: float) -> float:
        """Of a rank's share of ``parameters``, in its own memory."""
        return parameters * self.work.optimizer_bytes / self.memory

    @cached_property
    def _attention_products(self) -> list[float]:
        full = self.work.shape.width
        return [
            self._linear(full, self.width + 2 * self.kv_width),
            self._linear(self.width, full),
        ]

    @cached_property
    def _feed_forward_products(self) -> list[float]:
        shape = self.work.shape
        used, full = shape.experts_per_token, shape.width
        up = [self._linear(full, self.inner, used)] * (2 if shape.gated else 1)
        return [*up, self._linear(self.inner, full, used)]

    def _linear(self, k: float, n: float, used: float = 1.0) -> float:
        """A product of the blocks; in float8 both sides are cast first."""
        seconds = self.product(self.rows * used, k, n, self.block_rate)
        if self.work.fp8:
            cast = (2.5 if self.work.compiled else 4.0) * (self.rows * used * k + k * n)
            seconds += self.passing(cast, 4)
        return seconds

    @cached_property
    def _core(self) -> float:
        """Softmax and the two products around it, forward."""
        work = self.work
        if work.fused_attention:
            rate = self.rate * self.fitted.flash_share * self.gpu.older_kernels
            return self._flops_of_core / rate
        passes = 4 if work.fused_softmax else 12  # scale, mask, softmax in float32, casts, dropout
        return 2 * self._score_product + self._scores(passes)

    @cached_property
    def _core_backward(self) -> float:
        if self.work.fused_attention:
            return FLASH_BACKWARD * self._core
        return 4 * self._score_product + self._scores(5 if self.work.fused_softmax else 12)

    @property
    def _flops_of_core(self) -> float:
        """Of a causal mask, with the half that it hides left out."""
        return 2.0 * self.rows * self.work.sequence * self.width

    @property
    def _score_product(self) -> float:
        length = self.work.sequence
        batch = self.heads * self.rows / length
        return self.product(length, self.work.shape.head_width, length, count=batch)

    def _scores(self, passes: float) -> float:
        return self.passing(passes * self.heads * self.rows * self.work.sequence, passes)

    @cached_property
    def _between(self) -> tuple[float, float]:
        """What passes through memory beside products, in attention and in feed-forward, forward.

        In units of the hidden states: norms and residual sums, then rotations or reshapes, then the
        activation function.
        """
        shape, compiled = self.work.shape, self.work.compiled
        split = self.work.mesh.tensor if self.work.sequence_parallel else 1
        hidden = self.rows * shape.width / split
        heads = self.rows * (self.width + self.kv_width)
        inner = self.rows * self.inner * shape.experts_per_token
        of_one, of_two = ACTIVATIONS[shape.activation]
        of_two += shape.gated  # times the second matrix
        act = 2.0 + shape.gated if compiled else 2.0 * of_one + 3.0 * of_two
        if not shape.gated:  # LayerNorm, biases
            norm, turn, kernels = (4.0, 1.0, 12) if compiled else (5.0, 2.0, 19)
        else:  # RMSNorm in float32, rotary positions
            norm, turn, kernels = (4.0, 2.0, 14) if compiled else (21.0, 11.0, 58)
        kernels += 0 if compiled else of_one + of_two
        routed = ROUTED * shape.experts_per_token * hidden if shape.experts > 1 else 0.0
        return (
            self.passing(norm * hidden + turn * heads, kernels / 2),
            self.passing(norm * hidden + act * inner + routed, kernels / 2),
        )

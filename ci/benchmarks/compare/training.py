"""The model, its data, and an adapter for each training library.

An adapter is built once per rank. ``step(batches) -> float`` runs one optimizer step over this
rank's micro-batches and returns the mean of their losses on this rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os

import torch
import torch.distributed as dist

from . import traffic
from .config import CompareConfig


def build_model(config: CompareConfig) -> torch.nn.Module:
    """Return a float32 model with tied embeddings and no dropout, identical on every rank."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    common = {
        "vocab_size": config.vocabulary,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    shape = (
        LlamaConfig(
            hidden_size=config.width,
            intermediate_size=config.inner,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.sequence,
            **common,
        )
        if config.model == "llama"
        else GPT2Config(
            n_positions=config.sequence,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260101)
        return AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.model.layers if hasattr(model, "model") else model.transformer.h)


def build_optimizer(parameters, config: CompareConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=config.learning_rate, foreach=True)


def make_batches(config: CompareConfig, step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of one rank's step, tokens of shape (B, S).

    Token frequencies are skewed, so that the loss falls within a few steps.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (config.accumulation, config.micro_batch, config.sequence)
    tokens = torch.randint(0, config.vocabulary, shape, generator=generator)
    tokens = (tokens.double() ** 2 / config.vocabulary).long()
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


class Nearlinear:
    """nearlinear, used as documented."""

    def __init__(
        self,
        config: CompareConfig,
        two_hop: bool = True,
        free_blocks: bool = False,
        budget: float | None = None,
        **options,
    ):
        """Build the adapter.

        Args:
            config: The comparison.
            two_hop: Synchronize replicas once per step.
            free_blocks: Free the parameters of every block after its forward pass, as FSDP2 does.
            budget: ``memory_budget`` in sizes of the float32 parameters.
            **options: Further keys of ``nl.init``.
        """
        import nearlinear as nl
        from nearlinear.distributed import runtime

        if budget is not None:
            parameters = traffic.BYTES_PER_PARAMETER * sum(traffic.unit_sizes(config))
            options["memory_budget"] = f"{round(budget * parameters)}B"
        nl.init(
            {"hybrid_shard_degree": config.shard, **options},
            ranks_per_node=config.ranks_per_node,
        )
        self.runtime = runtime.current()
        self.model = nl.shard(build_model(config), reshard_after_forward=free_blocks or None)
        if free_blocks:
            self.model.set_reshard_after_forward(False, recurse=False)  # the root stays gathered
        self.optimizer = build_optimizer(self.model.parameters(), config)
        if options.get("shard_optimizer_state"):
            self.optimizer = nl.shard_optimizer(self.optimizer, self.model)
        self.two_hop = two_hop
        self.accumulate = nl.accumulate

    def comm_threads(self) -> list:
        """Return the communication threads, which record their operations on demand."""
        threads = self.runtime.comm_threads
        return [threads.gathers, threads.reductions] if threads is not None else []

    def step(self, batches) -> float:
        total = 0.0
        for batch in self.accumulate(self.model, batches, two_hop=self.two_hop):
            loss = self.model(**batch).loss
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(batches)


class Fsdp:
    """PyTorch's DDP, FSDP1 or FSDP2, with full or hybrid sharding as in its documentation.

    Gradients of every micro-batch are reduced unless ``once`` is set.
    """

    def __init__(
        self,
        config: CompareConfig,
        kind: str,
        backend: str = "gloo",
        kept: bool = False,
        once: bool = False,
        prefetch: bool = False,
        sharded_optimizer: bool = False,
    ):
        """Build the adapter.

        Args:
            config: The comparison.
            kind: ``compute`` (no communication), ``ddp``, ``full``, ``hybrid`` or ``fsdp1``.
            backend: Backend of FSDP's shard group or of DDP, ``gloo`` or ``nearlinear``.
            kept: FSDP frees gathered parameters at the end of the step only.
            once: Gradients are reduced in the last micro-batch of a step only.
            prefetch: FSDP2 gathers the next block of each pass during the current one.
            sharded_optimizer: DDP's ranks each keep the optimizer state of some parameters.
        """
        from torch.distributed.device_mesh import init_device_mesh

        self.kept, self.once = kept, once
        self.per_parameter = kind in ("full", "hybrid")
        self.model = build_model(config)
        if kind == "ddp":
            group = _group_of_all_ranks(backend)
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.model, process_group=group, gradient_as_bucket_view=True
            )
        elif kind == "full":
            self._fully_shard(init_device_mesh("cpu", (config.world,)))
        elif kind == "hybrid":
            shape = (config.world // config.shard, config.shard)
            self._fully_shard(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        elif kind == "fsdp1":
            self._shard_fsdp1(_group_of_all_ranks(backend))
        if self.per_parameter and backend == "nearlinear":
            self._use_nearlinear()
        if self.per_parameter and kept:
            self.model.set_reshard_after_forward(False)
        if prefetch:
            self._gather_ahead()
        self.optimizer = (
            _sharded_optimizer(self.model, config)
            if sharded_optimizer
            else build_optimizer(self.model.parameters(), config)
        )

    def _fully_shard(self, mesh) -> None:
        from torch.distributed.fsdp import fully_shard

        self.mesh = mesh
        for block in blocks_of(self.model):
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def _gather_ahead(self) -> None:
        self.model._set_unshard_async_op(True)  # streams do not overlap anything on the CPU
        blocks = blocks_of(self.model)
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])

    def _shard_fsdp1(self, group: dist.ProcessGroup | None) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        wrap = ModuleWrapPolicy({type(blocks_of(self.model)[0])})
        self.model = FullyShardedDataParallel(
            self.model,
            process_group=group,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if self.kept else None,
            auto_wrap_policy=wrap,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )

    def _synchronizing(self, last: bool):
        """Return the context of a micro-batch, and set FSDP2's flags for it."""
        if not self.per_parameter:
            return self.model.no_sync() if self.once and not last else contextlib.nullcontext()
        if self.kept:
            self.model.set_reshard_after_backward(last)
        if self.once:
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
        return contextlib.nullcontext()

    def _use_nearlinear(self) -> None:
        import nearlinear_collectives

        ranks = dist.get_process_group_ranks(self.mesh.get_group(self.mesh.ndim - 1))
        group = dist.new_group(ranks, backend="nearlinear", use_local_synchronization=True)
        nearlinear_collectives.use_in(self.model, group)

    def step(self, batches) -> float:
        total = 0.0
        for number, batch in enumerate(batches, 1):
            with self._synchronizing(last=number == len(batches)):
                loss = self.model(**batch).loss
                (loss / len(batches)).backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(batches)


def _group_of_all_ranks(backend: str) -> dist.ProcessGroup | None:
    """Return a group of all ranks on nearlinear, or None for the default group."""
    if backend != "nearlinear":
        return None
    import nearlinear_collectives  # noqa: F401 (registers the backend)

    return dist.new_group(backend=backend)


def _sharded_optimizer(model, config: CompareConfig) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        process_group=model.process_group,
        lr=config.learning_rate,
        foreach=True,
    )


class DeepSpeedZero3:
    """DeepSpeed's ZeRO stages on the CPU."""

    def __init__(
        self,
        config: CompareConfig,
        scaled: bool = True,
        stage: int = 3,
        node_copies: bool = False,
    ):
        """Build the adapter.

        Args:
            config: The comparison.
            scaled: Use thresholds in proportion to the model. DeepSpeed's defaults are meant for
                billions of parameters and keep the whole model gathered within a micro-batch.
            stage: ZeRO's stage.
            node_copies: Keep a copy of the parameters per node, from which backward passes gather
                (hpZ of ZeRO++).
        """
        import deepspeed

        without_inference_kernel()
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        model = build_model(config)
        thresholds = zero_thresholds(model, stage) if scaled else {}
        if node_copies:
            thresholds["zero_hpz_partition_size"] = config.ranks_per_node
        settings = deepspeed_config(config, {"stage": stage, **thresholds})
        self.prepare(model, settings, config)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model.parameters(), config), config=settings
        )

    def prepare(self, model, settings: dict, config: CompareConfig) -> None:
        """Modify the model and the settings before DeepSpeed takes them."""

    def step(self, batches) -> float:
        total = 0.0
        for batch in batches:
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / len(batches)


class DeepSpeedMics(DeepSpeedZero3):
    """DeepSpeed's MiCS as of its last release (0.19.6; removed in 0.19.7), with two repairs.

    Its all-gathers request coalescing, which gloo does not support. Parameters keep the default
    process group, so that with several replicas most ranks drop their gradients and the job hangs.
    """

    def prepare(self, model, settings: dict, config: CompareConfig) -> None:
        import deepspeed
        from deepspeed.comm.torch import TorchBackend

        settings["zero_optimization"] |= {
            "mics_shard_size": config.shard,
            "mics_hierarchical_params_gather": 1 < config.ranks_per_node < config.shard,
        }
        os.environ["NDEV_PER_NODE"] = str(config.ranks_per_node)
        TorchBackend.all_gather_coalesced = _all_gather_one_by_one
        deepspeed.zero.MiCS_Init(module=model, config_dict_or_path=settings)
        for parameter in model.parameters():
            group = parameter.comm.param_shard_group
            parameter.ds_process_group = group
            parameter.ds_zero_partition_rank = dist.get_rank(group)
            parameter.ds_zero_partition_world_size = dist.get_world_size(group)


class _CombinedWork:
    """Work handle of several collectives."""

    def __init__(self, handles):
        self.handles = handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


def _all_gather_one_by_one(self, output_tensors, input_tensors, group=None, async_op=False):
    """All-gather each of ``input_tensors`` (E,) into its output (ranks * E,), concurrently."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    handles = _CombinedWork(
        [dist.all_gather_into_tensor(*pair, group=group, async_op=True) for pair in pairs]
    )
    if async_op:
        return handles
    handles.wait()
    return None


def deepspeed_config(config: CompareConfig, zero: dict) -> dict:
    """Return DeepSpeed's configuration. Gradient clipping, on by default, is off as elsewhere."""
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, **zero},
    }


def zero_thresholds(model: torch.nn.Module, stage: int) -> dict:
    """Return buckets of a block; stage 3 prefetches one block and keeps two gathered, as others."""
    block = sum(p.numel() for p in blocks_of(model)[0].parameters())
    buckets = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": block}
    if stage < 3:
        return buckets | {"allgather_bucket_size": block}
    return buckets | {
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
    }


def without_inference_kernel() -> None:
    """Keep DeepSpeed from compiling an all-reduce for a minute that only its inference calls."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


ADAPTERS = {
    "nearlinear": Nearlinear,
    "fsdp": Fsdp,
    "zero3": DeepSpeedZero3,
    "mics": DeepSpeedMics,
}
"""Adapter classes by the library name in `systems.SYSTEMS`."""

"""Train a model from a config, with the same program on 1 rank and on 256.

`Trainer(config)` joins the ranks, opens the data, builds and shards the model. `Trainer.step` runs
one optimizer step and reads top to bottom. `Trainer.fit` runs all steps, evaluates on held-out
tokens and ends with a text sample. Only rank 0 reports and writes files.

The watchdog, rank timing, emergency checkpoints, the divergence sentinel and bad-step detection are
callbacks, see `nearlinear.train.callbacks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import storage
from ..checkpoint.hf.importing import import_hf
from ..checkpoint.hf.writer import TOKENIZER_FOLDER
from ..config import schema
from ..config.architecture import model_folder
from ..config.train import TrainConfig, load
from ..data.dataset import TokenDataset
from ..data.loader import Loader
from ..data.mixture import Mixture
from ..data.source import NoSplit
from ..distributed import runtime
from ..distributed.mesh import Mesh
from ..distributed.watchdog import HEARTBEAT_TIMEOUT, Watchdog, watch_ranks
from ..errors import ConfigError, Interrupted
from ..fsdp.accumulate import NoTargets, accumulate
from ..fsdp.clip_grad import clip_grad_norm_
from ..fsdp.loss_scaler import LossScaler
from ..fsdp.model_state import model_state
from ..fsdp.targets import count_targets
from ..memory import MemoryReport, memory_report
from ..pipeline_parallel.api import Pipelined
from ..spmd import seed_generators
from . import preflight
from .callbacks import NO_TARGETS, Callback, TrainStep
from .callbacks.bad_steps import BadStepDetector
from .callbacks.divergence import DivergenceSentinel, ReplicasDiverged
from .callbacks.emergency_checkpoint import EmergencyCheckpoint
from .callbacks.rank_monitor import RankTiming, WatchdogCallback, peak_memory
from .callbacks.trackers import TRACKERS
from .checkpoint_manager import CheckpointManager, StopSignal
from .data import build_loader, check_document_mask, masks, write_data_state
from .elastic_steps import ElasticSteps
from .evaluate import generate, held_out_loss
from .lora import add_adapters
from .metrics import Reporter
from .model import build_model, flops_per_token, parallelize, peak_tflops
from .objectives import Objective, build_objective
from .optimizer import build_optimizer, learning_rate, set_learning_rate
from .preference import (
    PairLabels,
    PreferenceLoss,
    measure_references,
    preference_metrics,
    read_references,
    write_references,
)
from .self_check.check import check_model

log = logging.getLogger(__name__)

STARTUP_PATIENCE = 12.0
"""Multiple of ``train.rank_timeout`` for each part of the set-up: large checkpoints take long."""

HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_"))

HOST_NAME_BYTES = 64
"""Longer host names are cut."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a run, equal on every rank."""

    steps: int
    loss: float
    """Mean training loss of the last step, nats."""
    eval_loss: float
    """Held-out loss after the last step, nats; NaN without evaluation."""
    guessing: float
    """Loss of uniform guessing: the logarithm of the vocabulary size."""
    sample: str
    """Generated text with its prompt; empty if ``train.sample_tokens`` is 0."""


class Trainer:
    """A training run: config, mesh, data, model, optimizer, checkpoints and callbacks.

    Example::

        config = {
            "model": {"preset": "gpt2-tiny"},
            "data": {"path": "data/botocore"},
            "train": {"steps": 20},
        }
        result = nl.Trainer(config).fit()
        print(result.loss, result.eval_loss)
    """

    def __init__(
        self,
        config: TrainConfig | Mapping[str, Any] | str | Path,
        *,
        callbacks: Sequence[Callback] = (),
        verified: bool = False,
    ):
        """Set up a run on this rank. A collective call.

        Args:
            config: The config, as a TrainConfig, a dict, or the path of a file.
            callbacks: Further callbacks, called before bad-step detection and after the others.
            verified: True if the token shards were verified just before.

        Raises:
            ConfigError: A setting cannot be used.
            DataError: The token shards cannot be used.
        """
        config = config if isinstance(config, TrainConfig) else load(config)
        self.config = config

        # mesh
        self.mesh: Mesh = runtime.init(config.parallel)
        now = runtime.current()
        self.rank: int = now.rank
        self.device: torch.device = now.device
        seed_generators(config.parallel.random_seed + self.rank)  # dropout
        self.elastic: ElasticSteps | None = ElasticSteps(self) if config.elastic.replicas else None
        self.world: int = self.mesh.world * now.replicas

        preflight.check_lora(config, self.mesh)
        timeout, setting = config.train.rank_timeout, "train.rank_timeout"
        with watch_ranks(timeout, setting=setting) as watch:
            # data
            watch.at("opening the data", STARTUP_PATIENCE)
            self.dataset: TokenDataset | Mixture = preflight.open_dataset(config, "train", verified)
            self.held_out: TokenDataset | Mixture | None = None
            if config.train.eval_sequences:
                try:
                    self.held_out = preflight.open_dataset(config, "val", verified)
                except NoSplit as error:
                    if self.rank == 0:
                        log.warning("training without validation: %s", error)
            objective = build_objective(config, self.dataset)
            self.loader: Loader = build_loader(config, self.dataset, objective)
            self.evaluated_objective: Objective | None = (
                objective if objective and objective.in_evaluation else None
            )
            self.preference: PreferenceLoss | None = None
            if isinstance(objective, PairLabels):
                self.preference = PreferenceLoss(config.preference.beta)
                self.evaluated_objective = PairLabels(objective.vocabulary)
            self.tokens_per_step: int = self.loader.samples_per_step * config.sequence_length
            data_state = preflight.read_data_state(config)
            if data_state:
                self.loader.load_state_dict(data_state["loader"])

            # model
            watch.at("building the model", STARTUP_PATIENCE)
            vocabulary = objective.vocabulary if objective else self.dataset.manifest.vocab_size
            model = build_model(config.model, vocabulary, self.dataset.manifest.eos_id)
            if config.data.document_mask:
                check_document_mask(model)
            self.num_parameters: int = sum(p.numel() for p in model.parameters())

            # self-check
            watch.at("the self-check of the layout", STARTUP_PATIENCE)
            check_model(model, config)

            if config.lora.rank:
                add_adapters(model, config.lora, config.model.init_from)
            self.flops_per_token: float = flops_per_token(model, config.sequence_length)

            # parallelize
            watch.at("sharding the model", STARTUP_PATIENCE)
            self.model: nn.Module
            self.model, blocks = parallelize(model, config, self.preference)

            # optimizer
            self.optimizer: torch.optim.Optimizer = build_optimizer(self.model, config.optimizer)
            self.scaler: LossScaler | None = model_state(self.model).loss_scaler
            self.bad_steps: BadStepDetector = BadStepDetector(
                config.train.bad_steps_in_a_row, config.train.spike_factor
            )

            # checkpoint
            watch.at("loading the checkpoint", STARTUP_PATIENCE)
            self.checkpoints: CheckpointManager | None = None
            if config.checkpoint_folder:
                others = {"loader": self.loader, "bad_steps": self.bad_steps}
                self.checkpoints = CheckpointManager(config, self.model, self.optimizer, **others)
            joining = self.elastic is not None and self.elastic.joining
            resumed = self.checkpoints.resume() if self.checkpoints and not joining else 0
            if config.model.init_from and not resumed and not joining:
                import_hf(model_folder(config.model.init_from), self.model)
            self.first_step: int = resumed or (data_state["step"] if data_state else 0)
            if self.elastic:
                watch.at("meeting the other replicas", math.inf)
                self.first_step = self.elastic.start(self.first_step)
            self.done: int = self.first_step
            self.stop_signal: StopSignal = StopSignal()
            self.stopping: bool = False
            self._replayed: ReplicasDiverged | None = None  # error whose steps are repeated

            # metrics
            precision = config.parallel.precision
            self.peak_tflops: float = config.run.peak_tflops or peak_tflops(self.device, precision)
            self.memory: MemoryReport | None = None  # measured in the first update
            self.reporter: Reporter = self.open_reporter(self.done)
            self.last_row: dict[str, Any] = {}  # the metrics that were reported last

            # preferences
            if self.preference:
                watch.at("opening the references", STARTUP_PATIENCE)
                self._open_references(self.preference, bool(resumed), watch)

            # callbacks
            emergency = None
            if self.checkpoints and config.checkpoint.emergency and not self.elastic:
                emergency = EmergencyCheckpoint(self.checkpoints)
            on_fault, silence = emergency.save if emergency else None, HEARTBEAT_TIMEOUT
            if self.elastic:
                on_fault, silence = self.elastic.leave, config.elastic.silence_seconds
            self.sentinel: DivergenceSentinel | None = None
            if config.train.divergence_every and self.world > 1:
                self.sentinel = DivergenceSentinel(
                    self.model,
                    self.optimizer,
                    config.train.divergence_every,
                    config.checkpoint.every,
                )
            self.watch: Watchdog = watch_ranks(timeout, on_fault, setting=setting, silence=silence)
            self.callbacks: tuple[Callback, ...] = (
                WatchdogCallback(self.watch, self.model, blocks, self.first_step + 1),
                *((emergency,) if emergency else ()),
                RankTiming(blocks, self.device),
                *((self.sentinel,) if self.sentinel else ()),
                *(TRACKERS[name]() for name in dict.fromkeys(config.run.trackers)),
                *callbacks,
                self.bad_steps,  # last, to count the steps that others skip
            )
            self._hooks = {name: _overriding(self.callbacks, name) for name in HOOKS}
            self._call("on_setup", self)

    def _open_references(self, loss: PreferenceLoss, resumed: bool, watch: Watchdog) -> None:
        """Read the references of all pairs, or measure them with the model of the start."""
        opened = {"train": self.dataset, "val": self.held_out}
        pairs = {name: each for name, each in opened.items() if isinstance(each, TokenDataset)}
        if resumed and self.checkpoints:
            found = read_references(self.checkpoints.folder, pairs, self.device)
        else:
            count = sum(map(len, pairs.values()))
            self.reporter.print(
                f"measuring the log probabilities of the answers in {count:,} sequences under the "
                "model at the start of the run"
            )
            place = self.mesh, self.config.batch.micro_batch_size, masks(self.config.data), watch
            found = {
                name: measure_references(self.model, loss, each, *place)
                for name, each in pairs.items()
            }
            if self.checkpoints:
                write_references(self.checkpoints.folder, found)
        for name, objective in (
            ("train", self.loader.transform),
            ("val", self.evaluated_objective),
        ):
            if isinstance(objective, PairLabels):
                objective.references = found.get(name)

    def fit(self) -> TrainResult:
        """Train to the last step (or ``train.stop_after``), evaluate, and sample text.

        With a checkpoint folder, SIGTERM and the first Ctrl-C save the run and raise Interrupted.
        """
        if self.checkpoints:
            self.stop_signal.install()
        loop = self.config.train
        last = min(loop.steps, loop.stop_after or loop.steps)
        try:
            with self.watch:
                self.watch.at("the start of the run")
                self._introduce(last)
                return self._run(last)
        except BaseException as error:
            if self.elastic:
                self.elastic.job.abandon()
            if self.checkpoints:
                self.checkpoints.abandon(error)
            raise
        finally:
            self.stop_signal.uninstall()
            self.reporter.close()

    def _run(self, last: int) -> TrainResult:
        loop, metrics = self.config.train, {"loss": math.nan}
        while self.done < last:
            try:
                metrics = self._run_step(last)
            except ReplicasDiverged as error:
                self._rewind(error)
        eval_loss = metrics.get("eval_loss", math.nan)
        self.watch.at("the text sample at the end")
        generates = loop.sample_tokens and self.config.model.trained_objective == "causal"
        if sample := self.sample() if generates else "":
            self.reporter.print(f"sample: {sample!r}")
        if self.checkpoints:
            self.watch.at(f"the end of the run, writing checkpoint {self.checkpoints.saved}")
            if self.elastic:
                self.elastic.finish(self.checkpoints)
            else:
                self.checkpoints.finish()
        if self.elastic:
            self.elastic.job.close()
        guessing = math.log(2 if self.preference else self.dataset.manifest.vocab_size)
        return TrainResult(self.done, metrics["loss"], eval_loss, guessing, sample)

    def _run_step(self, last: int) -> dict[str, Any]:
        """Run one step with all that follows it, and return its metrics."""
        loop = self.config.train
        metrics = self._step_with_memory_report()
        self.watch.at(f"after step {self.done}")
        if self.stopping and self.done < last:
            self._stop_early(metrics)
        due = self.done == last or (loop.eval_every and self.done % loop.eval_every == 0)
        if due and self.held_out:
            self.watch.at(f"the evaluation after step {self.done}")
            metrics["eval_loss"] = self.evaluate()
            if self.preference:
                sums = self.preference.take_sums(self.device)
                dist.all_reduce(sums)
                found = preference_metrics(sums.tolist())
                metrics["eval_reward_accuracy"] = found.get("reward_accuracy", math.nan)
        if due or self.done % self.config.run.log_every == 0:
            self.last_row = metrics
            self.reporter.log_step(metrics)
        self._write_data_state()
        if self.checkpoints and self.checkpoints.is_due(self.done, last) and self.writes:
            self.save(self.checkpoints)
        if self._replayed is not None and self.done >= self._replayed.step:
            self.reporter.print(
                f"the replay found no difference up to step {self.done}: a bit was flipped, and "
                "the run goes on with the repeated steps. Test the memory and the accelerator of "
                "the host named above"
            )
            self._replayed = None
        return metrics

    def _rewind(self, error: ReplicasDiverged) -> None:
        """Go back to the newest checkpoint after a divergence, to learn if it comes back.

        Raises ``error`` without `replay`, and a verdict if this step is a replay already.
        """
        if self._replayed is not None:
            raise error.judge_replay(self._replayed)
        if self.config.train.on_divergence != "replay":
            raise error
        if self.checkpoints is None or not self.checkpoints.saved:
            raise ReplicasDiverged(
                f"{error.finding}; there is no checkpoint to replay from", error.step, error.ranks
            )
        self.watch.at("loading the checkpoint", STARTUP_PATIENCE)
        self.optimizer.zero_grad()
        self.done = self.checkpoints.reload()
        self._replayed = error
        self._call("on_rewind", self.done)
        self.reporter.rewind(self.done)
        self.reporter.print(
            f"{error.finding}. Repeating the steps after step {self.done}, the newest checkpoint"
        )

    def step(self) -> dict[str, Any]:
        """Run one optimizer step and return the job's metrics, equal on every rank.

        Besides the collectives of the model and of the gradient norm, a step has one all-reduce: of
        the loss, the number of targets, the flags, and the per-rank metrics of callbacks. Elastic
        replicas then agree on the step, and compute it again after a loss, see `elastic_steps`.
        """
        config, updates = self.config, self.done - self._skipped_steps()
        logged = (self.done + 1) % config.run.log_every == 0
        step = TrainStep(self.done + 1, updates, logged)
        self._call("on_step_begin", step)
        start = time.perf_counter()
        lr = learning_rate(updates + 1, config.train.steps, config.optimizer)
        set_learning_rate(self.optimizer, lr)
        micro_batches = next(self.loader)
        self._call("on_data_loaded", step)

        compute = self._compute_gradients if self.elastic is None else self.elastic.compute
        sums = compute(step, micro_batches)
        self.stopping = sums[2] > 0
        if self.checkpoints:
            if sums[3]:
                self.checkpoints.finish()  # raises on all ranks
            self.checkpoints.interval_elapsed = sums[4] > 0

        step.loss = sums[0] / sums[1] if sums[1] else math.nan
        if self.scaler and self.scaler.overflow:  # no rank has gradients
            step.overflow, step.grad_norm = True, math.inf
        self._call("on_gradients_ready", step)
        if step.skip_reason:
            self.optimizer.zero_grad()
            self.reporter.print(f"step {step.number} is skipped: {step.skip_reason}")
        with self._update_context(step):
            self.optimizer.step()  # changes nothing without gradients
            self.optimizer.zero_grad()
            self.done += 1
        if self.elastic:
            self.elastic.settle()
        metrics = self._metrics(step, lr, time.perf_counter() - start)
        if self.preference:
            metrics |= preference_metrics(sums[5:])
        self._call("on_step_end", step, metrics)
        return metrics

    def _compute_gradients(self, step: TrainStep, micro_batches: list[Any]) -> list[float]:
        """Compute the gradients of ``step`` and their norm.

        Returns the sums over all ranks of: loss times targets, targets, `flags`, and for pairs
        `PreferenceLoss.sums`.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.preference:
            self.preference.take_sums(self.device)  # of an evaluation
        try:
            batches = accumulate(self.model, micro_batches, two_hop=self.config.train.two_hop)
            self.run_micro_batches(step, batches, totals.expand(self.loader.micro_batches, 2))
        except NoTargets:  # on all ranks: conversations may have sequences without an answer
            step.skip_reason = NO_TARGETS
        self.measure_gradients(step)
        parts = [totals, totals.new_tensor(self.flags())]
        if self.preference:
            parts.append(self.preference.take_sums(self.device))
        return self.sum_over_ranks(step, torch.cat(parts))

    def run_micro_batches(
        self, step: TrainStep, batches: Iterable[Any], rows: torch.Tensor
    ) -> None:
        """Run forward and backward of ``batches``.

        Adds loss times targets, and targets, to the row of ``rows`` (micro-batches, 2) of each.
        """
        for index, (batch, row) in enumerate(zip(batches, rows, strict=True), 1):
            self._call("on_micro_batch", step, index)
            if isinstance(self.model, Pipelined):
                loss = self.model.step(batch)
            else:
                loss = self.model(**batch).loss  # FSDP moves the batch to the device
                loss.backward()
            if targets := count_targets(self.model, batch):  # else the loss is not a number
                row[0] += loss.detach().double() * targets
            row[1] += targets

    def measure_gradients(self, step: TrainStep) -> None:
        """Clip the gradients of ``step``, and note their norm."""
        self._call("on_backward_end", step)
        limit = self.config.optimizer.clip or math.inf
        step.grad_norm = 0.0 if step.skip_reason else clip_grad_norm_(self.model, limit)

    def flags(self) -> list[float]:
        """Return this rank's flags: stop signal, checkpoint failed, checkpoint interval elapsed.

        They reach all ranks, so that all act on them after the same step.
        """
        flags = self.checkpoints.flags() if self.checkpoints else (False, False)
        return [float(self.stop_signal.number > 0), *map(float, flags)]

    def sum_over_ranks(self, step: TrainStep, totals: torch.Tensor) -> list[float]:
        """Return the sums of ``totals``, and gather the per-rank metrics of ``step``."""
        sums, step.by_rank = sum_and_gather(totals, self._rank_metrics(step))
        return sums

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call ``hook`` of every callback that overrides it, in order."""
        for method in self._hooks[hook]:
            method(*arguments)

    def _rank_metrics(self, step: TrainStep) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for rank_metrics in self._hooks["rank_metrics"]:
            metrics |= rank_metrics(step)
        return metrics

    def _update_context(self, step: TrainStep) -> contextlib.ExitStack:
        """Enter the callbacks' contexts, the first callback's outermost."""
        with contextlib.ExitStack() as stack:
            for update_context in self._hooks["update_context"]:
                stack.enter_context(update_context(step))
            return stack.pop_all()

    def _metrics(self, step: TrainStep, lr: float, seconds: float) -> dict[str, Any]:
        tokens_per_s = self.tokens_per_step / seconds
        tflops = tokens_per_s * self.flops_per_token / self.world / 1e12
        metrics = {
            "step": step.number,
            "loss": step.loss,
            "lr": lr,
            "grad_norm": step.grad_norm,
            "tokens_per_s": tokens_per_s,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops,
            "mem_gib": peak_memory(self.device),
            "batch_id": self.loader.batch_id,
        }
        if self.scaler or self._skipped_steps():
            metrics["skipped"] = self._skipped_steps()
        if self.scaler:
            metrics["loss_scale"] = self.scaler.loss_scale
        if self.elastic:
            metrics["replicas"] = len(self.elastic.job.members)
        if self.config.data.sources:
            metrics["epochs"] = self.loader.epochs  # per source of the mixture
        # four decimals keep the JSON line of a thousand ranks short
        shown = {n: values for n, values in step.by_rank.items() if not n.startswith("_")}
        for name, values in shown.items():
            metrics[name] = [round(value, 4) for value in values]
        return metrics

    def _skipped_steps(self) -> int:
        """Return the number of steps that did not update the model."""
        return self.bad_steps.skipped + (self.scaler.skipped if self.scaler else 0)

    def _step_with_memory_report(self) -> dict[str, Any]:
        """Run `step`, and measure the memory of the first one that updates the model."""
        if self.memory is not None or not self.config.run.memory_report:
            return self.step()
        before = self._skipped_steps()
        with memory_report(self.model, self.optimizer) as measured:
            metrics = self.step()
        if self._skipped_steps() == before and measured.report:
            self.memory = measured.report
            self.reporter.log_memory(self.memory)
        return metrics

    def evaluate(self) -> float:
        """Return the held-out loss in nats, equal on every rank."""
        if self.held_out is None:
            raise ConfigError(
                "no held-out data is open: set train.eval_sequences to at least 1, and prepare the "
                "data with a split 'val' of at least one sequence"
            )
        size, windows = self.config.batch.micro_batch_size, self.config.train.eval_sequences
        changes = self.loader.masks, self.evaluated_objective
        return held_out_loss(self.model, self.held_out, self.mesh, size, windows, *changes)

    def sample(self) -> str:
        """Return a continuation of ``train.sample_prompt``, decoded by the data's tokenizer."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.dataset.tokenizer()))
        prompt = tokenizer.encode(self.config.train.sample_prompt).ids
        prompt = prompt or [self.dataset.manifest.eos_id]
        context, tokens = self.config.model.longest_sequence, self.config.train.sample_tokens
        return tokenizer.decode(prompt + generate(self.model, prompt, tokens, context))

    def _stop_early(self, metrics: dict[str, Any]) -> None:
        """Save the finished steps, unless other replicas go on, and raise Interrupted."""
        assert self.checkpoints is not None  # the signal is caught with checkpoints only
        self.reporter.log_step(metrics)
        self._write_data_state()
        if self.elastic and not (self.elastic.all_stop and self.writes):
            outcome = self.elastic.outcome_of_stop
        else:
            self.save(self.checkpoints)
            folder = self.checkpoints.finish()
            outcome = (
                f"stopped after step {self.done} and saved it in {folder}; run the same command "
                "again to resume"
            )
        number = self.stop_signal.number or signal.SIGTERM  # received by another rank
        error = Interrupted(f"{signal.Signals(number).name}: {outcome}")
        error.exit_code = 128 + number
        raise error

    @property
    def writes(self) -> bool:
        """True unless another replica writes the metrics and checkpoints."""
        return self.elastic is None or self.elastic.job.writes

    def open_reporter(self, last: int) -> Reporter:
        """Return the reporter, active on the first rank of the replica that writes.

        Args:
            last: Last step that this rank has reported; rows of later ones are discarded.
        """
        return Reporter(
            self.config.run.folder,
            self.config.train.steps,
            active=self.rank == 0 and self.writes,
            tensorboard=self.config.run.tensorboard,
            first_step=last,
        )

    def save(self, checkpoints: CheckpointManager) -> None:
        """Save the finished steps. A collective call."""
        self.watch.at(f"saving the checkpoint of step {self.done}")
        self._call("on_checkpoint", self.done)
        checkpoints.save(self.done)

    def _introduce(self, last: int) -> None:
        write = self.reporter.print
        write(str(self.mesh))
        write(f"{self.config.model.name}: {self.num_parameters:,} parameters")
        write(f"{self.dataset}")
        self.reporter.introduce(last, self.tokens_per_step, gather_hosts(self.device))
        if self.checkpoints and self.checkpoints.saved:
            write(f"resumed after step {self.first_step} from {self.checkpoints.folder}")
        elif self.first_step:
            write(f"data resumed after step {self.first_step}; the model starts from scratch")
        if self.first_step >= last:
            write(
                f"nothing is left to train: the run has ended after step {self.first_step}; raise "
                "train.steps to continue it, or set another run.folder for a new run"
            )
        if not self.reporter.active:
            return
        if self.first_step and (keys := _changed_keys(self.reporter.folder, self.config)):
            write(f"changed since this run was started: {', '.join(keys)}")
        self.reporter.write_file("config.toml", schema.to_toml(self.config))
        if self.checkpoints:
            with self.reporter.output("the tokenizer beside the checkpoints"):
                folder = storage.as_path(self.dataset.path) / TOKENIZER_FOLDER
                self.checkpoints.write_tokenizer(folder)

    def _write_data_state(self) -> None:
        """Write the position in the data after every step, so that a killed run can resume it."""
        if not self.reporter.active:
            return
        with self.reporter.output("data_state.json"):
            write_data_state(Path(self.config.run.folder), self.done, self.loader)


def sum_and_gather(
    totals: torch.Tensor, own: Mapping[str, float]
) -> tuple[list[float], dict[str, list[float]]]:
    """Sum ``totals`` over all ranks and gather ``own`` from all ranks, in one all-reduce.

    For the gather, each rank fills its row of a table of zeros. Every rank must pass the same names
    in the same order.

    Args:
        totals: Numbers to sum, one dimension.
        own: Numbers of this rank.

    Returns:
        The sums, and for every name the numbers of all ranks.
    """
    table = totals.new_zeros(dist.get_world_size(), len(own))
    table[dist.get_rank()] = totals.new_tensor(list(own.values()))
    both = torch.cat([totals, table.view(-1)])
    dist.all_reduce(both)
    columns = both[len(totals) :].view(table.shape).T.tolist()
    return both[: len(totals)].tolist(), dict(zip(own, columns, strict=True))


def _changed_keys(folder: Path, config: TrainConfig) -> list[str]:
    """Describe the keys that differ from the config in the run ``folder``, except output keys."""
    try:
        before = dataclasses.asdict(load(folder / "config.toml"))
    except (ConfigError, OSError):  # an older version wrote it, or no file
        return []
    now = dataclasses.asdict(config)
    return [
        f"{table}.{key} = {value!r} (was {before[table].get(key)!r})"
        for table, keys in now.items()
        if table not in ("checkpoint", "run", "plan")
        for key, value in keys.items()
        if value != before[table].get(key)
    ]


def gather_hosts(device: torch.device) -> list[str]:
    """Return the host name of every rank. A collective call."""
    name = runtime.host().encode()[:HOST_NAME_BYTES].ljust(HOST_NAME_BYTES, b"\0")
    own = {str(position): byte for position, byte in enumerate(name)}
    _, columns = sum_and_gather(torch.zeros(0, dtype=torch.float64, device=device), own)
    names = (bytes(map(int, letters)) for letters in zip(*columns.values(), strict=True))
    return [name.rstrip(b"\0").decode(errors="replace") for name in names]


def _overriding(callbacks: Sequence[Callback], hook: str) -> list[Callable[..., Any]]:
    """Return the methods of ``callbacks`` that override ``hook``, in order."""
    return [
        getattr(callback, hook)
        for callback in callbacks
        if getattr(type(callback), hook) is not getattr(Callback, hook)
    ]

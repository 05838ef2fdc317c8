"""The training loop, from a config to a trained model: the same code on one rank and on 256.

`Trainer(config)` joins the ranks, lays out the mesh, shards the model and opens the data;
`Trainer.step` is one optimizer step; `Trainer.fit` runs them all, evaluates on held-out tokens and
ends with a sample of text. Only rank 0 reports and writes files.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import runtime, schema
from ..checkpoint.hf.importing import import_hf
from ..memory.measure import memory_report
from ..memory.report import Report
from ..parallel import loss_scale
from ..parallel.accumulate import accumulate, count_targets
from ..parallel.clip import clip_grad_norm_
from ..parallel.pipeline.door import Pipelined
from ..watchdog.dog import Watchdog, watch_ranks
from . import preflight, ranks
from .bad_steps import BadSteps
from .batches import check_positions, loader_of, write_state
from .config import TrainConfig, load
from .emergency import Emergency
from .ending import Ending, Interrupted
from .evaluate import generate, held_out_loss
from .flops import flops_per_token, peak_tflops
from .keeper import Keeper
from .model import build_model
from .optimizer import build_optimizer, learning_rate, set_learning_rate
from .places import follow_blocks
from .report import Reporter
from .split import split

FIRST_STEP = 4.0
"""times ``train.rank_timeout`` that an operation may take there, compiling or measuring"""

START_UP = 12.0
"""times train.rank_timeout that parts of it may take: large checkpoints come over a network"""


@dataclass(frozen=True)
class Result:
    """What a run came to, the same on every rank."""

    steps: int
    loss: float
    """mean training loss of the last step, nats"""
    eval_loss: float
    """held-out loss after the last step, nats; NaN without evaluation"""
    guessing: float
    """loss of a model that knows nothing: the logarithm of the vocabulary's size"""
    sample: str
    """the generated text, prompt included; empty if none was asked for"""


class Trainer:
    """A run in progress: config, mesh, model, optimizer, data, reporter."""

    def __init__(self, config, *, verified: bool = False):
        """Get ready. ``config`` is a TrainConfig, a dict, or the path of a file.

        ``verified``: the token shards were checked just before. Raises ConfigError and DataError.
        """
        config = config if isinstance(config, TrainConfig) else load(config)
        self.config = config
        self.mesh = runtime.init(config.parallel)
        now = runtime.current()
        self.rank, self.device = now.rank, now.device
        torch.manual_seed(config.parallel.random_seed + self.rank)  # dropout
        with watch_ranks(config.train.rank_timeout, setting="train.rank_timeout") as watch:
            self._get_ready(watch, verified)

    def _get_ready(self, watch: Watchdog, verified: bool) -> None:
        config = self.config
        watch.at("opening the data", START_UP)
        self.dataset = preflight.open_dataset(config, "train", verified)
        self.held_out = None
        if config.train.eval_sequences:
            self.held_out = preflight.open_dataset(config, "val", verified)
        self.loader = loader_of(config, self.dataset)
        state = preflight.read_state(config)
        if state:
            self.loader.load_state_dict(state["loader"])
        watch.at("building the model", START_UP)
        model = build_model(config.model, self.dataset.manifest.vocab_size)
        if config.data.document_mask:
            check_positions(model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.flops_per_token = flops_per_token(model, config.sequence_length)
        self.model, blocks = split(model, config)
        self.own_time = ranks.OwnTime(blocks, self.device)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = loss_scale.of(self.model)  # None: not in float16
        self.memory: Report | None = None  # of the first step
        self.bad_steps = BadSteps(config.train.bad_steps_in_a_row, config.train.spike_factor)
        self.keeper = Keeper(
            config.checkpoint,
            self.model,
            self.optimizer,
            loader=self.loader,
            bad_steps=self.bad_steps,
        )
        self.emergency = Emergency(self.keeper)
        seconds = config.train.rank_timeout
        self.watch = watch_ranks(seconds, self.emergency.save, setting="train.rank_timeout")
        follow_blocks(self.model, blocks, self.watch.operation.reach)
        self.ending = Ending()
        self.told_to_end = False
        watch.at("loading what was saved", START_UP)
        resumed = self.keeper.resume()
        if config.model.init_from and not resumed:
            import_hf(config.model.init_from, self.model)
        self.first_step = self.done = resumed or (state["step"] if state else 0)
        precision = config.parallel.precision
        self.peak_tflops = config.run.peak_tflops or peak_tflops(self.device, precision)
        self.reporter = Reporter(
            config.run.folder,
            config.train.steps,
            active=self.rank == 0,
            tensorboard=config.run.tensorboard,
            first_step=self.first_step,
        )

    def fit(self) -> Result:
        """Train to the last step (or ``train.stop_after``), evaluate, and sample text.

        Where checkpoints are kept, SIGTERM has the run saved and raises Interrupted.
        """
        if self.keeper.folder:
            self.ending.watch()
        loop = self.config.train
        last = min(loop.steps, loop.stop_after or loop.steps)
        try:
            with self.watch:
                self.watch.at("the beginning of the run")
                self._introduce(last)
                return self._run(last)
        except BaseException as error:
            self.keeper.abandon(error)
            raise
        finally:
            self.ending.leave()
            self.reporter.close()

    def _run(self, last: int) -> Result:
        loop, metrics, eval_loss = self.config.train, {"loss": math.nan}, math.nan
        while self.done < last:
            self.emergency.prepare(self.done - self._skipped())
            metrics = self._step()
            self.watch.at(f"what follows step {self.done}")
            if self.told_to_end and self.done < last:
                self._end_early(metrics)
            due = self.done == last or (loop.eval_every and self.done % loop.eval_every == 0)
            if due and self.held_out:
                self.watch.at(f"the evaluation after step {self.done}")
                metrics["eval_loss"] = eval_loss = self.evaluate()
            if due or self.done % self.config.run.log_every == 0:
                self.reporter.step(metrics)
            self._save_data_state()
            if self.keeper.due(self.done, last):
                self._save()
        self.watch.at("the sample of text at the end")
        if sample := self.sample() if loop.sample_tokens else "":
            self.reporter.say(f"sample: {sample!r}")
        self.watch.at(f"the end of the run, with the checkpoint of step {self.keeper.saved}")
        self.keeper.finish()
        guessing = math.log(self.dataset.manifest.vocab_size)
        return Result(self.done, metrics["loss"], eval_loss, guessing, sample)

    def _step(self) -> dict:
        """`step`, the first one that is not skipped with an account of its memory."""
        if self.memory is not None or not self.config.run.memory_report:
            return self.step()
        before = self._skipped()
        with memory_report(self.model, self.optimizer) as measured:
            metrics = self.step()
        if self._skipped() == before:
            self.memory = measured.report
            self.reporter.memory(self.memory)
        return metrics

    def step(self) -> dict:
        """One optimizer step; the metrics of the whole job, the same on every rank."""
        start = time.perf_counter()
        number = self.done + 1 - self._skipped()  # the schedule waits for those
        rate = learning_rate(number, self.config.train.steps, self.config.optimizer)
        set_learning_rate(self.optimizer, rate)
        totals = torch.zeros(5, dtype=torch.float64, device=self.device)
        two_hop = self.config.train.two_hop
        reported = (self.done + 1) % self.config.run.log_every == 0
        self.own_time.begin_step(watching=reported)
        self._at("loading a batch")
        with self.own_time.loading():
            micro_batches = next(self.loader)
        self._at("micro-batch 1")
        for number, batch in enumerate(accumulate(self.model, micro_batches, two_hop=two_hop), 1):
            if number > 1:
                self._at(f"micro-batch {number}")
            if isinstance(self.model, Pipelined):
                loss = self.model.step(batch)
            else:
                loss = self.model(**batch).loss  # FSDP moves the batch to the device
                loss.backward()
            targets = count_targets(batch)
            totals[0] += loss.detach().double() * targets
            totals[1] += targets
        self._at("the gradients' norm")
        norm = clip_grad_norm_(self.model, self.config.optimizer.clip or math.inf)
        # one rank's wish is everybody's, after the same step
        wishes = [self.ending.told, self.keeper.failed, self.keeper.waited_long]
        totals[2:] = totals.new_tensor(wishes)
        mine = [*self.own_time.take(), ranks.peak_memory(self.device)] if reported else []
        (loss, targets, told, failed, waited), by_rank = ranks.add_up(totals, mine)
        if failed:
            self.keeper.finish()  # which raises, on all ranks
        loss, self.told_to_end, self.keeper.time_is_up = loss / targets, told > 0, waited > 0
        if self.scaler and self.scaler.overflow:
            norm = math.inf  # all ranks have dropped their gradients
        elif why := self.bad_steps.judge(self.done + 1, loss, norm):
            self.optimizer.zero_grad()
            self.reporter.say(f"step {self.done + 1} is skipped: {why}")
        with self.watch.changing(f"step {self.done + 1}, the optimizer's step"):
            self.optimizer.step()  # without gradients it changes nothing
            self.optimizer.zero_grad()
            self.done += 1
            self.emergency.note(self.done)
        metrics = self._metrics(loss, rate, norm, time.perf_counter() - start)
        return metrics | ranks.columns(by_rank)

    def evaluate(self) -> float:
        """Held-out loss in nats, the same on every rank."""
        size, windows = self.config.batch.micro_batch_size, self.config.train.eval_sequences
        hidden = self.loader.masks
        return held_out_loss(self.model, self.held_out, self.mesh, size, windows, hidden)

    def sample(self) -> str:
        """Text that continues ``train.sample_prompt``, decoded by the data's own tokenizer."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.dataset.tokenizer()))
        prompt = tokenizer.encode(self.config.train.sample_prompt).ids
        prompt = prompt or [self.dataset.manifest.eos_id]
        context, tokens = self.config.model.longest_sequence, self.config.train.sample_tokens
        return tokenizer.decode(prompt + generate(self.model, prompt, tokens, context))

    def _metrics(self, loss: float, rate: float, norm: float, seconds: float) -> dict:
        tokens_per_s = self._tokens_per_step() / seconds
        tflops = tokens_per_s * self.flops_per_token / self.mesh.world / 1e12
        return (
            {
                "step": self.done,
                "loss": loss,
                "lr": rate,
                "grad_norm": norm,
                "tokens_per_s": tokens_per_s,
                "tflops_per_gpu": tflops,
                "mfu": tflops / self.peak_tflops,
                "mem_gib": ranks.peak_memory(self.device),
                "batch_id": self.loader.batch_id,
            }
            | self._of_skipping()
            | self._of_sources()
        )

    def _of_skipping(self) -> dict:
        """What float16, and steps that were skipped, add to a step's metrics."""
        skipped = {"skipped": self._skipped()} if self.scaler or self._skipped() else {}
        return skipped | ({"loss_scale": self.scaler.loss_scale} if self.scaler else {})

    def _of_sources(self) -> dict:
        """What a blend adds to a step's metrics: how often each source has been read."""
        return {"epochs": self.loader.epochs} if self.config.data.sources else {}

    def _skipped(self) -> int:
        """Steps that have not changed the model."""
        return self.bad_steps.skipped + (self.scaler.skipped if self.scaler else 0)

    def _end_early(self, metrics: dict) -> None:
        """Save what is done, and raise Interrupted."""
        self.reporter.step(metrics)
        self._save_data_state()
        self._save()
        where = self.keeper.finish()
        raise Interrupted(
            f"told to end after step {self.done}: saved in {where}; the same command goes on there"
        )

    def _save(self) -> None:
        self.watch.at(f"saving the checkpoint of step {self.done}")
        self.keeper.save(self.done)

    def _at(self, what: str) -> None:
        """Say what this rank does next in its step; the first takes long, for much is prepared."""
        patience = FIRST_STEP if self.done == self.first_step else 1.0
        self.watch.at(f"step {self.done + 1}, {what}", patience)

    def _tokens_per_step(self) -> int:
        return self.loader.samples_per_step * self.config.sequence_length

    def _introduce(self, last: int) -> None:
        say = self.reporter.say
        say(str(self.mesh))
        say(f"{self.config.model.name}: {self.parameters:,} parameters")
        say(f"{self.dataset}")
        self.reporter.begin(last, self._tokens_per_step(), ranks.hosts(self.device))
        if self.keeper.saved:
            say(f"goes on after step {self.first_step}, from {self.keeper.folder}")
        elif self.first_step:
            say(f"data continues after step {self.first_step}; the model starts from its beginning")
        if self.reporter.active:
            text = schema.to_toml(self.config)
            Path(self.config.run.folder, "config.toml").write_text(text, encoding="utf-8")

    def _save_data_state(self) -> None:
        """After every step, so that a killed run can go on with the batches it had not seen."""
        if self.reporter.active:
            write_state(Path(self.config.run.folder), self.done, self.loader)

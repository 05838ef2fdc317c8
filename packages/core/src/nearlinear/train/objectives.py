"""Batches of other objectives: masked tokens, spans for encoder-decoders, and filling in.

The noise of a sequence is drawn from a generator of its own, whose seed derives from the data's
seed, the first sample of the step, and the sequence's number. It therefore depends neither on the
layout nor on an interruption of the run.

Special tokens are looked up in the data's tokenizer. Where it has none, ids after its vocabulary
are used, and the model gets an embedding for them.

Sources: BERT (Devlin et al. 2019) by transformers' ``DataCollatorForLanguageModeling``; span
corruption of T5 (Raffel et al. 2020, section 3.1.4), for which transformers has no collator; and
filling in the middle (Bavarian et al. 2022, arXiv:2207.14255), with the cuts between tokens.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..checkpoint.hf.meta_model import import_transformers
from ..config.train import DataConfig, TrainConfig
from ..data.dataset import TokenDataset
from ..data.masking import IGNORED_LABEL
from ..data.mixture import Mixture
from ..errors import ConfigError
from .preference import PairLabels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MASK_TOKENS = ("[MASK]", "<mask>")
SENTINEL = "<extra_id_{}>"
SENTINELS = 100
"""Sentinels of T5's vocabulary; more are used only for longer sequences."""
FIM_TOKENS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),
)
"""Tokens before prefix, middle and suffix of StarCoder, Qwen, SantaCoder, Code Llama, DeepSeek."""

Batch = dict[str, torch.Tensor]


class Objective(Protocol):
    """Changes the batches of a loader to those of another objective."""

    identity: str
    """Name and settings, part of the loader's state."""
    vocabulary: int
    """Number of ids that the model needs."""
    in_evaluation: bool
    """False if held-out sequences are left as they are."""

    def __call__(self, batch: Batch, windows: list[int], seeds: list[int]) -> Batch:
        """Return the changed batch; a window of the dataset and a seed per sequence."""
        ...


def build_objective(config: TrainConfig, dataset: TokenDataset | Mixture) -> Objective | None:
    """Return the objective of the config's model, or None for the next token.

    Raises ConfigError if a setting of the table [data] does not apply.
    """
    kind, data = config.model.trained_objective, config.data
    if isinstance(dataset, TokenDataset) and dataset.pairs:
        return PairLabels(dataset.manifest.vocab_size)
    if kind == "causal":
        return _fill_in(data, dataset) if data.fim_rate else None
    if data.fim_rate:
        raise ConfigError(
            f"data.fim_rate = {data.fim_rate}: models of model.objective = {kind!r} see both sides "
            "of every token; set it to 0"
        )
    for key in ("document_mask", "mask_eos"):
        if getattr(data, key):
            raise ConfigError(
                f"data.{key} = true: model.objective = {kind!r} selects the targets itself, and "
                "its models attend in both directions; set it to false"
            )
    file, vocabulary = dataset.tokenizer(), dataset.manifest.vocab_size
    pads = data.packing != "concat"
    if kind == "masked":
        return MaskedTokens(file, vocabulary, data.noise_density, pads)
    spans = (config.sequence_length, data.noise_density, data.mean_noise_span)
    return SpanCorruption(file, vocabulary, dataset.manifest.eos_id, *spans, pads)


def _fill_in(data: DataConfig, dataset: TokenDataset | Mixture) -> FillInTheMiddle:
    if dataset.marks_targets:
        raise ConfigError(
            f"data.fim_rate = {data.fim_rate}: the data contain conversations, of which only some "
            "tokens are targets; set it to 0"
        )
    known = _read_tokenizer(dataset.tokenizer()).get_vocab()
    names = (tuple(data.fim_tokens),) if data.fim_tokens else FIM_TOKENS
    for each in names:
        if all(name in known for name in each):
            ids = [known[name] for name in each]
            return FillInTheMiddle(
                ids, data.fim_rate, data.fim_spm_rate, dataset.manifest.eos_id,
                dataset.manifest.vocab_size,
            )  # fmt: skip
    raise ConfigError(
        f"data.fim_rate = {data.fim_rate}: the data's tokenizer lacks the tokens "
        f"{' or '.join(', '.join(each) for each in names)}. Add three such tokens to it, prepare "
        "the data with it, and name them in data.fim_tokens"
    )


def _read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    return import_transformers().PreTrainedTokenizerFast(tokenizer_file=str(file))


class MaskedTokens:
    """Masked language modeling: 15 % of the tokens are targets, and most of them are masked."""

    in_evaluation = True

    def __init__(self, tokenizer: Path, vocabulary: int, density: float, pads: bool):
        """
        Args:
            tokenizer: File of the tokenizer.
            vocabulary: Number of ids in the data.
            density: Share of the tokens that are targets.
            pads: True if sequences may be padded, so that batches need an attention mask.
        """
        words = _read_tokenizer(tokenizer)
        known = [token for token in MASK_TOKENS if token in words.get_vocab()]
        words.add_special_tokens({"mask_token": (known or MASK_TOKENS)[0]})
        self.identity = f"masked {density:g}"
        self.vocabulary = max(vocabulary, len(words))
        self.special = torch.tensor(sorted(words.all_special_ids))
        self.pads = pads
        collator = import_transformers().DataCollatorForLanguageModeling
        self.collator = collator(words, mlm_probability=density)

    def __call__(self, batch: Batch, windows: list[int], seeds: list[int]) -> Batch:
        ids, padding = batch["input_ids"], batch["labels"] == IGNORED_LABEL
        excluded = torch.isin(ids, self.special) | padding
        inputs, labels = torch.empty_like(ids), torch.empty_like(ids)
        for row, seed in enumerate(seeds):
            self.collator.generator = torch.Generator().manual_seed(seed)
            inputs[row], labels[row] = self.collator.torch_mask_tokens(
                ids[row].clone(), special_tokens_mask=excluded[row]
            )
        changed = {"input_ids": inputs, "labels": labels}
        return changed | ({"attention_mask": (~padding).long()} if self.pads else {})


class SpanCorruption:
    """Spans of the input are replaced by sentinels; the targets are sentinels and the spans.

    All batches have the shapes of full sequences. Inputs and targets end with EOS.
    """

    in_evaluation = True

    def __init__(
        self,
        tokenizer: Path,
        vocabulary: int,
        eos: int,
        length: int,
        density: float,
        mean_span: float,
        pads: bool,
    ):
        """
        Args:
            tokenizer: File of the tokenizer.
            vocabulary: Number of ids in the data.
            eos: Id that ends inputs and targets.
            length: Tokens per sequence.
            density: Share of the tokens in spans.
            mean_span: Mean length of a span.
            pads: True if sequences may be padded, so that batches need an attention mask.
        """
        if length < 2:
            raise ConfigError(f"data.sequence_length = {length}: span corruption needs at least 2")
        self.density, self.mean_span, self.eos, self.pads = density, mean_span, eos, pads
        noise, spans = self.counts(length)
        self.shape = length - noise + spans + 1, noise + spans + 1
        """Tokens of inputs and of targets."""
        known = _read_tokenizer(tokenizer).get_vocab()
        count = max(spans, SENTINELS)
        ids = [known.get(SENTINEL.format(number)) for number in range(count)]
        found = [number for number in ids if number is not None]
        self.sentinels = found if len(found) == count else [vocabulary + i for i in range(count)]
        self.vocabulary = max(vocabulary, 1 + max(self.sentinels))
        self.identity = f"span_corruption {density:g} {mean_span:g}"

    def counts(self, length: int) -> tuple[int, int]:
        """Return the numbers of noise tokens and of spans in ``length`` tokens."""
        noise = min(max(round(length * self.density), 1), length - 1)
        spans = min(max(round(noise / self.mean_span), 1), noise, length - noise)
        return noise, spans

    def __call__(self, batch: Batch, windows: list[int], seeds: list[int]) -> Batch:
        rows, (inputs, targets) = len(seeds), self.shape
        found = {
            "input_ids": torch.full((rows, inputs), 0),
            "attention_mask": torch.zeros((rows, inputs), dtype=torch.long),
            "labels": torch.full((rows, targets), IGNORED_LABEL),
        }
        for row, seed in enumerate(seeds):
            tokens = batch["input_ids"][row][batch["labels"][row] != IGNORED_LABEL].numpy()
            given, wanted = self.corrupt(tokens, np.random.default_rng(seed))
            found["input_ids"][row, : len(given)] = torch.from_numpy(given)
            found["attention_mask"][row, : len(given)] = 1
            found["labels"][row, : len(wanted)] = torch.from_numpy(wanted)
        if not self.pads:
            del found["attention_mask"]
        return found

    def corrupt(
        self, tokens: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of one sequence; without targets if it is too short."""
        if len(tokens) < 2:
            return np.append(tokens, self.eos), tokens[:0]
        noise, spans = self.counts(len(tokens))
        kept = _random_lengths(len(tokens) - noise, spans, generator)
        dropped = _random_lengths(noise, spans, generator)
        inputs, targets, begin = [], [], 0
        for sentinel, before, inside in zip(self.sentinels, kept, dropped, strict=False):
            middle, end = begin + before, begin + before + inside
            inputs += [tokens[begin:middle], [sentinel]]
            targets += [[sentinel], tokens[middle:end]]
            begin = end
        return np.concatenate([*inputs, [self.eos]]), np.concatenate([*targets, [self.eos]])


def _random_lengths(total: int, parts: int, generator: np.random.Generator) -> list[int]:
    """Return ``parts`` lengths of at least 1 that add up to ``total``, all equally likely."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff([0, *cuts, total]).tolist()


class FillInTheMiddle:
    """Some documents are cut in three, and the middle is moved to the end.

    A document becomes ``PRE prefix SUF suffix MID middle``, or ``PRE SUF suffix MID prefix middle``
    (PSM and SPM). Its last three tokens make room for the three new ones, so that all documents
    keep their places. Targets are excluded by place: padding, the first token of a document with
    `data.document_mask`, and its end with `data.mask_eos`. A document that a sequence cuts is
    rearranged as far as it reaches.
    """

    in_evaluation = False

    def __init__(self, ids: list[int], rate: float, spm_rate: float, eos: int, vocabulary: int):
        """
        Args:
            ids: Tokens before prefix, middle and suffix.
            rate: Share of the documents that are rearranged.
            spm_rate: Share of these that begin with the suffix.
            eos: Id that ends a document.
            vocabulary: Number of ids in the data.
        """
        self.rate, self.spm_rate, self.eos = rate, spm_rate, eos
        self.vocabulary = max(vocabulary, 1 + max(ids))
        self.prefix, self.middle, self.suffix = ([token] for token in ids)
        self.identity = f"fill in the middle {rate:g} {spm_rate:g} {ids}"

    def __call__(self, batch: Batch, windows: list[int], seeds: list[int]) -> Batch:
        ids, targets = batch["input_ids"].clone(), batch["labels"] != IGNORED_LABEL
        starts = batch.get("position_ids", torch.ones_like(ids)) == 0
        for row, seed in enumerate(seeds):
            generator, tokens = np.random.default_rng(seed), ids[row].numpy()
            ends = np.flatnonzero(tokens == self.eos)
            begins = {0, *(ends + 1).tolist(), *np.flatnonzero(starts[row].numpy()).tolist()}
            for begin, end in itertools.pairwise(sorted(begins | {len(tokens)})):
                end -= bool(end > begin and tokens[end - 1] == self.eos)
                if generator.random() < self.rate and end - begin > 3:
                    tokens[begin:end] = self.rearrange(tokens[begin : end - 3], generator)
        return batch | {"input_ids": ids, "labels": torch.where(targets, ids, IGNORED_LABEL)}

    def rearrange(self, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Cut ``tokens`` at two random places, and return them with three more tokens."""
        first, second = sorted(generator.integers(0, len(tokens) + 1, 2).tolist())
        prefix, middle, suffix = tokens[:first], tokens[first:second], tokens[second:]
        if generator.random() < self.spm_rate:
            parts = [self.prefix, self.suffix, suffix, self.middle, prefix, middle]
        else:
            parts = [self.prefix, prefix, self.suffix, suffix, self.middle, middle]
        return np.concatenate(parts)

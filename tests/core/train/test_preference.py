"""Direct preference optimization: an independent computation, layouts, resumption, refusals."""

import json
import pickle

import numpy as np
import pytest
import torch
import transformers

import nearlinear as nl
from data_prep import prepare, sources
from nearlinear.data.masking import IGNORED_LABEL, Masks, make_batch
from nearlinear.distributed import runtime
from nearlinear.errors import CheckpointError, ConfigError, DataError
from nearlinear.train import preference
from tests.support import parity
from tests.support.chats import conversation, write_tokenizer

BETA = 0.5


def pair(number: int) -> dict:
    """Return a question, its right answer and a wrong one of another length."""
    talk = conversation(number, turns=1 + number % 2)
    wrong = {"role": "assistant", "content": f"Maybe {number * 7}" + ", or less" * (number % 3)}
    return {"prompt": talk[:-1], "chosen": talk[-1:], "rejected": [wrong]}


PAIRS = [pair(number) for number in range(40)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Folder with a tokenizer and the token shards of pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    write_tokenizer(folder / "tokenizer")
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in PAIRS))
    prepare(sources.preference([file]), folder / "tokens", tokenizer=str(folder / "tokenizer"),
            val_fraction=0.3, progress=False)  # fmt: skip
    return folder


@pytest.fixture
def run(small_run, pairs, tmp_path):
    small_run["model"] = {
        "preset": "llama-tiny",
        "overrides": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48},
    }
    small_run["data"] = {
        "path": str(pairs / "tokens"),
        "sequence_length": 256,
        "packing": "best_fit",
        "document_mask": True,
        "cache": str(tmp_path / "cache"),
    }
    small_run["preference"] = {"beta": BETA}
    small_run["batch"] = {"micro_batch_size": 4}
    small_run["optimizer"] = {"lr": 1e-2, "warmup_steps": 0}
    small_run["train"] |= {"steps": 4, "eval_sequences": 64, "sample_tokens": 0}
    return small_run


def log_probability(model, words, prompt: list, answer: list) -> torch.Tensor:
    """Return the log probability of an answer with EOS, of the conversation alone."""
    shown = [words.apply_chat_template(talk, tokenize=False) for talk in (prompt, prompt + answer)]
    start, ids = (words(text, add_special_tokens=False)["input_ids"] for text in shown)
    ids = torch.tensor([[*ids, words.eos_token_id]])
    found = model(ids).logits[0, :-1].double().log_softmax(-1)
    return found.gather(-1, ids[0, 1:, None])[len(start) - 1 :].sum()


def whole_model(trainer):
    model = transformers.AutoModelForCausalLM.from_config(trainer.model.config)
    model.load_state_dict(parity.whole(trainer.model, torch.Tensor.detach), strict=False)
    return model.eval()


def held_out_pairs(trainer) -> list[dict]:
    dataset = nl.data.TokenDataset(
        trainer.held_out.path, "val", sequence_length=512, packing="one_document",
        cache=trainer.config.data.cache,
    )  # fmt: skip
    words = transformers.AutoTokenizer.from_pretrained(dataset.tokenizer().parent)
    texts = words.batch_decode(dataset.windows(range(len(dataset))))
    found = [
        each
        for each in PAIRS
        if any(each["chosen"][0]["content"] in t and each["rejected"][0]["content"] in t
               for t in texts)
    ]  # fmt: skip
    assert len(found) == len(dataset) > 5
    return found


def losses(rank: int, config: dict) -> list[float]:
    trainer = nl.Trainer(config)
    steps = [trainer.step() for _ in range(4)]
    found = [step[name] for step in steps for name in ("loss", "reward_margin")]
    # in the first step, rewards are 0 up to rounding
    return [*found, *(step["reward_accuracy"] for step in steps[1:]), trainer.evaluate()]


@pytest.fixture(scope="module")
def expected():
    """Results of one process, computed once per module."""
    return {}


@pytest.fixture
def one_process(run, expected):
    if not expected:
        expected["found"] = losses(0, run)
        runtime.shutdown()
    return expected["found"]


def test_loss_is_that_of_each_conversation_alone(run, pairs):
    """The held-out loss before and after training, from transformers and the formula of DPO."""
    trainer = nl.Trainer(run)
    assert trainer.evaluate() == pytest.approx(np.log(2), abs=1e-6)
    start = whole_model(trainer)
    for _ in range(4):
        metrics = trainer.step()
    assert metrics["reward_accuracy"] > 0.8 and metrics["reward_margin"] > 0.05
    now, found = whole_model(trainer), trainer.evaluate()
    words = transformers.AutoTokenizer.from_pretrained(pairs / "tokenizer")
    all_losses = []
    with torch.no_grad():
        for each in held_out_pairs(trainer):
            chosen, rejected = (
                [
                    log_probability(model, words, each["prompt"], each[name])
                    for model in (now, start)
                ]
                for name in ("chosen", "rejected")
            )
            reward = BETA * ((chosen[0] - rejected[0]) - (chosen[1] - rejected[1]))
            all_losses.append(-torch.nn.functional.logsigmoid(reward).item())
    assert found == pytest.approx(np.mean(all_losses), abs=1e-5)
    assert found < 0.65


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "parallel"),
    [
        (4, 1, {"hybrid_shard_degree": 2}),
        (4, 2, {"tensor_parallel_degree": 2}),
        (4, 2, {"context_parallel_degree": 2}),
        (4, 2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (4, 4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 4}),
    ],
    ids=str,
)
def test_layouts_equal_one_process(run, one_process, ranks, micro_batch, parallel):
    run["batch"] = {"micro_batch_size": micro_batch}
    run["parallel"] = parallel
    for found in nl.spmd.run(losses, ranks=ranks, args=(run,)):
        assert found == pytest.approx(one_process, abs=2e-4)


def test_expert_ranks_equal_one_process(run):
    run["model"] = {"preset": "mixtral-tiny"}
    expected = losses(0, run)
    runtime.shutdown()
    run["batch"], run["parallel"] = {"micro_batch_size": 2}, {"expert_parallel_degree": 2}
    for found in nl.spmd.run(losses, ranks=2, args=(run,)):
        assert found == pytest.approx(expected, abs=2e-4)


def test_resumed_run_keeps_its_references(run, one_process, tmp_path):
    """The references are those of the first start, not of the model that goes on."""
    run["checkpoint"] = {"folder": str(tmp_path / "checkpoints"), "every": 2}
    run["train"] |= {"stop_after": 2, "eval_sequences": 0}
    nl.Trainer(run).fit()
    runtime.shutdown()
    run["train"]["stop_after"] = 0
    trainer = nl.Trainer(run)
    found = [trainer.step()["loss"] for _ in range(2)]
    assert found == pytest.approx([one_process[4], one_process[6]], abs=1e-6)
    runtime.shutdown()
    file = next(tmp_path.rglob(preference.REFERENCE_FILE))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        nl.Trainer(run)
    runtime.shutdown()
    file.unlink()
    with pytest.raises(CheckpointError, match="start a new run"):
        nl.Trainer(run)


def test_labels_carry_documents_and_references(pairs, tmp_path):
    dataset = nl.data.TokenDataset(
        pairs / "tokens", sequence_length=256, packing="best_fit", cache=tmp_path
    )
    windows = list(range(len(dataset)))
    batch = make_batch(dataset, np.array(windows), Masks(documents=True))
    labels = batch["labels"]
    counts = [int((row == 0).sum()) // 2 for row in batch["position_ids"]]
    values = np.random.default_rng(0).normal(0, 30, sum(counts)).astype(np.float32)
    objective = preference.PairLabels(dataset.manifest.vocab_size)
    objective.references = preference.References(values, np.cumsum(counts))
    full = objective(dict(batch), windows, [])["labels"]
    loss = preference.PreferenceLoss(BETA)
    assert torch.equal(loss.token_ids(full), labels)
    for row, window in enumerate(windows):
        inside = labels[row] != IGNORED_LABEL
        documents = preference.documents_of(full)[row][inside]
        own = objective.references.of(window)
        assert torch.equal(
            preference.references_of(full)[row][inside], torch.from_numpy(own)[documents // 2]
        )
    whole = loss.target_rule.count({"labels": full})
    assert whole == len(dataset.document_lengths()) == sum(counts)
    lone = torch.where(preference.documents_of(full) == 1, IGNORED_LABEL, full)
    assert loss.target_rule.count({"labels": lone}) == whole - len(windows)


def test_padding_and_missing_pairs_do_not_count(run):
    """Ranks with rows past the end of the data: more ranks than held-out sequences."""
    run["batch"] = {"micro_batch_size": 16}
    trainer = nl.Trainer(run)
    assert trainer.evaluate() == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("data", "document_mask", False, "must not see each other"),
        ("data", "packing", "concat", "would cut"),
        ("data", "sequence_length", 24, "are longer than a sequence"),
        ("data", "fim_rate", 0.5, "cannot be rearranged"),
        ("preference", "beta", 0.0, "preference.beta"),
    ],
)
def test_refused_settings(run, table, key, value, message):
    run[table][key] = value
    with pytest.raises((ConfigError, DataError), match=message):
        nl.Trainer(run)


@pytest.mark.parametrize("packing", ["best_fit", "one_document"])
def test_long_pairs_are_left_out_with_a_warning(run, pairs, tmp_path, caplog, packing):
    """Every other pair is in one sequence, whole."""
    options = {"packing": packing, "cache": tmp_path}
    whole = nl.data.TokenDataset(pairs / "tokens", sequence_length=256, **options)
    lengths = whole.document_lengths()
    limit = int(np.median(lengths))
    options["skip_long_pairs"] = True
    dataset = nl.data.TokenDataset(pairs / "tokens", sequence_length=limit, **options)
    long = int((lengths > limit).sum())
    assert f"{long} of {len(lengths)} pairs" in caplog.text and 0 < long < len(lengths)
    dataset = pickle.loads(pickle.dumps(dataset))  # keeps the setting
    found = []
    for ids in nl.data.TokenDataset.windows(dataset, range(len(dataset))):
        found += bytes_of_documents(ids, whole.manifest.eos_id)
    everyones = []
    for ids in whole.windows(range(len(whole))):
        everyones += bytes_of_documents(ids, whole.manifest.eos_id)
    kept = [each for each in everyones if len(each) // 8 <= limit]
    assert sorted(found) == sorted(kept) and len(kept) == len(lengths) - long
    run["data"] |= {"sequence_length": limit, "packing": packing}
    run["preference"]["skip_long"] = True
    assert nl.Trainer(run).step()["loss"] == pytest.approx(np.log(2), abs=1e-6)
    with pytest.raises(DataError, match="are longer than"):
        nl.data.TokenDataset(pairs / "tokens", sequence_length=4, **options)


def bytes_of_documents(ids: np.ndarray, eos: int) -> list[bytes]:
    """Return the pairs in a sequence: each has two conversations that end with EOS."""
    ends = np.flatnonzero(ids == eos) + 1
    starts = [0, *ends[1::2].tolist()]
    pairs = [ids[start:end] for start, end in zip(starts, ends[1::2].tolist(), strict=False)]
    return [each.tobytes() for each in pairs if (each != eos).any()]


def test_own_loops_cannot_train_on_rejected_answers(pairs, tmp_path):
    dataset = nl.data.TokenDataset(
        pairs / "tokens", sequence_length=256, packing="best_fit", cache=tmp_path
    )
    with pytest.raises(DataError, match="would teach both"):
        nl.data.Loader(dataset, 1)


def test_pairs_are_not_mixed(run, pairs):
    run["data"]["sources"] = {run["data"].pop("path"): 1.0}
    with pytest.raises(DataError, match="cannot be mixed"):
        nl.Trainer(run)

"""Hugging Face's Trainer with a sharded model: losses, communication, checkpoints."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.integrations.hugging_face import ShardedTrainerMixin, Trainer
from tests.core.integrations.hosts import Tokens, documented, loaded, model

STEPS = 20
counts_targets = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="Trainer of transformers 4 divides by the number of labels, not of targets",
)


def arguments(folder, **options):
    given = dict(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=STEPS,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
        max_grad_norm=0.5, logging_steps=1, save_strategy="no", seed=1,
    )  # fmt: skip
    return transformers.TrainingArguments(**(given | options))


def trainer(kind, given, sharding=None):
    extra = {"sharding": sharding} if issubclass(kind, ShardedTrainerMixin) else {}
    return kind(model(), given, train_dataset=Tokens(), eval_dataset=Tokens(), **extra)


def history(host):
    logs = [[log.get(key) for key in ("loss", "grad_norm")] for log in host.state.log_history]
    return [log for log in logs if log[0] is not None]


def collectives(folder, sync_each_batch):
    """Count the collectives of two steps of two micro-batches."""
    kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": sync_each_batch}}
    given = arguments(folder, max_steps=2, accelerator_config=kwargs)
    host = trainer(Trainer, given, {"hybrid_shard_degree": 1, "gradient_reduction": "micro_batch"})
    with count_collectives() as counts:
        host.train()
    return counts.calls["all_reduce"]


def refusals(folder):
    """Return the reasons for refusing arguments."""
    found = {}
    for name, value in {
        "fsdp": "full_shard", "torch_compile": True, "auto_find_batch_size": True,
        "bf16_full_eval": True,
    }.items():  # fmt: skip
        environment = dict(os.environ)  # some arguments of 4.57 set variables
        with pytest.raises(nl.errors.ConfigError) as caught:
            trainer(Trainer, arguments(folder, **{name: value}))
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        found[name] = str(caught.value)
    with pytest.raises(nl.errors.ConfigError) as caught:
        trainer(Trainer, arguments(folder), {"tensor_parallel_degree": 2})
    return found | {"tensor": str(caught.value)}


def documented_losses(script):
    variables = {"model": model(), "dataset": Tokens()}
    exec(script, variables)
    return history(variables["trainer"])


def sft_trainers():
    """Return TRL's trainer alone, and sharded."""
    from trl import SFTTrainer

    return SFTTrainer, type("ShardedSFTTrainer", (ShardedTrainerMixin, SFTTrainer), {})


def fine_tuned(kind):
    """Train on prompts and completions of different lengths."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)} | {"end": 90}, "end"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="end", eos_token="end"
    )
    rows = [
        {"prompt": f"w{i} w1 w2", "completion": " " + " ".join(f"w{j}" for j in range(1 + i % 5))}
        for i in range(16)
    ]
    given = SFTConfig(
        "sft", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_steps=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        save_strategy="no", max_length=16,
    )  # fmt: skip
    host = kind(model(), given, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    host.train()
    return history(host)


def work(rank, folder):
    result = {}
    alone = trainer(transformers.Trainer, arguments(folder))
    alone.train()
    result["alone"], result["evaluated_alone"] = history(alone), alone.evaluate()["eval_loss"]
    saving = {
        "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "eval_strategy": "steps",
        "eval_steps": 2, "load_best_model_at_end": True,
    }  # fmt: skip
    host = trainer(Trainer, arguments(folder), {"hybrid_shard_degree": 2})
    host.evaluate()  # sharded before it is trained
    host.train()
    result["sharded"], result["evaluated"] = history(host), host.evaluate()["eval_loss"]
    short = {"max_steps": 4, "lr_scheduler_type": "constant"}
    whole = trainer(Trainer, arguments(folder / "run", **saving, **short))
    whole.train()
    resumed = trainer(
        Trainer, arguments(folder / "run", **saving, **short), {"hybrid_shard_degree": 1}
    )
    resumed.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    result["whole"], result["resumed"] = history(whole), history(resumed)
    best = whole.accelerator.get_state_dict(whole.model)
    if rank == 0:
        saved = transformers.AutoModelForCausalLM.from_pretrained(whole.state.best_model_checkpoint)
        for name, value in saved.state_dict().items():
            assert torch.equal(best[name], value), name
    given = arguments(folder, max_steps=2, label_smoothing_factor=0.1)
    result["smoothed"] = []
    for kind in (transformers.Trainer, Trainer):
        host = trainer(kind, given)
        host.train()
        result["smoothed"].append([history(host), host.evaluate()["eval_loss"]])
    result["collectives"] = [collectives(folder, each) for each in (False, True)]
    result["refusals"] = refusals(folder)
    os.chdir(folder)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if importlib.util.find_spec("trl"):
        result["fine_tuned"] = [fine_tuned(kind) for kind in sft_trainers()]
    result["documented"] = [documented_losses(script) for script in documented("hugging_face")]
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    return folder, nl.spmd.run(work, 2, args=(folder,), processes=True)[0]


@counts_targets
def test_losses_equal_those_of_the_host_alone(found):
    _, result = found
    assert len(result["sharded"]) == STEPS
    torch.testing.assert_close(result["sharded"], result["alone"], atol=1e-5, rtol=0)
    assert result["evaluated"] == pytest.approx(result["evaluated_alone"], abs=1e-5)


@counts_targets
def test_label_smoothing_equals_that_of_the_host_alone(found):
    alone, sharded = found[1]["smoothed"]
    torch.testing.assert_close(sharded, alone, atol=1e-5, rtol=0)


def test_run_resumes_on_another_layout(found):
    _, result = found
    torch.testing.assert_close(result["resumed"], result["whole"], atol=1e-5, rtol=0)


def test_load_reads_a_checkpoint_on_another_layout(found):
    folder = Path(found[0]) / "run" / "checkpoint-4"
    expected = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    for values in nl.spmd.run(loaded, 4, args=(folder / "nearlinear", 4, 2)):
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name


def test_replicas_synchronize_once_per_step(found):
    units, agreement, norm = 3, 2, 1
    once, every = found[1]["collectives"]
    assert once == 2 * (units + agreement + norm)
    assert every == 2 * (2 * units + agreement + norm)


def test_arguments_that_change_results_are_refused(found):
    reasons = found[1]["refusals"]
    assert "would shard the model, too" in reasons["fsdp"]
    assert "nl.compile_blocks" in reasons["torch_compile"]
    assert "another attempt" in reasons["auto_find_batch_size"]
    assert "convert the shards" in reasons["bf16_full_eval"]
    assert "tensor_parallel_degree = 2 inside accelerate" in reasons["tensor"]


@counts_targets
def test_documented_script_trains_as_the_host_alone(found):
    alone, sharded = found[1]["documented"]
    assert len(alone) == 2
    torch.testing.assert_close(sharded, alone, atol=1e-5, rtol=0)


def test_sft_trainer_trains_as_the_host_alone(found):
    pytest.importorskip("trl")
    alone, sharded = found[1]["fine_tuned"]
    torch.testing.assert_close(sharded, alone, atol=1e-5, rtol=0)

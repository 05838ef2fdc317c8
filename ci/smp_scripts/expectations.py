"""Expected results of public scripts for SMP v1, with tiny models on CPU ranks.

Source of the scripts: amazon-sagemaker-examples, training/distributed_training/pytorch/
model_parallel/gpt2. Data are those that the script's data pipeline reads.
"""

from __future__ import annotations

from dataclasses import dataclass

TINY = (
    "--max_steps 6 --train_batch_size 4 --val_batch_size 4 --max_context_width 32 --num_layers 4 "
    "--hidden_width 32 --num_heads 4 --resid_pdrop 0 --embd_pdrop 0 --attn_pdrop 0 "
    "--summary_first_pdrop 0 --lr 1e-3 --activation_checkpointing 0"
)
FINISHED = "SMP training finished successfully"


@dataclass(frozen=True)
class Expectation:
    """One run of a script."""

    name: str
    script: str
    """File name, anywhere in the folder of scripts."""
    ranks: int
    arguments: str
    parameters: str = "{}"
    """JSON in SM_HP_MP_PARAMETERS, as a launcher sets it."""
    says: str = FINISHED
    """Text in the output."""
    losses_of: str = ""
    """Name of an earlier run with the same losses."""
    tolerance: float = 1e-5
    after: str = ""
    """Name of an earlier run whose checkpoints this one resumes from."""


def _gpt2(name: str, ranks: int, arguments: str = "", **more) -> Expectation:
    return Expectation(name, "train_gpt_simple.py", ranks, f"{TINY} {arguments}", **more)


SHARDED = (
    "--sharded_data_parallel_degree 2 --delayed_param 1 --offload_activations 1 "
    "--activation_checkpointing 1"
)

EXPECTATIONS = [
    _gpt2("plain", 1),
    _gpt2("distributed transformer", 1, "--use_distributed_transformer 1", losses_of="plain"),
    _gpt2(
        "tensor parallel", 2, "--use_distributed_transformer 1", losses_of="plain",
        parameters='{"tensor_parallel_degree": 2, "prescaled_batch": true}',
    ),
    _gpt2("micro-batches", 1, losses_of="plain", parameters='{"microbatches": 2}'),
    _gpt2(
        "pipeline", 2, losses_of="plain",
        parameters='{"pipeline_parallel_degree": 2, "microbatches": 4}',
    ),
    _gpt2("gradient accumulation", 1, "--gradient_accumulation 2"),
    _gpt2("fp16", 1, "--fp16 1", losses_of="plain", tolerance=1e-2),
    _gpt2("sharded", 4, SHARDED),
    _gpt2("sharded, saving", 2, f"{SHARDED} --bf16 1 --checkpoint_freq 3"),
    _gpt2(
        "sharded, resuming", 2, f"{SHARDED} --bf16 1 --max_steps 8 --load_partial 1",
        after="sharded, saving",
    ),
    _gpt2("full model", 1, "--save_final_full_model 1", losses_of="plain"),
]  # fmt: skip

"""The compared jobs. Together they set every field of a `JobSpec`."""

from nearlinear.config.train import TrainConfig
from nearlinear.launch import spec
from nearlinear.launch.spec import JobSpec

ACCOUNT, REGION, BUCKET = "123456789012", "us-west-2", "my-bucket"
VPC = {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]}
USUAL = {
    "place": "sagemaker",
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/nearlinear:2.13-cuda13",
    "role": f"arn:aws:iam::{ACCOUNT}:role/nearlinear",
    "region": REGION,
    "output": f"s3://{BUCKET}/jobs",
}
# A hyperparameter of each JSON type, and strings that look like other types.
EVERY_TYPE = {
    "model": {
        "preset": "gpt2-30b",
        "overrides": {"n_layer": 2, "resid_pdrop": 0.1, "pad_token_id": None, "task": ["a", 1]},
    },
    "data": {"resume": "7", "sequence_length": 2048},
    "optimizer": {"lr": 2e-4, "beta1": 1e-9},
    "train": {"two_hop": False, "steps": 100, "sample_prompt": 'He said: "true"'},
    "run": {"folder": "null"},
}
JOBS = {
    "32 nodes on FSx": EVERY_TYPE
    | {
        "parallel": {"hybrid_shard_degree": 128, "bf16": True, "sm_activation_offloading": True},
        "job": USUAL
        | VPC
        | {
            "name": "gpt2-30b",
            "instance_type": "ml.p4d.24xlarge",
            "nodes": 32,
            "ranks_per_node": 8,
            "inputs": {
                "train": {"fsx": "fs-0123456789abcdef0", "directory": "/abcdefgh/train"},
                "notes": {"efs": "fs-01234567", "directory": "/notes", "writable": True},
                "val": {"s3": f"s3://{BUCKET}/val"},
            },
            "checkpoints": f"s3://{BUCKET}/checkpoints",
            "checkpoint_path": "/opt/ml/kept",
            "environment": {"NCCL_DEBUG": "WARN"},
            "volume_gb": 500,
            "max_hours": 36.5,
            "keep_warm_minutes": 30,
            "retries": 2,
            "tags": {"team": "models", "cost centre": "7"},
        },
    },
    "spot, copied and sharded input": {
        "model": {"preset": "gpt2-small"},
        "job": USUAL
        | {
            "name": "spot",
            "instance_type": "ml.g5.48xlarge",
            "nodes": 2,
            "inputs": {
                "train": {"s3": f"s3://{BUCKET}/train", "mode": "File", "sharded": True},
                "extra": {"s3": f"s3://{BUCKET}/extra", "mode": "Pipe"},
            },
            "checkpoints": f"s3://{BUCKET}/checkpoints",
            "spot": True,
            "max_hours": 10,
            "max_wait_hours": 30,
        },
    },
    "required fields only": {
        "job": USUAL | {"name": "least", "instance_type": "ml.g5.xlarge"},
    },
    "small job": {
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 2, "n_embd": 32, "n_head": 2}},
        "data": {"sequence_length": 32},
        "batch": {"micro_batch_size": 2},
        "parallel": {"hybrid_shard_degree": 2},
        "train": {"steps": 3, "eval_every": 0, "eval_sequences": 0, "sample_tokens": 0},
        "run": {"tensorboard": False},
        "job": USUAL
        | {
            "name": "small",
            "instance_type": "ml.m5.large",
            "ranks_per_node": 2,
            "inputs": {"train": {"s3": f"s3://{BUCKET}/tokens"}},
        },
    },
}
SMALL = "small job"  # also run locally, by the SDK's driver
WITH_CODE = ("32 nodes on FSx", "spot, copied and sharded input", SMALL)


def read(name: str, source: str) -> tuple[JobSpec, TrainConfig]:
    """Load a job, with the folder ``source`` as its code if it has any."""
    settings = [f"job.source={source}"] if name in WITH_CODE else []
    return spec.load(JOBS[name], settings)

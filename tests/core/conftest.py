"""Fixtures: a small tokenized corpus, a fast training config and a local AWS account."""

import copy
import json
import logging
import urllib.request

import pytest

SUBJECTS = ("The model", "Every rank", "A shard", "This node", "One replica", "The loader")
VERBS = ("reads", "holds", "sends", "gathers", "reduces", "returns", "deletes", "lists", "opens")
OBJECTS = ("a batch of tokens", "its own shard", "the gradients", "all parameters", "the state")


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory):
    """Folder of token shards of about 25,000 tokens with 300 ids, split into train and val."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from data_prep import prepare, sources

    folder = tmp_path_factory.mktemp("corpus")
    sentences = [f"{s} {v} {o}." for s in SUBJECTS for v in VERBS for o in OBJECTS]
    documents = [" ".join(sentences[i::41] + sentences[i::7]) for i in range(41)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "documents.jsonl").write_text("".join(lines))
    prepare(
        sources.jsonl([folder / "documents.jsonl"]),
        folder / "tokens",
        tokenizer=str(folder / "tokenizer.json"),
        val_fraction=0.1,
        progress=False,
    )
    return folder / "tokens"


@pytest.fixture
def small_run(token_folder, tmp_path):
    """Training config as plain data that runs in about a second on 4 ranks."""
    return {
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 2, "n_embd": 32, "n_head": 2}},
        "data": {"path": str(token_folder), "sequence_length": 32},
        "batch": {"micro_batch_size": 2, "accumulation": 2},
        "optimizer": {"lr": 5e-3, "warmup_steps": 2},
        "train": {"steps": 6, "eval_every": 3, "eval_sequences": 16, "sample_tokens": 4},
        "checkpoint": {"folder": ""},
        "run": {"folder": str(tmp_path / "run"), "tensorboard": False, "peak_tflops": 1.0},
    }


@pytest.fixture(scope="module")
def moto_address():
    """Address of a loopback server that implements the AWS protocols."""
    server = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # logs every call
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def aws_services(moto_address, monkeypatch):
    """Clients of an AWS account with an empty bucket and an image; the environment points to it."""
    import boto3

    region = "us-west-2"
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_address)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    reset = urllib.request.Request(f"{moto_address}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset)
    made = {name: boto3.client(name) for name in ("s3", "sagemaker", "logs", "iam", "ecr")}
    place = {"LocationConstraint": region}
    made["s3"].create_bucket(Bucket="my-bucket", CreateBucketConfiguration=place)
    made["ecr"].create_repository(repositoryName="nearlinear")
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"digest": "sha256:" + "0" * 64, "size": 1},
            "layers": [],
        }
    )
    tag = {"imageTag": "2.13-cuda13", "imageManifest": manifest}
    made["ecr"].put_image(repositoryName="nearlinear", **tag)
    return made


@pytest.fixture
def sagemaker_run(tmp_path):
    """Write the config file of a valid SageMaker job with a folder of code, without a VPC."""
    from tests.core.launch.test_validation import RUN

    code = tmp_path / "code"
    (code / "__pycache__").mkdir(parents=True)
    (code / "mine.py").write_text("x = 1\n")
    (code / "__pycache__" / "mine.pyc").write_text("")
    run = copy.deepcopy(RUN)
    run["job"]["source"] = str(code)
    run["job"]["inputs"] = {"train": {"s3": "s3://my-bucket/tokens"}}
    del run["job"]["subnets"], run["job"]["security_groups"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    return path

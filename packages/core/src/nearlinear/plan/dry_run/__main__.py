"""Run one training step without memory and without other ranks, and print what it would need.

    python -m nearlinear.plan.dry_run config.toml --gpus 256
    python -m nearlinear.plan.dry_run config.toml --gpus 64 --set parallel.tensor_parallel_degree=8

The config is the trainer's. 30 billion parameters on 256 GPUs take about half a minute and 0.4 GiB.
"""

import argparse
import json
import resource
import sys
import time

from ...errors import NearlinearError
from ...train import config as train_config
from .step import measure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nearlinear.plan.dry_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="the config file of the run, TOML or JSON")
    parser.add_argument("--gpus", type=int, required=True, help="ranks of the job")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of the config, as in batch.micro_batch_size=4",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=0,
        help="ids; 0 = those of the data, or of the model as published",
    )
    parser.add_argument(
        "--pipeline-rank",
        type=int,
        metavar="N",
        help="of a pipeline, from 0; default: the one that by the closed form needs the most",
    )
    parser.add_argument("--json", action="store_true", help="print numbers, in bytes and seconds")
    asked = parser.parse_args(arguments)
    begin = time.perf_counter()
    try:
        config = train_config.load(asked.config, asked.set)
        plan = measure(
            config, asked.gpus, vocabulary=asked.vocabulary, pipeline_rank=asked.pipeline_rank
        )
    except NearlinearError as error:
        print(f"{error.word}: {error}", file=sys.stderr)
        return error.exit_code
    seconds, host = time.perf_counter() - begin, _host_memory()
    if asked.json:
        found = plan.as_dict() | {"seconds": seconds, "processor": time.process_time()}
        print(json.dumps(found | {"host_memory": host}))
    else:
        print(f"{plan}\nfound in {seconds:.0f} s with {host / 2**30:.2f} GiB of host memory")
    return 0


def _host_memory() -> int:
    """The most bytes that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())

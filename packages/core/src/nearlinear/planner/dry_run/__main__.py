"""Run one training step on fake tensors, without other ranks, and print its peak memory.

    python -m nearlinear.planner.dry_run config.toml --gpus 256
    python -m nearlinear.planner.dry_run config.toml --gpus 64 --set batch.micro_batch_size=8

The config is the trainer's. 30 billion parameters on 256 GPUs take about half a minute and 0.4 GiB.
"""

import argparse
import json
import resource
import sys
import time

from ...config import train as train_config
from ...errors import NearlinearError
from .step import measure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nearlinear.planner.dry_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="config file of the run, TOML or JSON")
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
        help="vocabulary size; 0: that of the data, or of the model family",
    )
    parser.add_argument(
        "--pipeline-rank",
        type=int,
        metavar="N",
        help="rank of a pipeline, from 0; default: the one with the highest estimate",
    )
    parser.add_argument("--json", action="store_true", help="print numbers, in bytes and seconds")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    try:
        config = train_config.load(options.config, options.set)
        found = measure(
            config,
            options.gpus,
            vocabulary=options.vocabulary,
            pipeline_rank=options.pipeline_rank,
        )
    except NearlinearError as error:
        print(f"{error.word}: {error}", file=sys.stderr)
        return error.exit_code
    seconds, host = time.perf_counter() - begin, _host_memory()
    if options.json:
        numbers = found.as_dict() | {"seconds": seconds, "processor": time.process_time()}
        print(json.dumps(numbers | {"host_memory": host}))
    else:
        print(f"{found}\nmeasured in {seconds:.0f} s with {host / 2**30:.2f} GiB of host memory")
    return 0


def _host_memory() -> int:
    """Return the peak bytes of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())

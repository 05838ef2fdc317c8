"""Start a job's ranks on this machine through torchrun's API, the launcher a cluster uses."""

import os
import sys
import uuid


def joined() -> bool:
    """Whether this process is a rank that torchrun, SageMaker or Slurm has started already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(module: str, arguments: list[str], ranks: int) -> int:
    """Run ``python -m module arguments`` as ``ranks`` ranks; the exit code of the job.

    A rank that ends with an error ends the others within seconds. An exit code of 2 is a rank's
    own one-line error, already printed; any other failure is named here.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = max(1, (os.cpu_count() or 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    here = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), here]))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(uuid.uuid4()),
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == 2:
            return 2
        how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"code {failure.exitcode}"
        print(
            f"error: rank {rank} of {ranks} ended with {how} at {failure.timestamp_isoformat()}; "
            "its own message is above, and the other ranks were stopped",
            file=sys.stderr,
        )
        return 1
    return 0

"""One rank of `nearlinear.spmd.run(processes=True)`: join the group, call, leave the result."""

import os
import pickle
import sys
import traceback
from pathlib import Path

from .. import leaving
from ..backends import known_to_torch
from ..orphan import end_with_parent


def main(folder: Path, backend: str) -> int:
    """Run the pickled call of ``folder`` as rank ``$RANK``; 0 if it returned."""
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        store = f"file://{folder}/store"
        known_to_torch(backend)
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
        result = pickle.dumps(fn(rank, *args))
        if dist.is_initialized():
            leaving.finish()
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        partial = folder / f".failure-{rank}"
        partial.write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        partial.rename(folder / f"failure-{rank}")
        return 1
    (folder / f"result-{rank}").write_bytes(result)
    return 0


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    status = main(Path(sys.argv[1]), sys.argv[3])
    sys.stdout.flush()
    os._exit(status)

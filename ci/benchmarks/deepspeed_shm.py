"""DeepSpeed's all-reduce in shared memory, as the backend ``deepspeed_shm`` of torch.distributed.

    python -m ci.benchmarks.collectives --import ci.benchmarks.deepspeed_shm --ops all_reduce \\
        --backends nearlinear deepspeed_shm --sizes 64K:32M:4

DeepSpeed uses it for tensor-parallel inference on CPUs. It has a single group, of all ranks of the
machine, and nothing but the sum of floating-point tensors. The first group compiles DeepSpeed's
operator and the backend, which calls the operator without Python in between.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import torch.distributed as dist
from torch.utils import cpp_extension

NAME = "deepspeed_shm"
OLDEST_INSTRUCTIONS = 1  # AVX2, by DeepSpeed's count

BACKEND_SOURCE = r"""
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/extension.h>

class Done : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> outputs) : future_(c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(outputs));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Backend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  const std::string getBackendName() const override { return "deepspeed_shm"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "deepspeed_shm only sums");
    static auto sum = c10::Dispatcher::singleton()
                          .findSchemaOrThrow("deepspeed::inference_all_reduce_", "")
                          .typed<at::Tensor&(at::Tensor&)>();
    sum.call(tensors[0]);
    return c10::make_intrusive<Done>(tensors);
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(m, "Backend")
      .def(py::init<int, int>());
}
"""


def create_backend(options, pg_options=None):
    """Create the backend of one rank; called by c10d."""
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    size = options.group_size
    if size != int(os.environ.get("LOCAL_WORLD_SIZE", size)):
        raise RuntimeError("deepspeed_shm needs all ranks on one machine")
    os.environ["LOCAL_SIZE"] = str(size)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # The address and the port name the memory, which ranks of another run must not find.
    os.environ.setdefault("MASTER_PORT", str(os.getppid()))
    operator = ShareMemCommBuilder().load(verbose=False)
    if operator.vector_kernel_level() < OLDEST_INSTRUCTIONS:
        raise RuntimeError("DeepSpeed's all-reduce needs a processor with AVX2")
    operator.initialize(size, options.group_rank)
    address = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    memory = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}")
    # DeepSpeed leaves it behind.
    atexit.register(Path(f"{memory}_{options.group_rank}").unlink, missing_ok=True)
    return _compiled_backend().Backend(options.group_rank, size)


def _compiled_backend():
    folder = Path(__file__).resolve().parents[2] / "artifacts" / NAME
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load_inline(
        "nearlinear_deepspeed_shm", BACKEND_SOURCE, build_directory=str(folder)
    )


dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])

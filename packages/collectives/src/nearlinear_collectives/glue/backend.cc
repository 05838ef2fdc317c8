// The c10d backend over the engine's C interface, the only translation unit that includes torch.
//
// A synchronous call runs on the caller's thread and returns a completed work; an asynchronous one
// runs on an engine thread. Operations the engine lacks (reductions of other dtypes, sparse and
// CUDA tensors) are delegated to fallback backends created in Python. c10d has no stable ABI, so
// this file is compiled for the installed torch and never loaded into another.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>

#include "calls.h"
#include "work.h"

namespace nearlinear {

using c10::intrusive_ptr;
using c10d::Backend;
using c10d::OpType;
using Lists = std::vector<Tensors>;
using Milliseconds = std::chrono::milliseconds;

class NearlinearBackend : public Backend {
 public:
  using MakeFallback = std::function<intrusive_ptr<Backend>(const std::string &device)>;

  NearlinearBackend(int rank, int size, uintptr_t group, MakeFallback make_fallback)
      : Backend(rank, size),
        group_(reinterpret_cast<nlc_group *>(group)),
        make_fallback_(std::move(make_fallback)) {}
  ~NearlinearBackend() override { close(); }

  const std::string getBackendName() const override { return "nearlinear"; }
  bool supportsCoalescing() const override { return true; }
#if NEARLINEAR_TORCH >= 209
  intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("nearlinear");
  }
  void setTimeout(Milliseconds timeout) override {
    nlc_group_set_timeout(engine(), timeout.count());
    for (auto &[device, backend] : fallbacks_) backend->setTimeout(timeout);
  }
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }
  at::Tensor allocateTensor(long count, at::TensorOptions options) override {
    return allocate_pooled(count, options);
  }
  void abort() override {
    if (group_) nlc_group_abort(group_, "the process group was aborted");
    for (auto &[device, backend] : fallbacks_) backend->abort();
  }
  void shutdown() override { close(); }
#endif
  // Allocate memory for an all-gather's output that exists once per node (see nlc_shared_allocate),
  // or pooled memory if that is not possible.
  at::Tensor allocate_shared(int64_t count, at::ScalarType type) {
    const auto options = at::TensorOptions().dtype(type);
    const int64_t parts = getSize();
    if (count % parts == 0)
      if (void *memory = nlc_shared_allocate(engine(), count / parts * options.dtype().itemsize()))
        return at::for_blob(memory, {count})
            .deleter(nlc_shared_free)
            .options(options)
            .make_tensor();
    return allocate_pooled(count, options);
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  intrusive_ptr<Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
    at::Tensor &tensor = single("broadcast", tensors);
    if (needs_fallback(tensor)) return fallback(tensor)->broadcast(tensors, options);
    nlc_call call = make_call(NLC_BROADCAST, tensor);
    call.root = static_cast<int32_t>(options.rootRank);
    Staging staging;
    call.output = staging.in_place(tensor);
    return launch(OpType::BROADCAST, call, tensors, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
    at::Tensor &tensor = single("all_reduce", tensors);
    const auto reduction = reduction_for(tensor, options.reduceOp);
    if (!reduction)
      return call_on_contiguous(tensor, [&](at::Tensor &whole) {
        Tensors one{whole};
        return fallback(tensor)->allreduce(one, options);
      });
    nlc_call call = make_reduce_call(NLC_ALL_REDUCE, tensor, *reduction);
    Staging staging;
    call.output = staging.in_place(tensor);
    return launch(OpType::ALLREDUCE, call, tensors, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> allreduce_coalesced(Tensors &tensors,
                                          const c10d::AllreduceCoalescedOptions &options) override {
    std::vector<intrusive_ptr<Work>> works;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (is_repeated(tensors, i)) continue;
      Tensors one{tensors[i]};
      works.push_back(allreduce(one, options));
    }
    return combine(std::move(works), tensors);
  }

  intrusive_ptr<Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                      const c10d::AllgatherOptions &options) override {
    if (needs_fallback(input)) return fallback(input)->_allgather_base(output, input, options);
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_gather: the output is ",
                      output.scalar_type(), ", the input ", input.scalar_type());
    TORCH_CHECK_VALUE(output.numel() == input.numel() * getSize(), "all_gather: the output has ",
                      output.numel(), " elements, but ", getSize(), " ranks x ", input.numel(),
                      " elements of input make ", input.numel() * getSize());
    nlc_call call = make_call(NLC_ALL_GATHER, input);
    Staging staging;
    call.input = staging.input(input);
    call.output = staging.output(output);
    return launch(OpType::_ALLGATHER_BASE, call, {output}, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> allgather(Lists &outputs, Tensors &inputs,
                                const c10d::AllgatherOptions &options) override {
    at::Tensor &input = single("all_gather", inputs);
    Tensors &parts = single("all_gather", outputs);
    if (needs_fallback(input)) return fallback(input)->allgather(outputs, inputs, options);
    TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == getSize(), "all_gather: ", parts.size(),
                      " output tensors for ", getSize(), " ranks");
    if (!are_even(parts)) return allgather_uneven(parts, input, options);
    for (const at::Tensor &part : parts)
      TORCH_CHECK_VALUE(part.numel() == input.numel() && part.scalar_type() == input.scalar_type(),
                        "all_gather: every output must have the input's dtype and ", input.numel(),
                        " elements; one is ", part.scalar_type(), " with ", part.numel());
    nlc_call call = make_call(NLC_ALL_GATHER, input);
    Staging staging;
    call.input = staging.input(input);
    std::vector<void *> pointers;
    if (are_adjacent(parts)) {
      call.output = parts[0].data_ptr();
    } else {
      for (at::Tensor &part : parts) pointers.push_back(staging.output(part));
      call.outputs = pointers.data();
    }
    return launch(OpType::ALLGATHER, call, parts, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> allgather_coalesced(Lists &outputs, Tensors &inputs,
                                          const c10d::AllgatherOptions &options) override {
    // The outer list runs over ranks: outputs[rank][tensor].
    std::vector<intrusive_ptr<Work>> works;
    Tensors all;
    for (const Tensors &of_rank : outputs)
      check_pairs("all_gather", of_rank.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      Lists parts(1);
      for (Tensors &of_rank : outputs) parts[0].push_back(of_rank[i]);
      Tensors one{inputs[i]};
      works.push_back(allgather(parts, one, options));
      all.insert(all.end(), parts[0].begin(), parts[0].end());
    }
    return combine(std::move(works), all);
  }

  intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors &outputs, Tensors &inputs, const c10d::AllgatherOptions &options) override {
    check_pairs("all_gather", outputs.size(), inputs.size());
    std::vector<intrusive_ptr<Work>> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(_allgather_base(outputs[i], inputs[i], options));
    return combine(std::move(works), outputs);
  }

  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                           const c10d::ReduceScatterOptions &options) override {
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "reduce_scatter: the output is ",
                      output.scalar_type(), ", the input ", input.scalar_type());
    TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(), "reduce_scatter: the input has ",
                      input.numel(), " elements, but ", getSize(), " ranks x ", output.numel(),
                      " elements of output make ", output.numel() * getSize());
    const auto reduction = reduction_for(input, options.reduceOp);
    if (!reduction)
      return call_on_contiguous(output, [&](at::Tensor &whole) {
        at::Tensor contiguous = input.contiguous();
        return fallback(input)->_reduce_scatter_base(whole, contiguous, options);
      });
    nlc_call call = make_reduce_call(NLC_REDUCE_SCATTER, output, *reduction);
    Staging staging;
    call.input = staging.input(input);
    call.output = staging.output(output);
    return launch(OpType::_REDUCE_SCATTER_BASE, call, {output}, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> reduce_scatter(Tensors &outputs, Lists &inputs,
                                     const c10d::ReduceScatterOptions &options) override {
    Tensors &parts = single("reduce_scatter", inputs);
    at::Tensor &output = single("reduce_scatter", outputs);
    TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == getSize(), "reduce_scatter: ", parts.size(),
                      " input tensors for ", getSize(), " ranks");
    const auto reduction = reduction_for(output, options.reduceOp);
    if (!reduction) return fallback(output)->reduce_scatter(outputs, inputs, options);
    if (!are_even(parts)) return reduce_scatter_uneven(output, parts, *reduction, options);
    Tensors flat;
    for (const at::Tensor &part : parts) flat.push_back(part.reshape({-1}));
    at::Tensor input = at::cat(flat);
    return _reduce_scatter_base(output, input, options);
  }

  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors &outputs, Tensors &inputs, const c10d::ReduceScatterOptions &options) override {
    check_pairs("reduce_scatter", outputs.size(), inputs.size());
    std::vector<intrusive_ptr<Work>> works;
    for (size_t i = 0; i < inputs.size(); ++i)
      works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
    return combine(std::move(works), outputs);
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions &options) override {
    nlc_call call{};
    call.kind = NLC_BARRIER;
    call.scale = 1.0;
    return launch(OpType::BARRIER, call, {}, {}, options.asyncOp, options.timeout);
  }

  intrusive_ptr<Work> reduce(Tensors &tensors, const c10d::ReduceOptions &options) override {
    at::Tensor &tensor = single("reduce", tensors);
    const auto reduction = reduction_for(tensor, options.reduceOp);
    if (!reduction)
      return call_on_contiguous(tensor, [&](at::Tensor &whole) {
        Tensors one{whole};
        return fallback(whole)->reduce(one, options);
      });
    nlc_call call = make_reduce_call(NLC_REDUCE, tensor, *reduction);
    call.root = static_cast<int32_t>(options.rootRank);
    Staging staging;
    call.output = call.root == getRank() ? staging.in_place(tensor) : staging.input(tensor);
    return launch(OpType::REDUCE, call, tensors, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> gather(Lists &outputs, Tensors &inputs,
                             const c10d::GatherOptions &options) override {
    at::Tensor &input = single("gather", inputs);
    if (needs_fallback(input)) return fallback(input)->gather(outputs, inputs, options);
    nlc_call call = make_call(NLC_GATHER, input);
    call.root = static_cast<int32_t>(options.rootRank);
    Parts sends = empty_parts(input), receives = empty_parts(input);
    Staging staging;
    sends.set(options.rootRank, staging.input(input), input.numel());
    Tensors received;
    if (call.root == getRank()) {
      received = single("gather", outputs);
      check_equal_parts("gather", received, input);
      for (size_t rank = 0; rank < received.size(); ++rank)
        receives.set(rank, staging.output(received[rank]), input.numel());
    }
    call.sends = sends.data(), call.receives = receives.data();
    return launch(OpType::GATHER, call, received, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> scatter(Tensors &outputs, Lists &inputs,
                              const c10d::ScatterOptions &options) override {
    at::Tensor &output = single("scatter", outputs);
    if (needs_fallback(output)) return fallback(output)->scatter(outputs, inputs, options);
    nlc_call call = make_call(NLC_SCATTER, output);
    call.root = static_cast<int32_t>(options.rootRank);
    Parts sends = empty_parts(output), receives = empty_parts(output);
    Staging staging;
    receives.set(options.rootRank, staging.output(output), output.numel());
    if (call.root == getRank()) {
      const Tensors &sent = single("scatter", inputs);
      check_equal_parts("scatter", sent, output);
      for (size_t rank = 0; rank < sent.size(); ++rank)
        sends.set(rank, staging.input(sent[rank]), output.numel());
    }
    call.sends = sends.data(), call.receives = receives.data();
    return launch(OpType::SCATTER, call, {output}, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> alltoall_base(at::Tensor &output, at::Tensor &input,
                                    std::vector<int64_t> &output_splits,
                                    std::vector<int64_t> &input_splits,
                                    const c10d::AllToAllOptions &options) override {
    if (needs_fallback(input))
      return fallback(input)->alltoall_base(output, input, output_splits, input_splits, options);
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "all_to_all: the output is ",
                      output.scalar_type(), ", the input ", input.scalar_type());
    Staging staging;
    const Parts sends = split_parts("input", input, input_splits, staging.input(input));
    const Parts receives = split_parts("output", output, output_splits, staging.output(output));
    return exchange(OpType::ALLTOALL_BASE, input, sends, receives, {output}, std::move(staging),
                    options);
  }

  intrusive_ptr<Work> alltoall(Tensors &outputs, Tensors &inputs,
                               const c10d::AllToAllOptions &options) override {
    TORCH_CHECK_VALUE(!inputs.empty(), "all_to_all needs an input tensor for each rank");
    if (needs_fallback(inputs[0])) return fallback(inputs[0])->alltoall(outputs, inputs, options);
    check_lists("all_to_all", inputs, getSize(), inputs[0].scalar_type());
    check_lists("all_to_all", outputs, getSize(), inputs[0].scalar_type());
    Parts sends = empty_parts(inputs[0]), receives = empty_parts(inputs[0]);
    Staging staging;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      sends.set(rank, staging.input(inputs[rank]), inputs[rank].numel());
      receives.set(rank, staging.output(outputs[rank]), outputs[rank].numel());
    }
    return exchange(OpType::ALLTOALL, inputs[0], sends, receives, outputs, std::move(staging),
                    options);
  }

  intrusive_ptr<Work> send(Tensors &tensors, int to, int tag) override {
    at::Tensor &tensor = single("send", tensors);
    if (needs_fallback(tensor)) return remember(fallback(tensor)->send(tensors, to, tag));
    return post(OpType::SEND, NLC_SEND, tensor, to, tag);
  }
  intrusive_ptr<Work> recv(Tensors &tensors, int from, int tag) override {
    at::Tensor &tensor = single("recv", tensors);
    if (needs_fallback(tensor)) return remember(fallback(tensor)->recv(tensors, from, tag));
    return post(OpType::RECV, NLC_RECEIVE, tensor, from, tag);
  }
  intrusive_ptr<Work> recvAnysource(Tensors &tensors, int tag) override {
    at::Tensor &tensor = single("recv", tensors);
    if (needs_fallback(tensor)) return remember(fallback(tensor)->recvAnysource(tensors, tag));
    return post(OpType::RECVANYSOURCE, NLC_RECEIVE, tensor, NLC_ANY_RANK, tag);
  }

  // --- operations of the fallbacks -------------------------------------------------------------

  intrusive_ptr<Work> allreduce_sparse(Tensors &tensors,
                                       const c10d::AllreduceOptions &options) override {
    return fallback(single("all_reduce", tensors))->allreduce(tensors, options);
  }

  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "a coalescing block is open already on this group");
    coalescing_ = true;
  }
  intrusive_ptr<Work> endCoalescing() override {
    coalescing_ = false;
    return combine(std::exchange(coalesced_, {}), {});
  }

 private:
  nlc_group *engine() {
    TORCH_CHECK(group_, "the process group has been destroyed");
    return group_;
  }

  static void check_pairs(const char *operation, size_t outputs, size_t inputs) {
    TORCH_CHECK_VALUE(outputs == inputs, operation, ": ", outputs, " outputs for ", inputs,
                      " inputs");
  }

  Parts empty_parts(const at::Tensor &tensor) const {
    return Parts(getSize(), tensor.scalar_type());
  }

  void check_equal_parts(const char *operation, const Tensors &parts, const at::Tensor &own) const {
    check_lists(operation, parts, getSize(), own.scalar_type());
    for (const at::Tensor &part : parts)
      TORCH_CHECK_VALUE(part.numel() == own.numel(), operation, ": tensors of ", own.numel(),
                        " and ", part.numel(), " elements; all must have one size");
  }

  // Divide a tensor along its first dimension, equally without splits. `data`: its contiguous copy.
  Parts split_parts(const char *side, const at::Tensor &tensor, const std::vector<int64_t> &splits,
                    void *data) const {
    const int64_t size = getSize(), rows = tensor.dim() ? tensor.size(0) : 1;
    int64_t all = 0;
    for (const int64_t split : splits) {
      TORCH_CHECK_VALUE(split >= 0, "all_to_all: an ", side, " split of ", split, " rows");
      all += split;
    }
    if (splits.empty()) {
      TORCH_CHECK_VALUE(rows % size == 0, "all_to_all: the ", side, "'s ", rows,
                        " rows do not divide equally among ", size, " ranks: pass splits");
    } else {
      TORCH_CHECK_VALUE(static_cast<int64_t>(splits.size()) == size && all == rows,
                        "all_to_all: ", splits.size(), " ", side, " splits of ", all,
                        " rows in total, for ", size, " ranks and ", rows, " rows");
    }
    const int64_t row = rows ? tensor.numel() / rows : 0;
    Parts parts = empty_parts(tensor);
    char *place = static_cast<char *>(data);
    for (int64_t rank = 0; rank < size; ++rank) {
      const int64_t elements = row * (splits.empty() ? rows / size : splits[rank]);
      parts.set(rank, place, elements);
      place += elements * tensor.element_size();
    }
    return parts;
  }

  intrusive_ptr<Work> exchange(OpType type, const at::Tensor &tensor, const Parts &sends,
                               const Parts &receives, Tensors outputs, Staging staging,
                               const c10d::AllToAllOptions &options) {
    nlc_call call = make_call(NLC_ALL_TO_ALL, tensor);
    call.count = sends.elements();
    call.sends = sends.data(), call.receives = receives.data();
    return launch(type, call, std::move(outputs), std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> allgather_uneven(Tensors &parts, const at::Tensor &input,
                                       const c10d::AllgatherOptions &options) {
    check_lists("all_gather", parts, getSize(), input.scalar_type());
    TORCH_CHECK_VALUE(parts[getRank()].numel() == input.numel(), "all_gather: the output of rank ",
                      getRank(), " has ", parts[getRank()].numel(), " elements, its input ",
                      input.numel());
    nlc_call call = make_call(NLC_ALL_GATHER_UNEVEN, input);
    Parts sends = empty_parts(input), receives = empty_parts(input);
    Staging staging;
    void *own = staging.input(input);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      sends.set(rank, own, input.numel());
      receives.set(rank, staging.output(parts[rank]), parts[rank].numel());
    }
    call.count = receives.elements();
    call.sends = sends.data(), call.receives = receives.data();
    return launch(OpType::ALLGATHER, call, parts, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  intrusive_ptr<Work> reduce_scatter_uneven(at::Tensor &output, const Tensors &parts,
                                            const Reduction &reduction,
                                            const c10d::ReduceScatterOptions &options) {
    check_lists("reduce_scatter", parts, getSize(), output.scalar_type());
    TORCH_CHECK_VALUE(parts[getRank()].numel() == output.numel(),
                      "reduce_scatter: the part of rank ", getRank(), " has ",
                      parts[getRank()].numel(), " elements, its output ", output.numel());
    nlc_call call = make_reduce_call(NLC_REDUCE_SCATTER_UNEVEN, output, reduction);
    Parts sends = empty_parts(output);
    Staging staging;
    for (size_t rank = 0; rank < parts.size(); ++rank)
      sends.set(rank, staging.input(parts[rank]), parts[rank].numel());
    call.count = sends.elements();
    call.sends = sends.data(), call.output = staging.output(output);
    return launch(OpType::REDUCE_SCATTER, call, {output}, std::move(staging), options.asyncOp,
                  options.timeout);
  }

  // Fallbacks need contiguous tensors. Others are reduced in a copy, synchronously.
  template <typename Call>
  intrusive_ptr<Work> call_on_contiguous(at::Tensor &tensor, Call call) {
    if (needs_fallback(tensor) || tensor.is_contiguous()) return call(tensor);
    at::Tensor whole = tensor.contiguous();
    call(whole)->wait();
    tensor.copy_(whole);
    return c10::make_intrusive<DoneWork>(getRank(), Tensors{tensor});
  }

  std::optional<Reduction> reduction_for(const at::Tensor &tensor, const ReduceOp &op) {
    const at::ScalarType type = tensor.scalar_type();
    if (needs_fallback(tensor) || !engine_dtype(c10::toRealValueType(type))) return std::nullopt;
    return engine_reduction(op, type, getSize());
  }

  intrusive_ptr<Work> launch(OpType type, nlc_call call, Tensors outputs, Staging staging,
                             bool async, Milliseconds timeout) {
    ++sequence_;
    call.timeout_ms = timeout == c10d::kUnsetTimeout ? NLC_ANY_TIMEOUT : timeout.count();
    auto work =
        c10::make_intrusive<EngineWork>(getRank(), type, std::move(outputs), std::move(staging));
    if (async)
      work->start(engine(), call);
    else
      work->run(engine(), call);
    return remember(work);
  }

  intrusive_ptr<Work> post(OpType type, int kind, const at::Tensor &tensor, int other, int tag) {
    nlc_call call = make_call(kind, tensor);
    Staging staging;
    Tensors outputs;
    if (kind == NLC_RECEIVE) outputs.push_back(tensor);
    call.output = outputs.empty() ? staging.input(tensor) : staging.output(tensor);
    call.root = other;
    call.tag = tag;
    auto work =
        c10::make_intrusive<EngineWork>(getRank(), type, std::move(outputs), std::move(staging));
    work->post(engine(), call);
    return remember(work);
  }

  intrusive_ptr<Work> remember(intrusive_ptr<Work> work) {
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  intrusive_ptr<Work> combine(std::vector<intrusive_ptr<Work>> works, Tensors outputs) {
    if (works.size() == 1) return works[0];
    return c10::make_intrusive<ManyWorks>(getRank(), std::move(works), std::move(outputs));
  }

  intrusive_ptr<Backend> &fallback(const at::Tensor &tensor) {
    const std::string device =
        tensor.device().is_cpu() ? "cpu" : c10::DeviceTypeName(tensor.device().type(), true);
    auto &backend = fallbacks_[device];
    if (!backend) backend = make_fallback_(device);
    return backend;
  }

  void close() {
    if (nlc_group *group = std::exchange(group_, nullptr)) nlc_group_close(group);
    for (auto &[device, backend] : std::exchange(fallbacks_, {})) {
#if NEARLINEAR_TORCH >= 209
      try {
        backend->shutdown();
      } catch (const std::exception &) {  // backends without a shutdown throw
      }
#endif
    }
  }

  nlc_group *group_;
  MakeFallback make_fallback_;
  std::map<std::string, intrusive_ptr<Backend>> fallbacks_;
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<intrusive_ptr<Work>> coalesced_;
};

}  // namespace nearlinear

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using nearlinear::NearlinearBackend;
  pybind11::module::import("torch.distributed");  // registers the base class
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("abi_version") = NLC_ABI_VERSION;
  pybind11::class_<NearlinearBackend, c10::intrusive_ptr<NearlinearBackend>, c10d::Backend>(
      module, "Backend")
      .def(pybind11::init<int, int, uintptr_t, NearlinearBackend::MakeFallback>(),
           pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("group"),
           pybind11::arg("make_fallback"))
      .def("allocate_shared", &NearlinearBackend::allocate_shared, pybind11::arg("count"),
           pybind11::arg("dtype"), pybind11::call_guard<pybind11::gil_scoped_release>());
}

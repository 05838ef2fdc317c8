// Conversion of c10d's arguments for the engine: dtypes, reductions, memory. The counterpart of
// work.py.
#pragma once

#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <optional>
#include <vector>

#include "../engine/nearlinear_collectives.h"

namespace nearlinear {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

inline std::optional<int> engine_dtype(at::ScalarType type) {
  switch (type) {
    case at::kByte: return NLC_UINT8;
    case at::kChar: return NLC_INT8;
    case at::kShort: return NLC_INT16;
    case at::kInt: return NLC_INT32;
    case at::kLong: return NLC_INT64;
    case at::kHalf: return NLC_FLOAT16;
    case at::kBFloat16: return NLC_BFLOAT16;
    case at::kFloat: return NLC_FLOAT32;
    case at::kDouble: return NLC_FLOAT64;
    case at::kBool: return NLC_BOOL;
    default: return std::nullopt;
  }
}

// How the engine moves an element of a dtype: complex numbers as two floats, and dtypes that it
// does not know as bytes.
struct Element {
  int dtype;
  uint64_t units;
};

inline Element element_of(at::ScalarType type) {
  if (const auto dtype = engine_dtype(c10::toRealValueType(type)))
    return {*dtype, c10::isComplexType(type) ? uint64_t{2} : uint64_t{1}};
  return {NLC_UINT8, c10::elementSize(type)};
}

// The tensor of a call. c10d's lists hold one tensor per device of a rank, here one device.
inline at::Tensor &single(const char *operation, Tensors &tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, " takes one tensor per rank, not ",
                    tensors.size(), ": call it once for each tensor");
  return tensors[0];
}

inline Tensors &single(const char *operation, std::vector<Tensors> &lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, operation, " takes one list of tensors per rank, not ",
                    lists.size(), ": call it once for each list");
  return lists[0];
}

// Return true if an earlier tensor of the list has the same elements.
inline bool is_repeated(const Tensors &tensors, size_t index) {
  const at::Tensor &tensor = tensors[index];
  return std::any_of(tensors.begin(), tensors.begin() + index, [&](const at::Tensor &earlier) {
    return earlier.is_same(tensor) ||
           (tensor.numel() > 0 && earlier.layout() == at::kStrided &&
            tensor.layout() == at::kStrided && earlier.data_ptr() == tensor.data_ptr() &&
            earlier.sizes() == tensor.sizes() && earlier.strides() == tensor.strides());
  });
}

struct Reduction {
  int reduce;
  double scale;
};

// Raised before anything is sent, because gloo would communicate before it raises.
inline void needs_floating(const char *reduction, at::ScalarType type) {
  TORCH_CHECK_VALUE(at::isFloatingType(type) || at::isComplexType(type), reduction,
                    " needs a floating dtype, not ", type,
                    ": reduce with SUM, then scale");
}

// Convert a c10d reduction of this dtype for the engine; nothing if it needs a fallback.
inline std::optional<Reduction> engine_reduction(const ReduceOp &op, at::ScalarType type,
                                                 int size) {
  const bool floating = at::isFloatingType(type);
  const auto kind = static_cast<ReduceOp::RedOpType>(op);
  if (at::isComplexType(type) && kind != ReduceOp::SUM && kind != ReduceOp::AVG &&
      kind != ReduceOp::PREMUL_SUM)
    return std::nullopt;  // not an operation on its two floats
  switch (kind) {
    case ReduceOp::SUM: return Reduction{NLC_SUM, 1.0};
    case ReduceOp::PRODUCT: return Reduction{NLC_PRODUCT, 1.0};
    case ReduceOp::MIN: return Reduction{NLC_MIN, 1.0};
    case ReduceOp::MAX: return Reduction{NLC_MAX, 1.0};
    case ReduceOp::AVG: needs_floating("AVG", type); return Reduction{NLC_AVG, 1.0 / size};
    case ReduceOp::PREMUL_SUM: {
      needs_floating("PREMUL_SUM", type);
      const auto *factor =  // the name without NCCL exists since torch 2.13; both work
          dynamic_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
      if (!factor) return std::nullopt;
      const bool tensor = factor->tensor_factor.defined();
      return Reduction{NLC_SUM,
                       tensor ? factor->tensor_factor.item<double>() : factor->double_factor};
    }
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      if (floating) return std::nullopt;
      return Reduction{op == ReduceOp::BAND  ? NLC_BAND
                       : op == ReduceOp::BOR ? NLC_BOR
                                             : NLC_BXOR,
                       1.0};
    default: return std::nullopt;
  }
}

inline bool are_even(const Tensors &parts) {
  return std::all_of(parts.begin(), parts.end(), [&](const at::Tensor &part) {
    return part.numel() == parts[0].numel();
  });
}

// Return true if the tensors follow each other in memory, as the views of a chunk do.
inline bool are_adjacent(const Tensors &parts) {
  const char *expected = nullptr;
  for (const at::Tensor &part : parts) {
    if (!part.is_contiguous() || (expected && part.data_ptr() != expected)) return false;
    expected = static_cast<const char *>(part.data_ptr()) + part.nbytes();
  }
  return true;
}

inline bool needs_fallback(const at::Tensor &tensor) {
  return !tensor.device().is_cpu() || tensor.is_sparse();
}

// Build a call without reduction.
inline nlc_call make_call(int kind, const at::Tensor &tensor) {
  nlc_call call{};
  call.kind = kind;
  call.scale = 1.0;
  call.timeout_ms = NLC_ANY_TIMEOUT;
  const Element element = element_of(tensor.scalar_type());
  call.dtype = element.dtype;
  call.count = static_cast<uint64_t>(tensor.numel()) * element.units;
  return call;
}

inline nlc_call make_reduce_call(int kind, const at::Tensor &tensor, const Reduction &reduction) {
  nlc_call call = make_call(kind, tensor);
  call.reduce = reduction.reduce;
  call.scale = reduction.scale;
  return call;
}

// The parts that a rank exchanges with every rank, empty at first.
class Parts {
 public:
  Parts(int size, at::ScalarType type) : parts_(size), units_(element_of(type).units) {}
  void set(size_t rank, void *data, int64_t elements) {
    parts_[rank] = {data, static_cast<uint64_t>(elements) * units_};
  }
  const nlc_part *data() const { return parts_.data(); }
  uint64_t elements() const {
    uint64_t all = 0;
    for (const nlc_part &part : parts_) all += part.count;
    return all;
  }

 private:
  std::vector<nlc_part> parts_;
  uint64_t units_;  // per element
};

inline void check_lists(const char *operation, const Tensors &parts, int size,
                        at::ScalarType type) {
  TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size, operation, ": ", parts.size(),
                    " tensors for ", size, " ranks");
  for (const at::Tensor &part : parts)
    TORCH_CHECK_VALUE(part.scalar_type() == type, operation, ": tensors of ", type, " and ",
                      part.scalar_type(), "; all must have one dtype");
}

inline at::Tensor allocate_pooled(int64_t count, at::TensorOptions options) {
  const size_t bytes = static_cast<size_t>(count) * options.dtype().itemsize();
  void *memory = options.device().is_cpu() && bytes ? nlc_pool_allocate(bytes) : nullptr;
  if (!memory) return at::empty({count}, options);
  return at::for_blob(memory, {count}).deleter(nlc_pool_free).options(options).make_tensor();
}

}  // namespace nearlinear

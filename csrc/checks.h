// Argument checks of the native ops. A message names the op, the argument, what was found and what is accepted;
// fusedaccum/reference.py raises the same ones.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"

namespace fusedaccum {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The message is built only on failure: these checks run once for every tensor of every bucket.
#define FA_CHECK(condition, ...)                       \
  do {                                                 \
    if (!(condition)) ::fusedaccum::fail(__VA_ARGS__); \
  } while (0)

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(type);
  }
}

// How `tensor` is stored. The message lists what all ops accept for gradients and parameters. Asked once for every
// tensor of every bucket, so torch's numbers are compared directly: Tensor::scalar_type() goes through all dtypes in
// turn.
inline Dtype stored_dtype(const char* op, const char* list, size_t i, const Tensor& tensor) {
  static const int32_t float32 = aoti_torch_dtype_float32();
  static const int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  static const int32_t float16 = aoti_torch_dtype_float16();
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  if (dtype == bfloat16) return kBFloat16;
  if (dtype == float32) return kFloat32;
  if (dtype == float16) return kFloat16;
  fail(op, ": ", list, "[", i, "] has dtype ", dtype_name(tensor.scalar_type()),
       "; accepted: float32, float16, bfloat16");
}

struct OpArgument {
  const char* op;
  const char* name;
};
inline std::ostream& operator<<(std::ostream& out, const OpArgument& arg) { return out << arg.op << ": " << arg.name; }

inline void check_flat(const OpArgument& arg, const Tensor& tensor, ScalarType type, int64_t at_least) {
  FA_CHECK(tensor.scalar_type() == type, arg, " has dtype ", dtype_name(tensor.scalar_type()),
           "; accepted: ", dtype_name(type));
  FA_CHECK(tensor.is_contiguous(), arg, " is not contiguous; accepted: contiguous");
  FA_CHECK(tensor.numel() >= at_least, arg, " has ", tensor.numel(), " elements; accepted: at least ", at_least);
}

inline void check_rows(const OpArgument& arg, const Tensor& tensor, ScalarType type, int64_t columns) {
  check_flat(arg, tensor, type, 0);
  FA_CHECK(tensor.dim() == 2 && tensor.size(1) == columns, arg, " has ", tensor.dim(), " dimensions, the last of ",
           tensor.dim() > 0 ? tensor.size(tensor.dim() - 1) : 0, "; accepted: 2 dimensions, the last of ", columns);
}

inline void check_same_length(const char* op, const char* a, size_t n_a, const char* b, size_t n_b) {
  FA_CHECK(n_a == n_b, op, ": ", b, " has ", n_b, " entries; accepted: ", n_a, ", one for each of ", a);
}

// A slot twice in one call would be written by two threads at once.
class OnceEach {
 public:
  OnceEach(const char* op, int64_t n_slots) : op_(op), seen_(static_cast<size_t>(n_slots)) {}

  // `slot` is within the table: SlotTable::at and the CUDA ops check that first.
  void check(int64_t slot, size_t i) {
    FA_CHECK(!seen_[static_cast<size_t>(slot)], op_, ": slots[", i, "] is ", slot, " again; accepted: each slot once");
    seen_[static_cast<size_t>(slot)] = true;
  }

 private:
  const char* op_;
  std::vector<bool> seen_;
};

// True where the elements fill a block of memory without gaps or overlaps, in whatever order.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  std::vector<std::pair<int64_t, int64_t>> by_stride;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) by_stride.emplace_back(strides[i], sizes[i]);
  }
  std::sort(by_stride.begin(), by_stride.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : by_stride) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

// The rows of `table` that an op uses, checked against the buffers that they point into. A size of -1 leaves out
// the check against a buffer that the op does not touch.
class SlotTable {
 public:
  SlotTable(const char* op, const Tensor& table, int64_t n_acc, int64_t n_partials)
      : op_(op), n_acc_(n_acc), n_partials_(n_partials) {
    check_rows({op, "table"}, table, ScalarType::Long, kSlotColumns);
    rows_ = static_cast<const Slot*>(table.const_data_ptr());
    n_rows_ = table.size(0);
  }

  const Slot& at(int64_t slot, const char* list, size_t i) const {
    FA_CHECK(slot >= 0 && slot < n_rows_, op_, ": slots[", i, "] is ", slot, "; accepted: 0 to ", n_rows_ - 1);
    const Slot& row = rows_[slot];
    FA_CHECK(row.offset_elems >= 0 && row.n_elems >= 0 && (n_acc_ < 0 || row.offset_elems + row.n_elems <= n_acc_), op_,
             ": ", list, "[", i, "] has slot ", slot, " at elements ", row.offset_elems, " to ",
             row.offset_elems + row.n_elems, "; accepted: within the ", n_acc_, " elements of acc");
    FA_CHECK(n_partials_ < 0 || (row.first_chunk >= 0 && row.first_chunk + n_chunks(row.n_elems) <= n_partials_), op_,
             ": ", list, "[", i, "] has chunks ", row.first_chunk, " to ", row.first_chunk + n_chunks(row.n_elems),
             "; accepted: within the ", n_partials_, " entries of partials");
    return row;
  }

  void check_tensor(const Tensor& tensor, const Slot& row, const char* list, size_t i) const {
    FA_CHECK(tensor.is_cpu(), op_, ": ", list, "[", i, "] is not on the CPU; accepted: the device of acc");
    FA_CHECK(tensor.numel() == row.n_elems, op_, ": ", list, "[", i, "] has ", tensor.numel(),
             " elements; accepted: the ", row.n_elems, " of its slot");
    FA_CHECK(is_dense(tensor), op_, ": ", list, "[", i,
             "] has gaps or overlaps in memory; accepted: dense, in the order of its slot");
  }

  int64_t size() const { return n_rows_; }
  const Slot* rows() const { return rows_; }

 private:
  const char* op_;
  int64_t n_acc_;
  int64_t n_partials_;
  const Slot* rows_;
  int64_t n_rows_;
};

// The buffer of masters, momentum or maxima, and a slot's place in it.
inline float* optional_buffer(const char* op, const char* name, const std::optional<Tensor>& buffer) {
  if (!buffer.has_value()) return nullptr;
  check_flat({op, name}, *buffer, ScalarType::Float, 0);
  return static_cast<float*>(buffer->mutable_data_ptr());
}

inline void check_within(const char* op, const char* name, const std::optional<Tensor>& buffer, int64_t offset,
                         int64_t n_elems, size_t i) {
  FA_CHECK(buffer.has_value() && offset >= 0 && offset + n_elems <= buffer->numel(), op, ": params[", i, "] needs ",
           name, " elements ", offset, " to ", offset + n_elems, "; found ", buffer.has_value() ? buffer->numel() : 0);
}

inline void check_optional(const OpArgument& arg, const std::optional<Tensor>& tensor, int64_t at_least) {
  if (tensor.has_value()) check_flat(arg, *tensor, ScalarType::Double, at_least);
}

// A float64 buffer that check_optional has seen, to be read or written; null if there is none.
inline const double* optional_doubles(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const double*>(tensor->const_data_ptr()) : nullptr;
}
inline double* optional_mutable_doubles(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<double*>(tensor->mutable_data_ptr()) : nullptr;
}

// What accumulate_ takes beside what measure_ does.
inline void check_accumulate(const char* op, const Tensor& partials, const std::optional<Tensor>& micro_partials,
                             const std::optional<Tensor>& factor) {
  check_optional({op, "micro_partials"}, micro_partials, partials.numel());
  check_optional({op, "factor"}, factor, 1);
}

// The arguments of finalize_, but for what only the CPU can look into.
inline void check_finalize(const char* op, const Tensor& control, const Tensor& scalars, const Tensor& steps,
                           const Tensor& window, const Tensor& partials, const std::optional<Tensor>& micro_partials,
                           const Tensor& table, const Tensor& hyper, const Tensor& active, int64_t rule,
                           const std::optional<Tensor>& extra) {
  check_flat({op, "control"}, control, ScalarType::Double, kControl);
  check_flat({op, "window"}, window, ScalarType::Double, kWindow);
  check_flat({op, "partials"}, partials, ScalarType::Double, 0);
  check_optional({op, "micro_partials"}, micro_partials, partials.numel());
  check_rows({op, "scalars"}, scalars, ScalarType::Float, kScalarColumns);
  check_rows({op, "hyper"}, hyper, ScalarType::Double, kHyperColumns);
  check_rows({op, "table"}, table, ScalarType::Long, kSlotColumns);
  const int64_t n_slots = table.size(0);
  check_flat({op, "steps"}, steps, ScalarType::Float, n_slots);
  check_flat({op, "active"}, active, ScalarType::Byte, n_slots);
  FA_CHECK(scalars.size(0) >= n_slots, op, ": scalars has ", scalars.size(0), " rows; accepted: at least ", n_slots);
  FA_CHECK(rule == kAdam || rule == kSgd || rule == kNoRule, op, ": rule is ", rule,
           "; accepted: 0 (Adam), 1 (SGD), 2 (none)");
  check_optional({op, "extra"}, extra, 2);
}

}  // namespace fusedaccum

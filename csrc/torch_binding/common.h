// torch <-> core: tensors to views, Status to exceptions, where a call runs. Every binding file includes this alone.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "core/masked/conv.h"
#include "core/raise.h"
#include "core/window.h"

// Raises a RuntimeError in Python: "sbnet::op: argument: expected ..., got ...".
#define SBNET_TORCH_EXPECT(condition, op, argument, ...)                  \
  do {                                                                    \
    if (!(condition)) ::sbnet::raise_expected(op, argument, __VA_ARGS__); \
  } while (0)

namespace sbnet::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType to_dtype(const char* op, const char* argument, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Double:
      return DType::kF64;
    case ScalarType::Bool:
      return DType::kBool;
    case ScalarType::Byte:
      return DType::kU8;
    case ScalarType::Char:
      return DType::kI8;
    case ScalarType::Short:
      return DType::kI16;
    case ScalarType::Int:
      return DType::kI32;
    case ScalarType::Long:
      return DType::kI64;
    case ScalarType::Float8_e4m3fn:
      return DType::kF8;
    default:
      break;
  }
  raise_expected(op, std::string(argument) + ": dtype", "a real floating or integer one, got another");
}
inline DType to_dtype(const char* op, const char* argument, const Tensor& t) {
  return to_dtype(op, argument, t.scalar_type());
}

inline void check_rank(const char* op, const char* argument, const Tensor& t, int64_t rank) {
  SBNET_TORCH_EXPECT(t.dim() == rank, op, argument, rank, " dimensions, got ", t.dim());
}

// Ops whose kernels do not read the block map: it still says of how many images the list is.
inline void check_batch(const char* op, const Tensor& block_map, const Tensor& x) {
  check_rank(op, "block_map", block_map, 3);
  SBNET_TORCH_EXPECT(block_map.size(0) == x.size(0), op, "block_map", "the images of x, ", x.size(0), ", got ",
                     block_map.size(0));
}

inline TensorView view4(const char* op, const char* argument, const Tensor& t) {
  check_rank(op, argument, t, 4);
  TensorView v{address_of(t.data_ptr()), {}, {}, to_dtype(op, argument, t)};
  for (int d = 0; d < 4; ++d) v.size[d] = t.size(d), v.stride[d] = t.stride(d);
  return v;
}

// The memory format that an op's result follows. Keep in step with is_channels_last in sbnet/ops/common.py.
inline bool is_channels_last(const Tensor& t) { return t.stride(1) == 1 && t.stride(3) != 1; }

// A new [N,C,H,W] tensor, not written, in either memory format: no view: autograd refuses to write to one in place.
inline Tensor empty4(const Tensor& like, const int64_t (&size)[4], bool channels_last,
                     std::optional<ScalarType> dtype = {}) {
  return torch::stable::empty(
      {size, 4}, dtype.value_or(like.scalar_type()), std::nullopt, like.device(), std::nullopt,
      channels_last ? torch::headeronly::MemoryFormat::ChannelsLast : torch::headeronly::MemoryFormat::Contiguous);
}
inline Tensor zeros4(const Tensor& like, const int64_t (&size)[4], bool channels_last,
                     std::optional<ScalarType> dtype = {}) {
  Tensor made = empty4(like, size, channels_last, dtype);
  torch::stable::zero_(made);
  return made;
}

Parallel cpu_threads();                                // torch's; call.cpp
void* current_stream(const char* op, int32_t device);  // CUDA's

// Where a call runs: the device of its first tensor, on which all others must lie.
class Call {
 public:
  Call(const char* op, const char* argument, const Tensor& t)
      : op_(op), first_(argument), cuda_(t.is_cuda()), device_(t.get_device_index()) {
    SBNET_TORCH_EXPECT(cuda_ || t.is_cpu(), op, argument, "a CPU or CUDA tensor, got one of another device");
    if (cuda_) guard_.emplace(device_);
  }
  bool cuda() const { return cuda_; }
  const char* op() const { return op_; }

  void same_device(const char* argument, const Tensor& t) const {
    SBNET_TORCH_EXPECT(t.is_cuda() == cuda_ && t.is_cpu() == !cuda_ && (!cuda_ || t.get_device_index() == device_), op_,
                       argument, "a tensor on the device of ", first_, ", got one on another");
  }
  // A contiguous int32 tensor of exactly this many elements.
  const int32_t* int32(const char* argument, const Tensor& t, int64_t elements) const {
    same_device(argument, t);
    SBNET_TORCH_EXPECT(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == elements, op_, argument,
                       "a contiguous int32 tensor of ", elements, " elements, got ",
                       dtype_name(to_dtype(op_, argument, t)), " of ", t.numel(), " elements");
    return static_cast<const int32_t*>(address_of(t.const_data_ptr()));
  }
  void* stream() const { return current_stream(op_, device_); }
  Parallel parallel() const { return cpu_threads(); }

 private:
  const char* op_;
  const char* first_;
  bool cuda_;
  int32_t device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

inline int32_t to_int32(const char* op, const char* argument, int64_t v) {
  SBNET_TORCH_EXPECT(v >= INT32_MIN && v <= INT32_MAX, op, argument, "a number of 32 bits, got ", v);
  return static_cast<int32_t>(v);
}

// Numbers of `v` from its `at`-th on.
template <size_t kNumbers>
void to_numbers(const char* op, const char* argument, const std::vector<int64_t>& v, size_t at,
                int32_t (&out)[kNumbers]) {
  for (size_t d = 0; d < kNumbers; ++d) out[d] = to_int32(op, argument, v[at + d]);
}

// bsize, bstride, boffset, bcount: eight numbers, row direction first in each pair.
inline BlockGrid to_grid(const char* op, const std::vector<int64_t>& v) {
  SBNET_TORCH_EXPECT(v.size() == 8, op, "grid", "8 numbers (bsize, bstride, boffset, bcount), got ", v.size());
  BlockGrid g;
  to_numbers(op, "grid", v, 0, g.size), to_numbers(op, "grid", v, 2, g.stride);
  to_numbers(op, "grid", v, 4, g.offset), to_numbers(op, "grid", v, 6, g.count);
  return g;
}

inline void to_pair(const char* op, const char* argument, const std::vector<int64_t>& v, int32_t (&out)[2]) {
  SBNET_TORCH_EXPECT(v.size() == 2, op, argument, "2 numbers, got ", v.size());
  to_numbers(op, argument, v, 0, out);
}

inline Window to_window(const char* op, const std::vector<int64_t>& v) {
  SBNET_TORCH_EXPECT(v.size() == kWindowNumbers, op, "window", kWindowNumbers,
                     " numbers (num, den, lo, hi, step), got ", v.size());
  int64_t numbers[kWindowNumbers];
  std::copy(v.begin(), v.end(), numbers);
  Window window = {};
  check(read_window(op, numbers, &window));
  return window;
}

// Entries of a block map.
inline int64_t blocks_of(const BlockGrid& g, int64_t batch) { return size_product({batch, g.count[0], g.count[1]}); }

// block_map may be absent where an op does not need it.
inline ActiveView to_active(const Call& call, const Tensor& indices, const Tensor& count, const Tensor* block_map,
                            const std::vector<int64_t>& grid, int64_t batch) {
  check_rank(call.op(), "indices", indices, 2);
  ActiveView a{};
  a.capacity = indices.size(0);
  a.grid = to_grid(call.op(), grid);
  a.indices = call.int32("indices", indices, size_product({a.capacity, 3}));
  a.count = call.int32("count", count, 1);
  if (block_map) a.block_map = call.int32("block_map", *block_map, blocks_of(a.grid, batch));
  return a;
}

// A tensor of one dimension and so many elements, contiguous.
inline Tensor vector_of(const Call& call, const char* argument, const Tensor& t, int64_t elements) {
  call.same_device(argument, t);
  SBNET_TORCH_EXPECT(t.dim() == 1 && t.size(0) == elements, call.op(), argument, "[", elements, "], got ", t.numel(),
                     " elements in ", t.dim(), " dimensions");
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// The activation of an op's arguments, as its params have it.
template <class Arguments, class Params>
void set_activation(const char* op, const Arguments& a, Params* p) {
  p->activation = to_activation(op, a.activation);
  p->activation_param = static_cast<float>(a.activation_param);
}

inline Tensor empty_int32(const Tensor& like, std::initializer_list<int64_t> size) {
  return torch::stable::new_empty(like, {size.begin(), size.size()}, ScalarType::Int);
}
inline Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {&bytes, 1}, ScalarType::Byte);
}

// The ops of a family, which SBNET_TORCH_OPS walks once for each purpose.
//
// In schemas `grid` is always bsize, bstride, boffset, bcount (eight numbers), `window` num, den, lo, hi, step (ten).
// Ops that end in _ write the tensor marked (a!).
class OpList {
 public:
  enum class Purpose { kSchemas, kCpu, kCuda };
  using Function = void (*)(StableIValue*, uint64_t, uint64_t);  // TORCH_BOX(&op)
  OpList(torch::stable::detail::StableLibrary& library, Purpose purpose) : library_(library), purpose_(purpose) {}

  // An op whose function chooses its kernel by its tensors' device.
  void add(const char* schema, Function function) {
    if (purpose_ == Purpose::kSchemas)
      library_.def(schema);
    else
      library_.impl(std::string(schema, std::strchr(schema, '(')).c_str(), function);
  }
  // An op of tensors on the CPU.
  void add_of_cpu(const char* schema, Function function) {
    if (purpose_ != Purpose::kCuda) add(schema, function);
  }

 private:
  torch::stable::detail::StableLibrary& library_;
  Purpose purpose_;
};

}  // namespace sbnet::binding

// SBNET_TORCH_OPS(ops) { ops.add(...); } registers a family's ops: their schemas, and a function each for every device.
#define SBNET_TORCH_LIST(m, purpose)                                       \
  sbnet::binding::OpList ops(m, sbnet::binding::OpList::Purpose::purpose); \
  list_ops(ops)
#ifdef SBNET_WITH_CUDA
#define SBNET_TORCH_CUDA_OPS \
  STABLE_TORCH_LIBRARY_IMPL(sbnet, CUDA, m) { SBNET_TORCH_LIST(m, kCuda); }
#else
#define SBNET_TORCH_CUDA_OPS
#endif
#define SBNET_TORCH_OPS(ops)                                                 \
  static void list_ops(sbnet::binding::OpList&);                             \
  STABLE_TORCH_LIBRARY_FRAGMENT(sbnet, m) { SBNET_TORCH_LIST(m, kSchemas); } \
  STABLE_TORCH_LIBRARY_IMPL(sbnet, CPU, m) { SBNET_TORCH_LIST(m, kCpu); }    \
  SBNET_TORCH_CUDA_OPS                                                       \
  static void list_ops(sbnet::binding::OpList& ops)

// The plain structs that cross from a binding to a kernel. No torch, ORT or CUDA headers here.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "core/status.h"

#ifdef __CUDACC__
#define SBNET_HOST_DEVICE __host__ __device__
#else
#define SBNET_HOST_DEVICE
#endif

namespace sbnet {

enum class DType : int32_t { kF32, kF16, kBF16, kF64, kBool, kU8, kI8, kI16, kI32, kI64, kF8 };

SBNET_HOST_DEVICE constexpr int64_t dtype_size(DType t) {
  switch (t) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
    case DType::kI16:
      return 2;
    default:
      return 1;
  }
}
constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF64:
      return "float64";
    case DType::kBool:
      return "bool";
    case DType::kU8:
      return "uint8";
    case DType::kI8:
      return "int8";
    case DType::kI16:
      return "int16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kF8:
      return "float8_e4m3fn";
  }
  return "unknown";
}
// The dtypes that arithmetic kernels take.
constexpr bool is_compute_dtype(DType t) { return t == DType::kF32 || t == DType::kF16 || t == DType::kBF16; }

// The product of sizes, none of them negative; INT64_MAX where it is larger than that, which no tensor is.
inline int64_t size_product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  bool too_large = false;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;  // whatever the others are
    too_large = __builtin_mul_overflow(product, size, &product) || too_large;
  }
  return too_large || product < 0 ? INT64_MAX : product;
}

// Where a tensor lies. Frameworks give tensors without elements a null address, which to kernels and checks means that
// there is no tensor: such a one lies at an address that is not null, and nothing of it is read or written.
inline void* address_of(void* data) {
  alignas(256) static char nothing[256];
  return data ? data : nothing;
}
inline const void* address_of(const void* data) { return address_of(const_cast<void*>(data)); }

// A 4-D tensor, logically NCHW whatever its memory order; strides in elements.
struct TensorView {
  void* data;
  int64_t size[4];    // N, C, H, W
  int64_t stride[4];  // of N, C, H, W
  DType dtype;
};

// Block (n,i,j) covers rows offset[0] + i*stride[0] ... + size[0] and columns offset[1] + j*stride[1] ... + size[1].
// Index 0 is the row direction, 1 the column direction.
struct BlockGrid {
  int32_t size[2], stride[2], offset[2], count[2];
  bool overlaps() const { return (stride[0] < size[0] && count[0] > 1) || (stride[1] < size[1] && count[1] > 1); }
};

// The active blocks as kernels see them: all three pointers are device memory of the op's device. A list of capacity 0
// is one of no blocks.
struct ActiveView {
  const int32_t* indices;    // [capacity, 3] rows (n, i, j); rows past the count are never used
  const int32_t* count;      // [1], may hold anything: kernels clamp it to [0, capacity]
  const int32_t* block_map;  // [batch, grid.count[0], grid.count[1]] slot or -1; null where an op does not need it
  int64_t capacity;
  BlockGrid grid;
  // Where a list is optional: is there one? One without rows may have no address for them.
  SBNET_HOST_DEVICE bool given() const { return count; }
};

// Pixels of a layer's output to set to zero, as linear indices (n*H + row)*W + column of its plane; see
// core/lists/fringe.h.
struct FringeView {
  const int32_t* pixels;  // [capacity], null for none
  const int32_t* count;   // [1], clamped to [0, capacity] by kernels
  int64_t capacity;
};

// How a CPU kernel runs in parallel: the binding hands in its framework's thread pool.
struct Parallel {
  // Calls body(arg, begin, end) over disjoint ranges that cover [0, n), each at least `grain` long if n allows it;
  // returns when all are done.
  void (*run)(void* pool, int64_t n, int64_t grain, void (*body)(void* arg, int64_t begin, int64_t end), void* arg);
  void* pool;
  int32_t threads;  // how many ranges run at once at most
};

// parallel_for(par, n, grain, [&](int64_t begin, int64_t end) {...}). The body must not throw.
template <class F>
void parallel_for(const Parallel& par, int64_t n, int64_t grain, const F& body) {
  if (n <= 0) return;
  if (par.threads <= 1 || n <= grain) return body(int64_t{0}, n);
  par.run(
      par.pool, n, grain, [](void* arg, int64_t begin, int64_t end) { (*static_cast<const F*>(arg))(begin, end); },
      const_cast<F*>(&body));
}

}  // namespace sbnet

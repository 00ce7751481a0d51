// Block-sparse 2-D pooling: PyTorch's max_pool2d and avg_pool2d on the active blocks of the OUTPUT plane, nowhere else.
// The border of a max pool is -inf; an average pool counts zeros there, or nothing (count_include_pad).
#pragma once
#include "core/layer.h"

namespace sbnet {

enum class PoolKind : int32_t { kMax, kAverage };

struct PoolParams {
  PoolKind kind;
  TensorView x;       // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView y;       // [N, C, Ho, Wo] of x.dtype, any strides; must not overlap x
  ActiveView active;  // tiling grid of y's plane: offset 0, stride = size, count = ceil(plane / size)
  FringeView fringe;
  int32_t kernel[2], stride[2], padding[2];
  int32_t dilation[2];       // 1 for averages
  bool ceil_mode;            // a last window that reaches past the padding counts too, if it begins before it
  bool count_include_pad;    // averages: padding counts in the divisor
  int32_t divisor_override;  // averages: this instead of the window's pixels, unless 0
};

// Shapes, dtypes, grid against plane, sizes within kernel limits. Everything a kernel relies on.
SBNET_EXPORT Status validate(const PoolParams& p);

inline const char* pool_name(PoolKind kind) {
  return kind == PoolKind::kMax ? "sparse_max_pool2d" : "sparse_avg_pool2d";
}

// How many of a window's taps along dimension d count in an average; the window begins at `begin`, perhaps outside.
SBNET_HOST_DEVICE inline float pool_extent(const PoolParams& p, int d, int32_t begin) {
  const int32_t padding = p.count_include_pad ? p.padding[d] : 0, side = static_cast<int32_t>(p.x.size[2 + d]);
  const int32_t first = begin > -padding ? begin : -padding, end = begin + p.kernel[d];
  return static_cast<float>((end < side + padding ? end : side + padding) - first);
}

// What the sum over the window that begins at (row, column) is divided by.
SBNET_HOST_DEVICE inline float pool_divisor(const PoolParams& p, int32_t row, int32_t column) {
  return p.divisor_override ? static_cast<float>(p.divisor_override)
                            : pool_extent(p, 0, row) * pool_extent(p, 1, column);
}

}  // namespace sbnet

SBNET_DECLARE(sparse_pool2d, PoolParams)

namespace sbnet {

struct PoolLayer : LayerOf<PoolParams> {
  SBNET_EXPORT static Status check(const PoolParams& p);
  SBNET_EXPORT static Status size(const PoolParams& p, int d, int64_t x, int64_t* y);
  static constexpr auto kernels = SBNET_KERNELS(sparse_pool2d);

 protected:
  template <class Read>
  static void window(PoolParams& p, Read& read) {
    read.required("kernel_size", p.kernel);
    read.integers("stride", p.stride, p.kernel);
    read.integers("padding", p.padding, 0);
  }
};

struct MaxPoolLayer : PoolLayer {
  static constexpr const char* kName = "sparse_max_pool2d";
  template <class Read>
  static void numbers(PoolParams& p, Read& read) {
    p.kind = PoolKind::kMax;
    window(p, read);
    read.integers("dilation", p.dilation, 1);
    read.flag("ceil_mode", &p.ceil_mode, false);
  }
};

struct AveragePoolLayer : PoolLayer {
  static constexpr const char* kName = "sparse_avg_pool2d";
  template <class Read>
  static void numbers(PoolParams& p, Read& read) {
    p.kind = PoolKind::kAverage, p.dilation[0] = p.dilation[1] = 1;
    window(p, read);
    read.flag("ceil_mode", &p.ceil_mode, false);
    read.flag("count_include_pad", &p.count_include_pad, true);
    read.optional_integer("divisor_override", &p.divisor_override);
  }
};

}  // namespace sbnet

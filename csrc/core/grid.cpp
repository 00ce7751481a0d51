#include "core/grid.h"

namespace sbnet {

Status check_plane(const char* op, const char* argument, const TensorView& t) {
  for (int d = 0; d < 4; ++d) {
    SBNET_CHECK(t.size[d] >= 0 && t.size[d] <= INT32_MAX / 2,
                "%s: %s: expected sizes of 0 to 2^30, got %lld in dimension %d", op, argument,
                static_cast<long long>(t.size[d]), d);
    SBNET_CHECK(t.stride[d] >= 0, "%s: %s: expected strides of 0 or more, got %lld in dimension %d", op, argument,
                static_cast<long long>(t.stride[d]), d);
  }
  return ok_status();
}

Status check_epilogue(const char* op, DType x, const void* bias, DType bias_dtype, Activation activation,
                      const void* slope, DType slope_dtype) {
  const auto check_dtype = [=](const char* argument, const void* numbers, DType dtype) {
    SBNET_CHECK(!numbers || dtype == x || dtype == DType::kF32, "%s: %s: dtype: expected %s%s, got %s", op, argument,
                x == DType::kF32 ? "" : "float32 or ", dtype_name(x), dtype_name(dtype));
    return ok_status();
  };
  SBNET_TRY(check_dtype("bias", bias, bias_dtype));
  SBNET_CHECK(activation >= Activation::kNone && activation <= Activation::kHardswish,
              "%s: activation: expected a code of Activation, got %d", op, static_cast<int>(activation));
  SBNET_CHECK(!slope || activation == Activation::kLeakyRelu, "%s: slope: expected the activation leaky_relu", op);
  return check_dtype("slope", slope, slope_dtype);
}

Status check_grid(const char* op, const BlockGrid& g) {
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(g.size[d] >= 1, "%s: grid: expected a block size of at least 1, got %d", op, g.size[d]);
    SBNET_CHECK(g.stride[d] >= 1, "%s: grid: expected a block stride of at least 1, got %d", op, g.stride[d]);
    SBNET_CHECK(g.count[d] >= 0, "%s: grid: expected a block count of 0 or more, got %d", op, g.count[d]);
    const int64_t last = int64_t{g.offset[d]} + int64_t{g.count[d]} * g.stride[d] + g.size[d];
    SBNET_CHECK(last <= INT32_MAX / 2 && g.offset[d] >= -(INT32_MAX / 2),
                "%s: grid: expected coordinates of at most 2^30, got %lld", op, static_cast<long long>(last));
  }
  return ok_status();
}

Status check_active(const char* op, const ActiveView& a) {
  SBNET_TRY(check_grid(op, a.grid));
  SBNET_CHECK(a.capacity >= 0 && a.capacity <= INT32_MAX / 4, "%s: active: expected a capacity of 0 to 2^29, got %lld",
              op, static_cast<long long>(a.capacity));
  SBNET_CHECK(a.count && (a.indices || !a.capacity), "%s: active: expected indices and a count, got none", op);
  return ok_status();
}

Status check_tiling(const char* op, const BlockGrid& g, int64_t H, int64_t W) {
  const int64_t plane[2] = {H, W};
  for (int d = 0; d < 2; ++d)
    SBNET_CHECK(g.offset[d] == 0 && g.stride[d] == g.size[d] && g.count[d] == (plane[d] + g.size[d] - 1) / g.size[d],
                "%s: active: expected the tiling grid of the %lldx%lld output plane (BlockGrid.cover), got size "
                "(%d,%d) stride (%d,%d) offset (%d,%d) count (%d,%d)",
                op, static_cast<long long>(H), static_cast<long long>(W), g.size[0], g.size[1], g.stride[0],
                g.stride[1], g.offset[0], g.offset[1], g.count[0], g.count[1]);
  return ok_status();
}

namespace {
// Two views with the same strides, as slices of one buffer have them: write the distance of their first elements as a
// coordinate (largest stride first). The boxes are apart if they are apart in one dimension, provided that neither
// box wraps over the end of a dimension.
bool boxes_apart(const TensorView& a, const TensorView& b) {
  int order[4] = {0, 1, 2, 3};
  for (int d = 0; d < 4; ++d) {
    if (a.stride[d] != b.stride[d] || a.stride[d] == 0) return false;
    for (int e = d + 1; e < 4; ++e)
      if (a.stride[order[e]] > a.stride[order[d]]) {
        const int t = order[d];
        order[d] = order[e];
        order[e] = t;
      }
  }
  const int64_t item = dtype_size(a.dtype);
  int64_t delta = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
  const TensorView *first = &a, *second = &b;
  if (delta < 0) {
    delta = -delta;
    first = &b;
    second = &a;
  }
  if (delta % item) return false;
  delta /= item;
  bool apart = false;
  for (int k = 0; k < 4; ++k) {
    const int d = order[k];
    const int64_t offset = delta / a.stride[d];
    delta -= offset * a.stride[d];
    if (k > 0) {
      const int64_t extent = a.stride[order[k - 1]] / a.stride[d];
      if (first->size[d] > extent || offset + second->size[d] > extent) return false;
    }
    apart = apart || offset >= first->size[d];
  }
  return apart;
}
}  // namespace

bool may_overlap(const TensorView& a, const TensorView& b) {
  int64_t bytes[2];
  const TensorView* views[2] = {&a, &b};
  for (int d = 0; d < 4; ++d)
    if (a.size[d] == 0 || b.size[d] == 0) return false;
  for (int v = 0; v < 2; ++v) {
    int64_t last = 0;
    for (int d = 0; d < 4; ++d) {
      last += (views[v]->size[d] - 1) * views[v]->stride[d];
    }
    bytes[v] = (last + 1) * dtype_size(views[v]->dtype);
  }
  const char *pa = static_cast<const char*>(a.data), *pb = static_cast<const char*>(b.data);
  return pa < pb + bytes[1] && pb < pa + bytes[0] && !boxes_apart(a, b);
}

}  // namespace sbnet

#include "core/layer.h"

#include <cstdio>
#include <cstring>

#include "core/grid.h"

namespace sbnet {
Status check_shape(const char* op, const char* name, const TensorView& t, DType dtype, const LayerShape& shape) {
  SBNET_CHECK(t.dtype == dtype, "%s: %s: dtype: expected that of x, %s, got %s", op, name, dtype_name(dtype),
              dtype_name(t.dtype));
  for (int d = 0; d < 4; ++d)
    SBNET_CHECK(t.size[d] == shape.size[d],
                "%s: %s: shape: expected [%lld,%lld,%lld,%lld] (%s), got [%lld,%lld,%lld,%lld]", op, name,
                static_cast<long long>(shape.size[0]), static_cast<long long>(shape.size[1]),
                static_cast<long long>(shape.size[2]), static_cast<long long>(shape.size[3]), shape.axes,
                static_cast<long long>(t.size[0]), static_cast<long long>(t.size[1]), static_cast<long long>(t.size[2]),
                static_cast<long long>(t.size[3]));
  return check_plane(op, name, t);
}

Status check_read(const char* op, const TensorView& x) {
  SBNET_TRY(check_plane(op, "x", x));
  SBNET_CHECK(x.size[1] >= 1 && x.size[2] >= 1 && x.size[3] >= 1,
              "%s: x: expected channels and a plane, got C %lld of %lldx%lld", op, static_cast<long long>(x.size[1]),
              static_cast<long long>(x.size[2]), static_cast<long long>(x.size[3]));
  return ok_status();
}

Status check_input(const char* op, const TensorView& x) {
  SBNET_CHECK(is_compute_dtype(x.dtype), "%s: x: dtype: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(x.dtype));
  return check_read(op, x);
}

Status check_layer(const char* op, const TensorView& x, const TensorView& y, const LayerShape& shape,
                   const ActiveView& active, const FringeView& fringe) {
  SBNET_TRY(check_input(op, x));
  return check_layer(op, x, y, x.dtype, shape, active, fringe);
}

Status check_layer(const char* op, const TensorView& x, const TensorView& y, DType y_dtype, const LayerShape& shape,
                   const ActiveView& active, const FringeView& fringe) {
  SBNET_TRY(check_read(op, x));
  SBNET_TRY(check_shape(op, "out", y, y_dtype, shape));
  SBNET_TRY(check_written(op, "out", y.size, y.stride));
  SBNET_CHECK(!x.size[0] || !active.capacity || !may_overlap(x, y),
              "%s: out: expected memory of its own, got that of x", op);
  SBNET_TRY(check_active(op, active));
  SBNET_TRY(check_tiling(op, active.grid, shape.size[2], shape.size[3]));
  if (fringe.pixels)
    SBNET_CHECK(fringe.count && fringe.capacity >= 0 &&
                    size_product({shape.size[0], shape.size[2], shape.size[3]}) <= INT32_MAX,
                "%s: fringe: expected a count and a plane of less than 2^31 pixels", op);
  return ok_status();
}

Status check_residual(const char* op, const TensorView& residual, const TensorView& y) {
  return check_residual(op, residual, y.dtype, y);
}

Status check_residual(const char* op, const TensorView& residual, DType dtype, const TensorView& y) {
  const LayerShape shape = {{y.size[0], y.size[1], y.size[2], y.size[3]}, "that of out"};
  SBNET_TRY(check_shape(op, "residual", residual, dtype, shape));
  bool same = residual.data == y.data && dtype == y.dtype;
  for (int d = 0; d < 4; ++d) same = same && (residual.stride[d] == y.stride[d] || y.size[d] <= 1);
  SBNET_CHECK(same || !may_overlap(residual, y),
              "%s: residual: expected out itself or memory apart from it, got memory that overlaps it", op);
  return ok_status();
}

Status read_activation(const char* op, const char* name, Activation* activation) {
  constexpr const char* kNames[] = {"none", "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"};
  for (int k = 0; k < 7; ++k)
    if (!std::strcmp(name, kNames[k])) {
      *activation = static_cast<Activation>(k);
      return ok_status();
    }
  return SBNET_INVALID("%s: activation: expected none, relu, relu6, leaky_relu, silu, gelu or hardswish, got '%.64s'",
                       op, name);
}

Status read_choice(const char* op, const char* argument, const char* const* names, size_t count, const char* name,
                   int32_t* place) {
  char all[128] = "";
  for (size_t k = 0; k < count; ++k) {
    *place = static_cast<int32_t>(k);
    if (!std::strcmp(name, names[k])) return ok_status();
    const size_t length = std::strlen(all);
    std::snprintf(all + length, sizeof(all) - length, "%s%s", k == 0 ? "" : k + 1 == count ? " or " : ", ", names[k]);
  }
  *place = 0;
  return SBNET_INVALID("%s: %s: expected %s, got '%.64s'", op, argument, all, name);
}

void broadcast(const TensorView& y, TensorView* other) {
  for (int d = 0; d < 4; ++d)
    if (other->size[d] == 1 && y.size[d] != 1) other->size[d] = y.size[d], other->stride[d] = 0;
}

Status named(const char* op, const Status& status) {
  const char* colon = std::strchr(status.message, ':');
  if (status.ok() || !colon) return status;
  const int rest = static_cast<int>(sizeof(status.message)) - 64;
  return make_status(status.code, "%s%.*s", op, rest, colon);
}

}  // namespace sbnet

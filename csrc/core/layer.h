// What the layers on active blocks have in common: they read x, write y on the active blocks of y's plane, and zero the
// fringe. A family adds its numbers and its kernels.
#pragma once
#include "core/activation.h"
#include "core/types.h"

namespace sbnet {

// As many numbers as a TensorView has sizes, for messages.
struct LayerShape {
  int64_t size[4];
  const char* axes;  // what the sizes are: "N, K, H_out, W_out"
};

// Dtype and plane of what a layer of floats reads.
SBNET_EXPORT Status check_input(const char* op, const TensorView& x);
// Plane of what a layer reads, of any dtype.
SBNET_EXPORT Status check_read(const char* op, const TensorView& x);
// Everything that a layer's tensors must hold whatever it computes, x among them: dtypes, shapes, memory of y's own,
// apart from x; the list against y's plane; the fringe. `shape` is that of y.
SBNET_EXPORT Status check_layer(const char* op, const TensorView& x, const TensorView& y, const LayerShape& shape,
                                const ActiveView& active, const FringeView& fringe);
// The same of a layer that has checked x's dtype itself and writes one of its own.
SBNET_EXPORT Status check_layer(const char* op, const TensorView& x, const TensorView& y, DType y_dtype,
                                const LayerShape& shape, const ActiveView& active, const FringeView& fringe);
// Of a further tensor of a layer, called `name`: x's dtype and this shape.
SBNET_EXPORT Status check_shape(const char* op, const char* name, const TensorView& t, DType dtype,
                                const LayerShape& shape);
// Of a further tensor of y's shape that is added to y: dtype and shape, and that it is y itself or apart from it.
SBNET_EXPORT Status check_residual(const char* op, const TensorView& residual, const TensorView& y);
// An activation by the name that both frameworks use; "prelu" among them where the op takes slopes.
SBNET_EXPORT Status read_activation(const char* op, const char* name, bool slopes, Activation* activation);
// That slopes, of x's dtype or float32, come with prelu, and with nothing else.
SBNET_EXPORT Status check_activation(const char* op, Activation activation, const void* slope, DType slope_dtype,
                                     DType x_dtype);
// A status with the op that was called in front, instead of the one whose check it came from.
SBNET_EXPORT Status named(const char* op, const Status& status);

}  // namespace sbnet

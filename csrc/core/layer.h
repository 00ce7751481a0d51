// What the layers on active blocks have in common: they read x, write y on the active blocks of y's plane, and zero the
// fringe. A family adds its numbers and its kernels.
#pragma once
#include <cstddef>

#include "core/activation.h"
#include "core/kernels.h"

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
// The same of one that has a dtype of its own, checked by the layer.
SBNET_EXPORT Status check_residual(const char* op, const TensorView& residual, DType dtype, const TensorView& y);
// An activation by the name that both frameworks use.
SBNET_EXPORT Status read_activation(const char* op, const char* name, Activation* activation);
// A status with the op that was called in front, instead of the one whose check it came from.
SBNET_EXPORT Status named(const char* op, const Status& status);

// The place of a name among `names`.
SBNET_EXPORT Status read_choice(const char* op, const char* argument, const char* const* names, size_t count,
                                const char* name, int32_t* place);
// The same as what it stands for.
template <class Kind, size_t kCount>
Status read_choice(const char* op, const char* argument, const char* const (&names)[kCount], const char* name,
                   Kind* kind) {
  int32_t place = 0;
  const Status status = read_choice(op, argument, names, kCount, name, &place);
  *kind = static_cast<Kind>(place);
  return status;
}
// Stretches sides of 1 to y's, which then have stride 0.
SBNET_EXPORT void broadcast(const TensorView& y, TensorView* other);

// An op that reads x, numbers and perhaps a few more tensors says here what it is: both bindings make it of that
// (core/masked/plain_layers.h). Besides what it may hide of this, it has
//   kName
//   numbers(p, read)        names its numbers in the order of its schema, each with its place in p: integer, real (NaN:
//                           it has no default), flag with their defaults; required (some int32_t), integers (some, with
//                           the default of each or of all); optional_integer, which is not 0 where it is given, and 0
//                           where it is not; text, with a default and what reads it, and choice(read, ...), one of some
//                           names; sides, y's height and width, asked for where y is made and not given with it; dtype,
//                           that of a y whose dtype is told
//   kernels                 SBNET_KERNELS of (&p), or of (&p, workspace)
enum class OutputType { kOfX, kOfWeight, kTold };  // which dtype y has where a call makes it
template <class P>
struct LayerOf {
  using Params = P;
  // Its further tensors, in order. Those that it needs, first:
  //   weight   of four dimensions, and the place of what pack_conv_weight made of it; null: it is read as it lies
  //   scales   [y's channels] float32
  // The others may be left out:
  //   vector   [y's channels, or so many] of x's dtype or float32; those that share the place of their dtype share it
  //   plane    of y's shape; its dtype is the op's to check
  //   map      of x's dtype, each side y's or 1
  template <class Read>
  static constexpr void tensors(P&, Read&) {}
  // In how many groups its weight is packed.
  static constexpr int32_t groups(const P&) { return 1; }
  // Its workspace's bytes: a function of &p, or SBNET_KERNELS of what gives them on a device.
  static constexpr std::nullptr_t workspace = nullptr;
  // Does it read the block map? It takes it in place, too, then.
  static constexpr bool kReadsMap = false;
  // Does its functional form take the list of x's plane, which its gradient is wanted on?
  static constexpr bool kListOfX = false;
  static constexpr bool kInPlace = true;  // has it a form in place?
  static constexpr OutputType kOutput = OutputType::kOfX;
  // Must hold before size() is asked: of the numbers alone.
  static Status check(const P&) { return ok_status(); }
  // y's channels (d = 1), rows (2) and columns (3), of those of x, of the numbers and of weights' sizes.
  static Status size(const P&, int, int64_t x, int64_t* y) {
    *y = x;
    return ok_status();
  }
};
// Bytes of its workspace, where `on` is: as Kernels has it.
template <class L, class On>
int64_t workspace_bytes(const On& on, const typename L::Params& p) {
  if constexpr (std::is_pointer_v<decltype(L::workspace)>)
    return L::workspace(&p);
  else
    return L::workspace.bytes(on, &p);
}

template <class Read, class Kind, size_t kCount>
void choice(Read& read, const char* argument, Kind* kind, const char* const (&names)[kCount]) {
  read.text(argument, names[0],
            [&](const char* op, const char* name) { return read_choice(op, argument, names, name, kind); });
}

// Everything that such an op relies on.
template <class L>
Status check_plain(const typename L::Params& p) {
  SBNET_TRY(check_input(L::kName, p.x));
  SBNET_TRY(L::check(p));
  LayerShape y = {{p.x.size[0], 0, 0, 0}, "N, C_out, H_out, W_out"};
  for (int d = 1; d < 4; ++d) SBNET_TRY(L::size(p, d, p.x.size[d], &y.size[d]));
  return check_layer(L::kName, p.x, p.y, y, p.active, p.fringe);
}

}  // namespace sbnet

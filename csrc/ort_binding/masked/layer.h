// What every layer on active blocks takes from ONNX Runtime and gives back. See core/layer.h.
#pragma once
#include "core/layer.h"
#include "core/masked/fill.h"
#include "ort_binding/common.h"

namespace sbnet::ort {

// Where a layer has its lists; the two inputs of the fringe and the base are its last three.
struct LayerPositions {
  size_t indices, fringe;
  size_t count() const { return indices + 1; }
  size_t block_map() const { return indices + 2; }
  size_t base() const { return fringe + 2; }
};

class MaskedLayer {
 public:
  MaskedLayer(const Attributes& a, const LayerPositions& at)
      : grid_(a), zero_outside_(a.flag("zero_outside", false)), at_(at) {}

  // y's shape: as far as it is known, the rest as base (or `like`) has it, whose symbols say more than a formula would.
  void infer(ShapeContext& s, Dims y, Dims like = {}) const {
    s.input(at_.indices, 2);
    s.input(at_.block_map(), 3);
    const Dims base = s.input(at_.base(), 4);
    if (!base.empty()) like = base;
    for (size_t d = 0; d < 4; ++d)
      if (!like.empty() && !y[d].known()) y[d] = like[d];
    s.output(0, y);
  }

  // Fills x, active, fringe and y of p, makes the output, calls run(), which launches the layer, and does what
  // the attributes want outside the active blocks. p's own numbers must be there. `shape` is y's, [N,H,W,C], its dtype
  // x's unless another one is given.
  template <class Params, class Run>
  void compute(Context& c, Params& p, const std::vector<int64_t>& shape, const Run& run,
               std::optional<DType> y_dtype = {}) const {
    const Tensor x = c.input(0, 4), pixels = c.input(at_.fringe, 1), count = c.input(at_.fringe + 1),
                 base = c.input(at_.base(), 4);
    p.x = plane_view(x);
    if (pixels.present != count.present) raise_expected(c.op(), "fringe", "pixels and count, got one of them");
    if (pixels.present) {
      p.fringe.capacity = pixels.shape[0];
      p.fringe.pixels = c.int32(pixels, {p.fringe.capacity});
      p.fringe.count = c.int32(count, {1});
    }
    if (base.present && zero_outside_) raise_expected(c.op(), "base", "none with zero_outside=1, got one");
    const int64_t plane[2] = {shape[1], shape[2]};
    const ActiveInputs active = active_inputs(c, {at_.indices, at_.count(), at_.block_map()}, grid_, plane);
    if (active.batch != x.shape[0])
      raise_expected(c.op(), "block_map", "the images of x, ", x.shape[0], ", got ", active.batch);
    p.active = active.view;
    p.y = plane_view(nullptr, shape, y_dtype.value_or(x.dtype));
    check(named(c.op(), validate(p)));  // before an output of an absurd size is asked for
    if (base.present && base.shape != shape) {
      Params as_base = p;
      as_base.y = plane_view(base);
      check(named(c.op(), validate(as_base)));
    }
    p.y.data = c.output(0, shape);
    if (base.present) c.copy(p.y.data, base.data, base.bytes());
    check(named(c.op(), run()));
    if (!zero_outside_) return;
    FillParams f = {};
    f.x = f.y = p.y;
    f.block_map = p.active.block_map;
    f.grid = p.active.grid;
    check(SBNET_KERNELS(sparse_fill)(c, &f));
  }

 private:
  GridAttributes grid_;
  bool zero_outside_;
  LayerPositions at_;
};

// The [channels] bias at this position, null where there is none.
inline const void* bias_of(const Context& c, size_t at, int64_t channels, DType* dtype) {
  const Tensor bias = c.input(at, 1);
  if (!bias.present) return nullptr;
  if (bias.shape[0] != channels) raise_expected(c.op(), bias.name, channels, " elements, got ", bias.shape[0]);
  *dtype = bias.dtype;
  return bias.data;
}

}  // namespace sbnet::ort

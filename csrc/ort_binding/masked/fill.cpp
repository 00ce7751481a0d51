#include "core/masked/fill.h"

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct SparseFill {
  static constexpr const char* kName = "sparse_fill";
  static constexpr Argument kInputs[] = {{"x", kT}, {"block_map", kInt32}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = 0;

  GridAttributes grid;
  float value;

  explicit SparseFill(const Attributes& a) : grid(a), value(a.real("value", 0.0f)) {}

  void infer(ShapeContext& s) const {
    s.input(1, 3);
    const Dims x = s.input(0, 4);
    if (!x.empty()) s.output(0, x);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(0, 4), map = c.input(1, 3);
    FillParams p = {};
    p.x = p.y = plane_view(x);
    p.grid = grid.over(x.shape[1], x.shape[2]);
    p.block_map = c.int32(map, {x.shape[0], p.grid.count[0], p.grid.count[1]});
    p.value = value;
    check(validate(p));
    p.y.data = c.output(0, x.shape);
    check(SBNET_KERNELS(sparse_fill)(c, &p));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseFill)

}  // namespace sbnet::ort

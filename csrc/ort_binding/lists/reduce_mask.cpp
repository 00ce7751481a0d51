#include "core/lists/reduce_mask.h"

#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct ReduceMask {
  static constexpr const char* kName = "reduce_mask";
  static constexpr Argument kInputs[] = {{"mask", kT}};
  static constexpr Argument kOutputs[] = {
      {"indices", kInt32}, {"count", kInt32}, {"total", kInt32}, {"block_map", kInt32}};
  static constexpr auto kTypes = kMaskTypes;
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  float tol;
  bool avgpool;
  int64_t capacity;  // -1: all blocks

  explicit ReduceMask(const Attributes& a)
      : grid(a), tol(a.real("tol", 0.5f)), avgpool(a.flag("avgpool", false)), capacity(a.integer("capacity", -1)) {
    if (capacity < -1) raise_expected(kName, "capacity", "0 or more (or -1, all blocks), got ", capacity);
  }

  void infer(ShapeContext& s) const {
    const Dims mask = s.input(0, 3);
    Dims map(3);
    if (!mask.empty()) map[0] = mask[0];
    for (int d = 0; d < 2; ++d) {
      const Dim side = mask.empty() ? Dim() : mask[1 + static_cast<size_t>(d)];
      map[1 + static_cast<size_t>(d)] =
          grid.fixed(d) ? Dim(grid.blocks(d, 0)) : side.map([&](int64_t v) { return grid.blocks(d, v); });
    }
    Dim rows;
    if (capacity >= 0)
      rows = capacity;
    else if (map[0].known() && map[1].known() && map[2].known())
      rows = size_product({map[0].value, map[1].value, map[2].value});
    s.output(0, {rows, 3});
    s.output(1, {1});
    s.output(2, {1});
    s.output(3, map);
  }

  void compute(Context& c) const {
    const Tensor mask = c.input(0, 3);
    ReduceMaskParams p = {};
    p.mask = mask.data;
    p.mask_dtype = mask.dtype;
    for (size_t d = 0; d < 3; ++d) p.size[d] = mask.shape[d];
    p.stride[0] = size_product({mask.shape[1], mask.shape[2]}), p.stride[1] = mask.shape[2], p.stride[2] = 1;
    p.grid = grid.over(mask.shape[1], mask.shape[2]);
    p.tol = tol;
    p.avgpool = avgpool;
    check(validate(p));
    p.capacity = capacity >= 0 ? capacity : size_product({p.size[0], p.grid.count[0], p.grid.count[1]});
    check(validate(p));
    p.indices = static_cast<int32_t*>(c.output(0, {p.capacity, 3}));
    p.count = static_cast<int32_t*>(c.output(1, {1}));
    p.total = static_cast<int32_t*>(c.output(2, {1}));
    p.block_map = static_cast<int32_t*>(c.output(3, {p.size[0], p.grid.count[0], p.grid.count[1]}));
    run(c, SBNET_KERNELS(reduce_mask), p, sbnet_reduce_mask_workspace_bytes(&p));
  }
};

}  // namespace

SBNET_ORT_OPS(ReduceMask)

}  // namespace sbnet::ort

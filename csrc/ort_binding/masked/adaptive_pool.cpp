#include "core/masked/adaptive_pool.h"

#include "core/layer.h"
#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

struct SparseAdaptivePool2d {
  static constexpr const char* kName = "sparse_adaptive_pool2d";
  static constexpr Argument kInputs[] = {{"x", kT}, {"block_map", kInt32}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kFloatTypes;
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  Pair size;
  AdaptivePoolKind kind;
  bool count_inactive;

  explicit SparseAdaptivePool2d(const Attributes& a)
      : grid(a), size(a.pair("size", 1)), count_inactive(a.flag("count_inactive", true)) {
    check(read_adaptive_pool_kind(kName, a.text("mode", "avg").c_str(), &kind));
    for (const int32_t side : size)
      if (side < 1) raise_expected(kName, "size", "at least 1, got ", side);
  }

  void infer(ShapeContext& s) const {
    s.input(1, 3);
    const Dims x = s.input(0, 4);
    if (!x.empty()) s.output(0, {x[0], Dim(size[0]), Dim(size[1]), x[3]});
  }

  void compute(Context& c) const {
    const Tensor x = c.input(0, 4), map = c.input(1, 3);
    const std::vector<int64_t> shape = {x.shape[0], size[0], size[1], x.shape[3]};
    AdaptivePoolParams p = {};
    p.kind = kind, p.count_inactive = count_inactive;
    p.x = plane_view(x);
    p.y = plane_view(nullptr, shape, x.dtype);
    p.grid = grid.over(x.shape[1], x.shape[2]);
    p.block_map = c.int32(map, {x.shape[0], p.grid.count[0], p.grid.count[1]});
    check(validate(p));  // before an output of an absurd size is asked for
    p.y.data = c.output(0, shape);
    run(c, SBNET_KERNELS(sparse_adaptive_pool2d), p, sbnet_sparse_adaptive_pool2d_workspace_bytes(&p));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseAdaptivePool2d)

}  // namespace sbnet::ort

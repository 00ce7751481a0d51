#include "core/masked/gather_scatter.h"

#include "core/grid.h"
#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

constexpr Types kCopyTypes[] = {{kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}};

struct SparseGather {
  static constexpr const char* kName = "sparse_gather";
  static constexpr Argument kInputs[] = {{"x", kT}, {"indices", kInt32}, {"count", kInt32}, {"block_map", kInt32}};
  static constexpr Argument kOutputs[] = {{"blocks", kT}};
  static constexpr auto& kTypes = kCopyTypes;
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  bool transpose, zero_tail;

  explicit SparseGather(const Attributes& a)
      : grid(a), transpose(a.flag("transpose", false)), zero_tail(a.flag("zero_tail", true)) {}

  void infer(ShapeContext& s) const {
    const Dims x = s.input(0, 4), indices = s.input(1, 2);
    s.input(3, 3);
    const Dim rows = indices.empty() ? Dim() : indices[0], channels = x.empty() ? Dim() : x[3];
    s.output(0, transpose ? Dims{rows, channels, grid.size(0), grid.size(1)}
                          : Dims{rows, grid.size(0), grid.size(1), channels});
  }

  void compute(Context& c) const {
    const Tensor x = c.input(0, 4);
    BlockCopyParams p = {};
    p.plane = plane_view(x);
    const ActiveInputs active = active_inputs(c, {1, 2, 3}, grid, nullptr);
    p.active = active.view;
    const int64_t rows = p.active.capacity, C = x.shape[3], bh = grid.size(0), bw = grid.size(1);
    if (active.batch != x.shape[0])
      raise_expected(kName, "block_map", "the images of x, ", x.shape[0], ", got ", active.batch);
    const std::vector<int64_t> shape =
        transpose ? std::vector<int64_t>{rows, C, bh, bw} : std::vector<int64_t>{rows, bh, bw, C};
    // What can be checked is, before the output is asked for.
    p.blocks = plane_view(nullptr, shape, x.dtype, transpose);
    p.direction = CopyDirection::kGather;
    p.zero_tail = zero_tail;
    check(validate(p));
    p.blocks.data = c.output(0, shape);
    check(SBNET_KERNELS(block_copy)(c, &p));
  }
};

struct SparseScatter {
  static constexpr const char* kName = "sparse_scatter";
  static constexpr Argument kInputs[] = {
      {"blocks", kT}, {"indices", kInt32}, {"count", kInt32}, {"block_map", kInt32}, {"base", kT}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto& kTypes = kCopyTypes;
  static constexpr int kInPlace = 4;

  GridAttributes grid;
  bool add, atomic, transpose;

  explicit SparseScatter(const Attributes& a)
      : grid(a), add(a.flag("add", false)), atomic(a.flag("atomic", false)), transpose(a.flag("transpose", false)) {}

  void infer(ShapeContext& s) const {
    s.input(0, 4);
    s.input(1, 2);
    s.input(3, 3);
    const Dims base = s.input(4, 4);
    if (!base.empty()) s.output(0, base);
  }

  void compute(Context& c) const {
    const Tensor blocks = c.input(0, 4), base = c.input(4, 4);
    BlockCopyParams p = {};
    p.plane = plane_view(base);
    p.blocks = plane_view(blocks, transpose);
    const ActiveInputs active = active_inputs(c, {1, 2, 3}, grid, nullptr);
    p.active = active.view;
    if (active.batch != base.shape[0])
      raise_expected(kName, "block_map", "the images of base, ", base.shape[0], ", got ", active.batch);
    p.direction = CopyDirection::kScatter;
    p.add = add;
    p.atomic = atomic;
    check(validate(p));
    p.plane.data = c.output(0, base.shape);
    c.copy(p.plane.data, base.data, base.bytes());
    check(SBNET_KERNELS(block_copy)(c, &p));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseGather, SparseScatter)

}  // namespace sbnet::ort

#include "core/masked/squeeze_excite.h"

#include <algorithm>
#include <iterator>

#include "core/grid.h"
#include "core/layer.h"

namespace sbnet {
namespace {
constexpr const char* kOp = "sparse_squeeze_excite2d";
}

Status read_gate_step(const char* op, const char* argument, const char* name, StepCode* step) {
  constexpr const char* kNames[] = {"relu", "silu", "hardswish", "sigmoid", "hardsigmoid"};
  constexpr StepCode kCodes[] = {StepCode::kRelu, StepCode::kSilu, StepCode::kHardswish, StepCode::kSigmoid,
                                 StepCode::kHardsigmoid};
  int32_t place = 0;
  const Status status = read_choice(op, argument, kNames, std::size(kNames), name, &place);
  *step = kCodes[place];
  return status;
}

Status validate(const SqueezeExciteParams& p) {
  const TensorView &x = p.x, &y = p.y;
  SBNET_TRY(check_input(kOp, x));
  SBNET_CHECK(x.size[1] >= 1 && x.size[1] <= kMostGateChannels, "%s: x: expected 1 to %lld channels, got %lld", kOp,
              static_cast<long long>(kMostGateChannels), static_cast<long long>(x.size[1]));
  SBNET_CHECK(p.hidden >= 1 && p.hidden <= kMostGateChannels, "%s: weight1: expected 1 to %lld rows, got %lld", kOp,
              static_cast<long long>(kMostGateChannels), static_cast<long long>(p.hidden));
  SBNET_CHECK(p.bias_dtype == x.dtype || p.bias_dtype == DType::kF32, "%s: bias: expected x's dtype or float32, got %s",
              kOp, dtype_name(p.bias_dtype));
  SBNET_TRY(check_shape(kOp, "out", y, x.dtype, {{x.size[0], x.size[1], 1, 1}, "N, C, 1, 1"}));
  SBNET_TRY(check_written(kOp, "out", y.size, y.stride));
  SBNET_CHECK(!x.size[0] || !may_overlap(x, y), "%s: out: shares memory with x; expected memory of its own", kOp);
  if (p.scaled.data) {
    SBNET_TRY(check_shape(kOp, "out", p.scaled, x.dtype, {{x.size[0], x.size[1], x.size[2], x.size[3]}, "x's"}));
    SBNET_TRY(check_written(kOp, "out", p.scaled.size, p.scaled.stride));
    SBNET_CHECK(!may_overlap(x, p.scaled), "%s: out: expected memory of its own, got that of x", kOp);
  }
  SBNET_TRY(check_grid(kOp, p.grid));
  SBNET_TRY(check_tiling(kOp, p.grid, x.size[2], x.size[3]));
  SBNET_CHECK(p.block_map || !x.size[0], "%s: active: expected a block map, got none", kOp);
  SBNET_CHECK(p.weight1 && p.weight2, "%s: weight1, weight2: expected memory, got none", kOp);
  return ok_status();
}

}  // namespace sbnet

int64_t sbnet_sparse_squeeze_excite2d_workspace_bytes(const sbnet::SqueezeExciteParams* p) {
  using namespace sbnet;
  if (!p->x.size[0]) return 0;
  const int64_t tasks = size_product({cut_gate(*p).tasks(), hidden_step(*p)});  // of a GPU
  const int64_t parts = fold_bytes(parts_of(*p, kCpuPartPixels), FoldKind::kSum);
  const int64_t numbers = size_product({p->x.size[0], p->x.size[1] + p->hidden});
  const int64_t images = image_fold_bytes(p->x);
  if (std::max({tasks, parts, numbers, images}) > INT64_MAX / 8) return INT64_MAX;
  return std::max(4 * tasks, std::max(parts, images) + 4 * numbers);
}

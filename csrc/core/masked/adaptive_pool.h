// Averages and maxima over windows of the active pixels: PyTorch's adaptive_avg_pool2d and adaptive_max_pool2d of
// where(active, x, 0), to any size, 1 x 1 (the global pool) among them. The blocks are those of x's plane.
#pragma once
#include "core/kernels.h"
#include "core/masked/block_fold.h"

namespace sbnet {

enum class AdaptivePoolKind : int32_t { kAverage, kMax };

struct AdaptivePoolParams {
  AdaptivePoolKind kind;
  TensorView x;              // [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView y;              // [N, C, Ho, Wo] of x.dtype, any strides; must not overlap x. All of it is written
  const int32_t* block_map;  // [N, grid.count[0], grid.count[1]] active iff not negative
  BlockGrid grid;            // tiling grid of x's plane
  bool count_inactive;       // inactive pixels count as the zeros they stand for; else active ones alone, 0 of none
};

// "avg" or "max", as bindings take it.
SBNET_EXPORT Status read_adaptive_pool_kind(const char* op, const char* name, AdaptivePoolKind* kind);
// Shapes, dtypes, grid against plane. Everything a kernel relies on.
SBNET_EXPORT Status validate(const AdaptivePoolParams& p);

inline FoldKind fold_kind(const AdaptivePoolParams& p) {
  return p.kind == AdaptivePoolKind::kMax ? FoldKind::kMax : FoldKind::kSum;
}
inline FoldParts parts_of(const AdaptivePoolParams& p, int64_t part_pixels) {
  FoldParts parts = {p.x, p.block_map, p.grid, {}, 1, 1, 1};
  for (int d = 0; d < 2; ++d) parts.windows[d] = static_cast<int32_t>(p.y.size[2 + d]);
  deal(&parts, part_pixels);
  return parts;
}

// The output, of what a window's `count` active pixels of `pixels` gave. A NaN passes.
SBNET_HOST_DEVICE inline float pooled(const AdaptivePoolParams& p, float value, float count, int64_t pixels) {
  if (count == 0.f) return 0.f;
  if (p.kind == AdaptivePoolKind::kAverage) return value / (p.count_inactive ? static_cast<float>(pixels) : count);
  return p.count_inactive && count < static_cast<float>(pixels) && value < 0.f ? 0.f : value;
}

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(sparse_adaptive_pool2d, AdaptivePoolParams)

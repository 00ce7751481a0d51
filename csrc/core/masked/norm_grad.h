// Gradients of sparse_norm2d's norms, in active blocks. g = dy * weight, and means are over what a norm's are:
//   layer, group: dx = (g - mean of g - xhat * mean of g xhat) / sigma,  xhat = (x - mean) / sigma
//   response:     dx = dy + g G / M + x (S / M - mean of S G / M^2) / G, with M = mean of G + eps and S the sum of g x
// over an image's active pixels; the last product is 0 where G is.
#pragma once
#include "core/masked/norm.h"

namespace sbnet {

struct NormGradParams {
  NormKind kind;       // kGroup, kLayer or kResponse
  TensorView grad;     // dy: [N, C, H, W] of x.dtype, any strides; read in active blocks alone
  TensorView x;        // [N, C, H, W] float32, float16 or bfloat16, any strides; likewise
  TensorView y;        // dx: written there alone; must not overlap the others
  ActiveView active;   // tiling grid of the plane, with its block map
  FringeView fringe;   // pixels of dx that become 0
  const void* weight;  // [C] of param_dtype, or null: 1
  DType param_dtype;   // x.dtype or float32
  float* grad_params;  // [2, C]: of weight and bias
  int32_t groups;      // kGroup: a divisor of C
  float eps;
};

// The most channels that the kernels of kLayer take.
constexpr int64_t kMostNormChannels = 2048;
// Parts whose sums of channels are found one by one.
constexpr int32_t kMostLayerNormParts = 512;

SBNET_EXPORT Status validate(const NormGradParams& p);

inline FoldParts parts_of(const NormGradParams& p, int64_t part_pixels) {
  FoldParts parts = {p.x, p.active.block_map, p.active.grid, {1, 1}, 1, 1, 1};
  deal(&parts, part_pixels);
  return parts;
}

// Norms of images: what the parts found lies in the workspace first, then [N, kGradRows, C], by which
// dx = dy * kOfGrad + (x - kMean) * kOfX + kShift; the last rows are the image's share of the gradients of parameters.
enum GradRow : int32_t { kOfGrad, kOfX, kShift, kMean, kOfWeight, kOfBias, kGradRows };
inline float* grad_table(const FoldParts& parts, void* workspace) {
  return fold_counts(parts, FoldKind::kGradient, workspace) + in_quads(parts.count());
}

// What parts found of a channel (FoldKind::kGradient): moments of x, and sums of dy and of dy (x - mean). Double keeps
// the roundings of many parts from adding up.
template <class Number>
struct GradMoments {
  Number count, mean, square, sum, both;
  SBNET_HOST_DEVICE void add(float x, float dy) { merge({1, x, 0, dy, 0}); }
  SBNET_HOST_DEVICE void merge(const GradMoments& other) {
    if (other.count == 0) return;
    const Number all = count + other.count, share = other.count / all, apart = other.mean - mean;
    square += other.square + apart * apart * (count * share);
    both += other.both - sum * apart * share + other.sum * apart * (count / all);
    sum += other.sum;
    mean += apart * share;
    count = all;
  }
};

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(sparse_norm2d_backward, NormGradParams)

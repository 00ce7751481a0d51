// Normalisations on the active blocks: GroupNorm, whose mean and variance are those of an image's active pixels (as
// many groups as channels are InstanceNorm); LayerNorm over the channels of each pixel; softmax over the channels; the
// global response norm of ConvNeXtV2 (Woo et al., 2023): with G the root of the sum of a channel's squares over an
// image's active pixels, y = x + weight x G / (mean of G over the channels + eps) + bias.
#pragma once
#include "core/layer.h"
#include "core/masked/block_fold.h"

namespace sbnet {

enum class NormKind : int32_t { kGroup, kLayer, kSoftmax, kLogSoftmax, kResponse };
inline constexpr const char* kNormNames[] = {"group", "layer", "softmax", "log_softmax", "response"};
// Are its statistics those of an image's active pixels?
SBNET_HOST_DEVICE constexpr bool of_images(NormKind kind) {
  return kind == NormKind::kGroup || kind == NormKind::kResponse;
}

struct NormParams {
  NormKind kind;
  TensorView x;       // [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView y;       // [N, C, H, W] of x.dtype, any strides; must not overlap x
  ActiveView active;  // tiling grid of the plane; norms of images read its block map
  FringeView fringe;
  const void* weight;  // of norms: [C] of param_dtype, or null: 1
  const void* bias;    // [C] of param_dtype, or null: 0
  DType param_dtype;   // x.dtype or float32
  int32_t groups;      // kGroup: a divisor of C
  float eps;           // added to the variance, which is that of all numbers (not n - 1), or to the mean of G
};

// Shapes, dtypes, grid against plane. Everything a kernel relies on.
SBNET_EXPORT Status validate(const NormParams& p);

inline FoldParts parts_of(const NormParams& p, int64_t part_pixels) {
  FoldParts parts = {p.x, p.active.block_map, p.active.grid, {1, 1}, 1, 1, 1};
  deal(&parts, part_pixels);
  return parts;
}

// Norms of images: what the parts found lies in the workspace first, then [N, 3, C]: mean, scale and shift of each
// channel, by which y = (x - mean) * scale + shift. (One product and sum, x * scale + shift, would cancel where the
// mean is large.)
// Parts of an image that a GPU's response norms sum, at most: [N, parts, sums, C], and the table.
constexpr int kMostImageParts = 64;
SBNET_EXPORT int64_t image_norm_bytes(const TensorView& x, const BlockGrid& grid, int sums, int rows, int64_t folds);

inline float* group_table(const FoldParts& parts, void* workspace) {
  return fold_counts(parts, FoldKind::kMoments, workspace) + in_quads(parts.count());
}

// Count, mean and sum of squared distances from it of some numbers. Where hundreds of parts merge, double keeps their
// roundings from adding up: a mean far from zero has few digits to lose.
template <class Number>
struct MomentsOf {
  float count;
  Number mean, square;
  // Adds those of others (Chan, Golub and LeVeque, 1979).
  SBNET_HOST_DEVICE void merge(const MomentsOf& other) {
    if (other.count == 0.f) return;
    const float all = count + other.count, share = other.count / all, apart = static_cast<float>(other.mean - mean);
    mean += apart * share;
    square += other.square + apart * apart * (count * share);
    count = all;
  }
};
using Moments = MomentsOf<float>;
using PartMoments = MomentsOf<double>;

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(sparse_norm2d, NormParams)

namespace sbnet {

struct NormLayer : LayerOf<NormParams> {
  static constexpr const char* kName = "sparse_norm2d";
  static constexpr bool kReadsMap = true;
  template <class Read>
  static constexpr void tensors(NormParams& p, Read& read) {
    read.vector("weight", &p.weight, &p.param_dtype);
    read.vector("bias", &p.bias, &p.param_dtype);
  }
  template <class Read>
  static void numbers(NormParams& p, Read& read) {
    choice(read, "mode", &p.kind, kNormNames);
    read.integer("groups", &p.groups, 1);
    read.real("eps", &p.eps, 1e-5f);
  }
  static constexpr auto workspace = sbnet_sparse_norm2d_workspace_bytes;
  static constexpr auto kernels = SBNET_KERNELS(sparse_norm2d);
};

}  // namespace sbnet

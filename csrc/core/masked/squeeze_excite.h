// The gate of squeeze and excitation (Hu, Shen and Sun, 2018): gate(weight2 activation(weight1 mean + bias1) + bias2),
// a number a channel, of the global average of where(active, x, 0). The blocks are those of x's plane.
#pragma once
#include "core/kernels.h"
#include "core/masked/block_fold.h"
#include "core/masked/pointwise.h"
#include "core/memory.h"

namespace sbnet {

constexpr int64_t kMostGateChannels = 12288;  // C and R: a kernel keeps them in shared memory, as floats

struct SqueezeExciteParams {
  TensorView x;              // [N, C, H, W] float32, float16 or bfloat16, any strides; read in active blocks alone
  TensorView y;              // [N, C, 1, 1] of x.dtype, any strides; must not overlap x. All of it is written
  TensorView scaled;         // x times y on the active blocks: [N, C, H, W] of x.dtype, any strides, x's own memory
                             // or none of it; data null for none
  const int32_t* block_map;  // [N, grid.count[0], grid.count[1]] active iff not negative
  BlockGrid grid;            // tiling grid of x's plane
  const void *weight1, *weight2;  // [R, C] and [C, R] of x.dtype, packed
  const void *bias1, *bias2;      // [R] and [C] of bias_dtype, or null
  DType bias_dtype;               // x.dtype or float32
  int64_t hidden;                 // R
  StepCode activation, gate;
};

// "relu", "silu", "hardswish", "sigmoid" or "hardsigmoid", as bindings take both.
SBNET_EXPORT Status read_gate_step(const char* op, const char* argument, const char* name, StepCode* step);
// Shapes, dtypes, grid against plane. Everything a kernel relies on.
SBNET_EXPORT Status validate(const SqueezeExciteParams& p);

inline FoldParts parts_of(const SqueezeExciteParams& p, int64_t part_pixels) {
  FoldParts parts = {p.x, p.block_map, p.grid, {1, 1}, 1, 1, 1};
  deal(&parts, part_pixels);
  return parts;
}

// Of a CPU: behind what the parts found, in the workspace: the averages [N, C], then the hidden numbers [N, R].
inline float* gate_means(const FoldParts& parts, void* workspace) {
  return fold_counts(parts, FoldKind::kSum, workspace) + parts.count();
}

// How a GPU cuts it: a task is some channels of a part. It gives each of the R hidden numbers what those channels and
// pixels add to it, and later multiplies them by the gate. So few tasks as keep a device busy: each reads what all
// tasks of its image gave.
struct GateCut {
  FoldParts parts;
  FoldWords words;
  int64_t tasks() const { return parts.count() * words.chunks; }
};
inline GateCut cut_gate(const SqueezeExciteParams& p) {
  constexpr int64_t kMostTasks = 512;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const bool whole = channels_vectorize(p.x) && p.x.size[1] % (16 / dtype_size(p.x.dtype)) == 0 && aligned(p.weight1) &&
                     (!p.scaled.data || channels_vectorize(p.scaled));
  GateCut cut = {parts_of(p, kCudaPartPixels), FoldWords(p.x, whole, 5)};
  for (int64_t pixels = 2 * kCudaPartPixels; cut.parts.slices > 1 && cut.tasks() > kMostTasks; pixels *= 2)
    cut.parts = parts_of(p, pixels);
  return cut;
}
// Floats from one task's hidden numbers to the next one's: words of four.
inline int64_t hidden_step(const SqueezeExciteParams& p) { return (p.hidden + 3) / 4 * 4; }

SBNET_HOST_DEVICE inline float gate_step(StepCode code, float a) {
  const PointwiseStep step = {code, StepSource::kNumber, 0.f, 0.f};
  float v[1] = {a};
  const float none[1] = {0.f};
  run_step<ScalarMath, 1>(step, v, none);
  return v[0];
}

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(sparse_squeeze_excite2d, SqueezeExciteParams)

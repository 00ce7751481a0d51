// connected_components: what the areas of a map are that lie above a threshold. Semantics: sbnet/reference/frames.py.
#pragma once
#include <cmath>

#include "core/kernels.h"

namespace sbnet {

constexpr int kScoreBits = 30;  // of fraction: sums of whole numbers do not depend on their order

struct ComponentsParams {
  TensorView scores;  // [N,1,H,W] float32, float16 or bfloat16, any strides
  float least;
  int64_t smallest, capacity;  // pixels of a component that counts; rows of what is written for an image
  int32_t* boxes;              // [N,capacity,4] out: left, top, right, bottom, the last two exclusive
  int32_t* pixels;             // [N,capacity] out
  int64_t* sums;               // [N,capacity] out, with kScoreBits of fraction
  int32_t* count;              // [N] out, which may be more than the capacity

  int64_t images() const { return scores.size[0]; }
  int64_t area() const { return size_product({scores.size[2], scores.size[3]}); }  // of an image
};

SBNET_EXPORT Status validate(const ComponentsParams& p);

SBNET_HOST_DEVICE inline int32_t level_of(float score) {
  const float clamped = score < 0.0f ? 0.0f : score > 1.0f ? 1.0f : score;
  return static_cast<int32_t>(rintf(clamped * (1 << kScoreBits)));
}

// CUDA: pixels of which a CTA ranks the components.
constexpr int kComponentsChunk = 4096;

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(components, ComponentsParams)

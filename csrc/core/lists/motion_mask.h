// motion_mask: the pixels whose brightness left a running background. Semantics: sbnet/reference/lists.py.
#pragma once
#include "core/kernels.h"

namespace sbnet {

constexpr int kMostSmooth = 31;  // pixels, the side of the box: what a CTA keeps around its tile

struct MotionMaskParams {
  TensorView frame;         // [N,C,H,W]: uint8, 0 to 255, or float32, float16, bfloat16, 0 to 1; any strides
  const float* background;  // [N,H,W]
  float* next;              // [N,H,W] out; may be `background`
  uint8_t* mask;            // [N,H,W] out: 0 or 1
  float threshold, rate, cut;
  int64_t smooth;  // side of the box, odd

  int64_t images() const { return frame.size[0]; }
  int64_t pixels() const { return size_product({frame.size[2], frame.size[3]}); }  // of an image
};

SBNET_EXPORT Status validate(const MotionMaskParams& p);

// What the sum of a pixel's channels is to be divided by.
inline float brightness_divisor(const MotionMaskParams& p) {
  return static_cast<float>(p.frame.size[1]) * (p.frame.dtype == DType::kU8 ? 255.0f : 1.0f);
}

// The background after a frame, as torch.lerp computes it.
SBNET_HOST_DEVICE inline float followed(float background, float brightness, float rate) {
  const float apart = brightness - background;
  return rate < 0.5f ? background + rate * apart : brightness - apart * (1.0f - rate);
}

// Is a frame a cut, by the sum of |brightness - background| over its pixels? NaN makes one: no background may keep it.
SBNET_HOST_DEVICE inline bool is_cut(double sum, int64_t pixels, float cut) {
  return !(static_cast<float>(sum / static_cast<double>(pixels)) <= cut);
}

// CPU: rows that a thread takes at least, and those whose brightness it makes at once.
constexpr int kMotionRange = 32, kMotionBand = 16;
// CUDA: rows and columns of a CTA's tile.
constexpr int kMotionTile = 32;
int64_t motion_tiles(const MotionMaskParams& p);  // of an image

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE(motion_mask, MotionMaskParams)

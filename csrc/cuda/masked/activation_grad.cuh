// Activations of float32 and their gradients, chosen at run time: of the passes that training takes over a plane.
#pragma once
#include "core/activation.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

// act'(z) dy. Comparisons pass NaN of z on as PyTorch's backward does.
__device__ __forceinline__ float gradient(Activation activation, float slope, float grad, float z) {
  switch (activation) {
    case Activation::kRelu:
      return z <= 0.f ? 0.f : grad;
    case Activation::kRelu6:
      return z <= 0.f || z >= 6.f ? 0.f : grad;
    case Activation::kLeakyRelu:
      return z > 0.f ? grad : grad * slope;
    case Activation::kSilu: {
      const float s = 1.f / (1.f + __expf(-z));
      return grad * (s * (1.f + z * (1.f - s)));
    }
    case Activation::kGelu: {
      const float cdf = 0.5f * (1.f + erff(z * 0.70710678f));
      return grad * (cdf + z * (expf(-0.5f * z * z) * 0.39894228f));
    }
    case Activation::kHardswish:
      return z <= -3.f ? 0.f : z >= 3.f ? grad : grad * (z * 0.33333333f + 0.5f);
    default:
      return grad;
  }
}

__device__ __forceinline__ float activate(Activation activation, float slope, float z) {
  switch (activation) {
    case Activation::kRelu:
      return z < 0.f ? 0.f : z;
    case Activation::kRelu6:
      return z < 0.f ? 0.f : z > 6.f ? 6.f : z;
    case Activation::kLeakyRelu:
      return z > 0.f ? z : z * slope;
    case Activation::kSilu:
      return z / (1.f + __expf(-z));
    case Activation::kGelu:
      return 0.5f * z * (1.f + erff(z * 0.70710678f));
    case Activation::kHardswish:
      return z * ((z < -3.f ? 0.f : z > 3.f ? 6.f : z + 3.f) / 6.f);
    default:
      return z;
  }
}

}  // namespace
}  // namespace sbnet

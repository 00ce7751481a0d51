// When a pixel of a mask is set, on CUDA: shared by reduce_mask and mask_pyramid.
#pragma once
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"

namespace sbnet {

// Whether a pixel counts is decided in float32, as torch compares: a float32 0.1 is not above tol = 0.1.
template <class T>
__device__ __forceinline__ bool above(T v, double tol) {
  return static_cast<float>(v) > static_cast<float>(tol);
}
template <>
__device__ __forceinline__ bool above<double>(double v, double tol) {
  return v > tol;
}

}  // namespace sbnet

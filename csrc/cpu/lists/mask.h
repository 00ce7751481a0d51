// When a pixel of a mask is set, on the CPU: shared by reduce_mask and mask_pyramid.
#pragma once
#include "cpu/simd/by_dtype.h"
#include "cpu/simd/half.h"

namespace sbnet {

inline float as_float(uint8_t v) { return v; }
inline float as_float(float v) { return v; }
inline float as_float(Half v) { return to_float(v); }
inline float as_float(BFloat16 v) { return to_float(v); }

// Decided in float32, as torch compares: a float32 0.1 is not above tol = 0.1.
template <class T>
inline bool above(T v, double tol) {
  return as_float(v) > static_cast<float>(tol);
}
template <>
inline bool above<double>(double v, double tol) {
  return v > tol;
}

// Calls f(T{}) with the element type of a mask; bool is bytes.
template <class F>
void by_mask_dtype(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double{});
  if (dtype == DType::kBool || dtype == DType::kU8) return f(uint8_t{});
  by_dtype<Half, BFloat16>(dtype, f);
}

}  // namespace sbnet

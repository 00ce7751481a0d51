// Neighbouring elements as one vector of floats, for kernels that are included once an instruction set; see isa.h.
#pragma once
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

SBNET_INLINE Vec load_lanes(const float* at) { return load(at); }
template <class T>
SBNET_INLINE Vec load_lanes(const T* at) {
  float wide[kLanes];
  load_row(wide, at, 1, kLanes);
  return load(wide);
}
SBNET_INLINE void store_lanes(float* at, Vec v) { store(at, v); }
template <class T>
SBNET_INLINE void store_lanes(T* at, Vec v) {
  float narrowed[kLanes];
  store(narrowed, v);
  store_row(at, 1, narrowed, kLanes);
}

SBNET_INLINE Vec each(Vec v, float (*f)(float)) {
  for (int e = 0; e < kLanes; ++e) v[e] = f(v[e]);
  return v;
}
SBNET_INLINE float root(float v) { return __builtin_sqrtf(v); }

}  // namespace SBNET_ISA
}  // namespace sbnet

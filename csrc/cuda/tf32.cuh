// float32 operands of tensor cores, which read 10 of their 23 bits of mantissa.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace sbnet {

// To the nearest: tensor cores do not read the low 13 bits, which would be a bias towards zero. NaN must have a bit
// among those above, which cvt.rna.tf32.f32 does not see to (as compiled for sm_80 to 120); this is as many
// instructions.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  const float v = __int_as_float(static_cast<int>(bits));
  return v == v ? bits + 0x1000 : 0x7fffffff;
}
__device__ __forceinline__ void round_fragment(uint32_t (&r)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) r[e] = round_to_tf32(r[e]);
}

}  // namespace sbnet

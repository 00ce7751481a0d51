// What the kernels of sparse_conv2d_quantized share.
#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "core/masked/conv_quantized.h"
#include "cuda/common.cuh"

namespace sbnet {

constexpr const char* kQuantizedConvOp = "sparse_conv2d_quantized";

// Nearest integer, halves to even; NaN gives 0.
__device__ __forceinline__ int8_t to_int8(float v) {
  const int nearest = __float2int_rn(v);
  return static_cast<int8_t>(nearest < -128 ? -128 : nearest > 127 ? 127 : nearest);
}
// An output as its element type holds it.
template <class T>
__device__ __forceinline__ T rounded(float v) {
  if constexpr (std::is_same_v<T, int8_t>)
    return to_int8(v);
  else
    return from_float<T>(v);
}

// to_int8() of both as the low bytes of a word, above them those of `above`: an instruction since sm_90, three before.
__device__ __forceinline__ uint32_t pack_int8(float low, float high, uint32_t above) {
#ifdef __CUDACC__
  uint32_t word;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
      : "=r"(word)
      : "r"(__float2int_rn(high)), "r"(__float2int_rn(low)), "r"(above));
  return word;
#else
  return static_cast<uint8_t>(to_int8(low)) | static_cast<uint32_t>(static_cast<uint8_t>(to_int8(high))) << 8 |
         above << 16;
#endif
}
// N outputs as their element type holds them; `to` is aligned to words.
template <class T, int N>
__device__ __forceinline__ void round_all(const float (&v)[N], T* to) {
  if constexpr (std::is_same_v<T, int8_t>) {
#pragma unroll
    for (int e = 0; e < N; e += 4)
      reinterpret_cast<uint32_t*>(to)[e / 4] = pack_int8(v[e], v[e + 1], pack_int8(v[e + 2], v[e + 3], 0));
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e) to[e] = rounded<T>(v[e]);
  }
}

// Calls f(T{}) with the element type of a residual or output: Bytes, as weights are, or a float's.
template <class Bytes, class F>
__device__ __forceinline__ void by_element(DType dtype, const F& f) {
  if (dtype_size(dtype) == 1) return f(Bytes());
  if (dtype == DType::kF16) return f(__half());
  if (dtype == DType::kBF16) return f(__nv_bfloat16());
  f(float());
}

namespace portable {

// Of a convolution kernel's operands: its params and sums.
template <class T>
using ParamsOf = std::conditional_t<sizeof(T) == 1, QuantizedConv2dParams, Conv2dParams>;
template <class T>
using SumOf = std::conditional_t<sizeof(T) == 1, int32_t, float>;

// Rounds what the active blocks read of x, which is of floats, into `bytes`: of x's sizes, pixels 16-byte aligned, and
// channels up to the next multiple of 8 written. can_round: a full list's work can be counted.
bool can_round(const QuantizedConv2dParams& p);
Status launch_round(const QuantizedConv2dParams& p, const TensorView& bytes, const DeviceInfo& device,
                    cudaStream_t stream);

// Layers of BytesKernel::kPatch3x3 and kRows.
Status launch_patch_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_rows_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream);

}  // namespace portable
}  // namespace sbnet

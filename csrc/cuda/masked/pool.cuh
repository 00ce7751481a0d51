// What the pooling kernels share: a word of channels, and what the visited part of a window comes to.
#pragma once
#include <cstring>

#include "core/masked/pool.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {

template <class T, int kN>
__device__ __forceinline__ Word<T, kN> fill_word(float v) {
  Word<T, kN> word;
#pragma unroll
  for (int e = 0; e < kN; ++e) word.channel[e] = from_float<T>(v);
  return word;
}

// max that passes NaN on.
__device__ __forceinline__ __half2 larger(__half2 a, __half2 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2_nan(a, b); }
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

template <class T>
struct PairOf {};
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// What the visited part of a window comes to.
template <class T, int kN>
struct Maximum {
  Word<T, kN> best;
  static __device__ __forceinline__ float border() { return -INFINITY; }
  __device__ __forceinline__ Maximum() : best(fill_word<T, kN>(border())) {}
  __device__ __forceinline__ explicit Maximum(const Word<T, kN>& word) : best(word) {}
  __device__ __forceinline__ void add(const Word<T, kN>& word) {
    if constexpr (sizeof(T) == 2 && kN % 2 == 0) {
      using Pair = typename PairOf<T>::Type;
#pragma unroll
      for (int e = 0; e < kN; e += 2) {
        Pair mine, theirs;
        memcpy(&mine, best.channel + e, sizeof(Pair));
        memcpy(&theirs, word.channel + e, sizeof(Pair));
        mine = larger(mine, theirs);
        memcpy(best.channel + e, &mine, sizeof(Pair));
      }
    } else {
#pragma unroll
      for (int e = 0; e < kN; ++e)
        best.channel[e] = from_float<T>(larger(to_float(best.channel[e]), to_float(word.channel[e])));
    }
  }
  __device__ __forceinline__ void merge(const Maximum& other) { add(other.best); }
  __device__ __forceinline__ Word<T, kN> finish(float) const { return best; }
};
template <class T, int kN>
struct Average {
  float sum[kN];
  static __device__ __forceinline__ float border() { return 0.f; }
  __device__ __forceinline__ Average() : sum{} {}
  __device__ __forceinline__ explicit Average(const Word<T, kN>& word) {
#pragma unroll
    for (int e = 0; e < kN; ++e) sum[e] = to_float(word.channel[e]);
  }
  __device__ __forceinline__ void add(const Word<T, kN>& word) { merge(Average(word)); }
  __device__ __forceinline__ void merge(const Average& other) {
#pragma unroll
    for (int e = 0; e < kN; ++e) sum[e] += other.sum[e];
  }
  __device__ __forceinline__ Word<T, kN> finish(float divisor) const {
    const float factor = sizeof(T) == 2 ? __fdividef(1.f, divisor) : __frcp_rn(divisor);
    Word<T, kN> word;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      float v = sum[e] * factor;
      // A product's last bit is far below that of a half. For float32, one step from it to the rounded quotient.
      if (sizeof(T) == 4 && !isinf(v)) v = fmaf(fmaf(-v, divisor, sum[e]), factor, v);
      word.channel[e] = from_float<T>(v);
    }
    return word;
  }
};

// Windows of 2x2, 3x3 and 5x5 through shared memory, for channels in whole 16-byte words.
bool pool_tiles_takes(const PoolParams& p);
Status launch_pool_tiles(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream);

}  // namespace sbnet

// What the passes of the backward on tensor cores share.
#pragma once
#include "cuda/attention/tiles.cuh"

namespace sbnet::portable {

// What a query's softmax needs, made by attention_prepare_kernel: [batch * heads * phases, padded] each.
struct GradArgs {
  AttentionBackwardParams p;
  float* lse2;   // log2 of the sum of exponentials; +inf, which makes weights 0, where there is no key or no query
  float* start;  // -delta (1 - dropout), for pairs of queries (2i, 2i + 1, 2i, 2i + 1): what sums of dO V^T start at
  int32_t padded;

  // Gradients of scores are keep * weight * (sum of dO V^T where the weight is kept, start where it is dropped).
  __device__ float keep() const { return p.forward.dropout.p > 0.f ? 1.f / (1.f - p.forward.dropout.p) : 1.f; }
  __device__ int64_t row(const AttentionSequence& s) const { return int64_t{s.dropout_plane} * padded; }
};

constexpr int kRowNumbers = 12;  // bytes: two of start, one of lse2

// What a thread copies of the numbers of kCount queries: 16 bytes of the starts, or of lse2.
template <int kCount>
struct NumberCopy {
  const uint8_t* from;
  int bytes;  // of a query; 0: this thread copies nothing
  __device__ NumberCopy(const GradArgs& a, int64_t first) {
    const int t = threadIdx.x;
    static_assert(kCount % 4 == 0);
    bytes = t < kCount / 2 ? 8 : t < kCount / 2 + kCount / 4 ? 4 : 0;
    from = bytes == 8 ? reinterpret_cast<const uint8_t*>(a.start + first * 2 + t * 4)
                      : reinterpret_cast<const uint8_t*>(a.lse2 + first + (t - kCount / 2) * 4);
  }
  __device__ __forceinline__ void operator()(int q, uint32_t to) const {
    if (bytes) copy_16(to + threadIdx.x * 16, from + int64_t{q} * bytes);
  }
};
// Of queries 2i and 2i + 1 in shared memory.
__device__ __forceinline__ float4 starts_at(const uint8_t* numbers, int query) {
  return *reinterpret_cast<const float4*>(numbers + query * 8);
}
template <int kCount>
__device__ __forceinline__ float2 lse2_at(const uint8_t* numbers, int query) {
  return *reinterpret_cast<const float2*>(numbers + kCount * 8 + query * 4);
}

// The words of a step of 32 keys or queries: which pairs are seen, and kept. A lane has a query: keys of its word are
// [k0, k0 + 32).
struct PairBits {
  uint32_t seen, kept;
};
__device__ __forceinline__ PairBits pair_bits(const AttentionParams& p, const AttentionSequence& s, int q, int k0) {
  PairBits bits = {0, ~0u};
  if (q < s.q_length)
    bits.seen =
        static_cast<uint32_t>(visible_keys(p.layout, s.plane, s.h, q, k0 / kTile * kTile, s.k_length) >> k0 % kTile);
  if (p.dropout.p > 0.f) {
    const Dropout dropout(p);
    bits.kept = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) bits.kept |= dropout.kept(s.dropout_plane, q, k0 / 8 + i) << i * 8;
  }
  return bits;
}
// This lane's bits of a word of each query, for element(j, e, m) of products [32 rows, 8 kColumns]: f(m, j, e, bit).
// kOfKeys: rows are keys, else queries; word: lane l's is of row l, or of column l.
template <bool kOfKeys, class F>
__device__ __forceinline__ void for_bits(uint32_t word, const F& f) {
  const int lane = threadIdx.x % 32;
  if constexpr (kOfKeys) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t bits = __shfl_sync(~0u, word, j * 8 + lane % 4 * 2 + c) >> lane / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) f(i / 2, j, i % 2 * 2 + c, (bits & 1u << i * 8) != 0);
      }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = __shfl_sync(~0u, word, i * 8 + lane / 4) >> lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) f(i / 2, j, i % 2 * 2 + c, (bits & 1u << (j * 8 + c)) != 0);
    }
  }
}

// backward_pairs.cu: dK and dV of more than 64 features.
template <class T>
Status launch_pairs(const GradArgs& a, const DeviceInfo& device, cudaStream_t stream);

}  // namespace sbnet::portable

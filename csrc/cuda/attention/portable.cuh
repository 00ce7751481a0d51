// What the portable attention kernels share. A CTA keeps 64 positions (queries; keys for dK and dV) and walks over
// tiles of 64 of the other side that may see them.
#pragma once
#include "core/attention/attention.h"
#include "core/attention/visible.h"
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"

namespace sbnet::portable {

constexpr const char* kAttentionOp = "block_attention";
constexpr const char* kAttentionBackwardOp = "block_attention_backward";
constexpr int kTile = kAttentionTile;

struct AttentionBackwardArgs {
  AttentionBackwardParams p;
  const float* deltas;  // [batch, heads, q_length] sum of grad_out * out - grad_lse
};

// Tensor cores: heads of up to 128 features, and wider ones.
Status launch_attention_mma(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_attention_wide(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream);
Status launch_attention_simt(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream);
int64_t attention_backward_mma_bytes(const AttentionParams& p);
Status launch_attention_backward_mma(const AttentionBackwardParams& b, void* workspace, const DeviceInfo& device,
                                     cudaStream_t stream);
Status launch_attention_backward_wide(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream);
Status launch_attention_backward_simt(const AttentionBackwardArgs& a, const DeviceInfo& device, cudaStream_t stream);

// CTAs of a launch over tiles of `rows` of the `length` positions of a phase.
inline Status attention_grid(const char* op, const AttentionParams& p, int32_t length, int32_t heads, int slices,
                             dim3* grid, int rows = kTile) {
  const int64_t tiles = (int64_t{length} + rows - 1) / rows;
  const int64_t ctas = size_product({tiles, p.batch, heads, p.layout.rule.phases});
  SBNET_CHECK(ctas <= INT32_MAX, "%s: q, k: expected fewer than 2^31 tiles of 64 positions, got %lld", op,
              static_cast<long long>(ctas));
  *grid = dim3(static_cast<unsigned>(ctas), static_cast<unsigned>(slices));
  return ok_status();
}

// One sequence, head and phase.
struct AttentionSequence {
  int64_t b;
  int32_t h, kv_h, phase, phases;
  int32_t q_length, k_length;
  int64_t plane;
  uint32_t dropout_plane;

  __device__ AttentionSequence(const AttentionParams& p, int64_t b, int32_t h, int32_t phase)
      : b(b), h(h), kv_h(h / (p.heads / p.kv_heads)), phase(phase), phases(p.layout.rule.phases) {
    q_length = phase_length(p.q_lengths, b, p.q_length, phases, phase);
    k_length = phase_length(p.k_lengths, b, p.k_length, phases, phase);
    plane = p.layout.plane(b, h);
    dropout_plane = static_cast<uint32_t>((b * p.heads + h) * phases + phase);
  }
  template <class T>
  __device__ T* at(const AttentionTensor& t, int32_t head, int64_t i) const {
    return static_cast<T*>(t.data) + b * t.batch_stride + head * t.head_stride + (i * phases + phase) * t.stride;
  }
  __device__ int64_t row(const AttentionParams& p, int64_t i) const {
    return (b * p.heads + h) * p.q_length + i * phases + phase;
  }
};

// This CTA's tile of one of `heads` heads: one sequence after the other, so that the L2 keeps what its tiles share; the
// last tiles first where those are the longest under a causal rule.
struct AttentionWork {
  int64_t b;
  int32_t head, phase, first;  // first: position of the tile

  __device__ AttentionWork(const AttentionParams& p, int32_t length, int32_t heads, int32_t rows = kTile,
                           bool last_first = true) {
    const int32_t phases = p.layout.rule.phases;
    const int32_t tiles = (length + rows - 1) / rows;
    const int32_t i = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    first = (last_first ? tiles - 1 - tile : tile) * rows;
    phase = i % phases, head = i / phases % heads, b = i / phases / heads;
  }
};

// body(t) for every tile t below `count` of which touched(t): threads ask for one tile each, then all walk together.
template <int kThreads, class Touched, class Body>
__device__ __forceinline__ void for_touched(int count, uint32_t* words, const Touched& touched, const Body& body) {
  for (int base = 0; base < count; base += kThreads) {
    const int t = base + static_cast<int>(threadIdx.x);
    const uint32_t hits = __ballot_sync(~0u, t < count && touched(t));
    __syncthreads();  // the words of the last round have been read
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = hits;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w)
      for (uint32_t left = words[w]; left; left &= left - 1) body(base + w * 32 + __ffs(left) - 1);
  }
}

struct Dropout {
  uint64_t key, offset;
  uint32_t threshold;
  float keep;  // what kept weights are multiplied by

  __device__ explicit Dropout(const AttentionParams& p) : key(0), offset(0), threshold(0), keep(1.f) {
    if (!p.dropout.seed || p.dropout.p == 0.f) return;
    key = static_cast<uint64_t>(p.dropout.seed[0]), offset = static_cast<uint64_t>(p.dropout.seed[1]);
    threshold = static_cast<uint32_t>(p.dropout.p * 65536.0f + 0.5f);  // dropout_threshold(), which is the host's
    keep = 1.f / (1.f - p.dropout.p);
  }
  __device__ bool on() const { return threshold != 0; }
  // Of keys 8 octet ... 8 octet + 7 and query q.
  __device__ uint32_t kept(uint32_t plane, int q, int octet) const {
    const PhiloxWords words = dropout_bits(key, offset, plane, q, octet);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(!is_dropped(words, i, threshold)) << i;
    return bits;
  }
};

// The bits of 64 queries x 64 keys in shared memory, one word a query: which pairs see each other, which are kept.
// Every thread calls; no barrier.
template <int kThreads>
__device__ __forceinline__ void fill_bits(const AttentionParams& p, const AttentionSequence& s, const Dropout& dropout,
                                          int q0, int k0, uint64_t* seen, uint64_t* kept) {
  for (int i = threadIdx.x; i < kTile; i += kThreads)
    seen[i] = q0 + i < s.q_length ? visible_keys(p.layout, s.plane, s.h, q0 + i, k0, s.k_length) : 0;
  if (dropout.on())
    for (int i = threadIdx.x; i < kTile * 8; i += kThreads)
      reinterpret_cast<uint8_t*>(kept)[i] =
          static_cast<uint8_t>(dropout.kept(s.dropout_plane, q0 + i / 8, k0 / 8 + i % 8));
}

// What the backward knows of a query: weight = exp(score - largest) * factor.
struct QueryRow {
  float largest, factor, delta;
};
__device__ __forceinline__ QueryRow query_row(const AttentionBackwardArgs& a, const AttentionSequence& s, int q) {
  if (q >= s.q_length) return {0.f, 0.f, 0.f};
  const AttentionParams& p = a.p.forward;
  const int64_t row = s.row(p, q);
  const float largest = p.sums ? p.sums[2 * row] : p.lse[row], total = p.sums ? p.sums[2 * row + 1] : 1.f;
  return {largest == -INFINITY ? 0.f : largest, total == 0.f ? 0.f : 1.f / total, a.deltas[row]};
}

}  // namespace sbnet::portable

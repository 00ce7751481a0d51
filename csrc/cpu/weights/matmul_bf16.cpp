// Products with block-sparse weights in bfloat16 for AVX-512 with dot products of pairs (matmul_avx512.cpp's flags and
// -mavx512bf16).
#if defined(__x86_64__)
#if !defined(__AVX512BF16__)
#error "compile matmul_bf16.cpp with AVX-512 and -mavx512bf16"
#endif
#define SBNET_ISA matmul_bf16
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#define SBNET_GROUP 12
#include "cpu/weights/matmul_pairs.h"

namespace sbnet {
namespace SBNET_ISA {

SBNET_INLINE int64_t panel_height(int64_t, int64_t left) { return group_height(left); }

SBNET_INLINE __m512bh pairs(__m512i words) { return reinterpret_cast<__m512bh>(words); }

// R rows x V vectors of outputs, sums in registers.
template <int R, int V>
static __attribute__((noinline)) void add_pairs(const Entries<BFloat>& entries, const BFloat* panel, int64_t size,
                                                float* sums, bool first) {
  constexpr int64_t kStep = V * kLanes;  // features: step_features(size)
  Vec sum[R][V];
  SBNET_UNROLL for (int i = 0; i < R; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  for (int64_t e = 0; e < entries.count; ++e) {
    const BFloat *x = panel + entries.first[e] * R, *w = entries.w[e];
    for (int64_t c = 0; c < size; c += kStep, x += R * kStep, w += V * kStep * kLanes)
      for (int64_t pair = 0; pair < kStep; pair += 2) {
        __m512i weight[V];
        SBNET_UNROLL for (int v = 0; v < V; ++v) weight[v] = _mm512_loadu_si512(w + (v * kStep + pair) * kLanes);
        SBNET_UNROLL for (int i = 0; i < R; ++i) {
          int32_t two;
          __builtin_memcpy(&two, x + i * kStep + pair, 4);
          const __m512bh input = pairs(_mm512_set1_epi32(two));
          SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], input, pairs(weight[v]));
        }
      }
  }
  add_sums(sum, V * kLanes, sums, first);
}

template <class T, int V>
static void multiply_rows(const MatmulTask& task, const Entries<T>& entries, int64_t size, int64_t features,
                          float* sums, bool first) {
  each_group(task.rows, [&](auto rows, int64_t r) {
    add_pairs<decltype(rows)::kCount, V>(entries, static_cast<const T*>(task.x) + r * features, size,
                                         sums + r * V * kLanes, first);
  });
}

static void pack_weights(const BlocksparseMatmulParams& p, void* packed, int64_t begin, int64_t end) {
  pack_weights_of(p, static_cast<BFloat*>(packed), begin, end);
}

}  // namespace SBNET_ISA

const MatmulKernels kMatmulKernelsBf16 = {matmul_bf16::kGroup, sizeof(matmul_bf16::BFloat), matmul_bf16::pack_weights,
                                          matmul_bf16::multiply_of<matmul_bf16::BFloat>, nullptr};
}  // namespace sbnet
#endif

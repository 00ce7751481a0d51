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

// ---- Weight gradient

constexpr int64_t kSquare = 8;  // input features of its microkernel

// sums[c][k] += x[row][c] dy[row][k] over pairs of rows, for kSquare features c and V vectors of k.
template <int V>
static __attribute__((noinline)) void add_row_pairs(const BFloat* x, const BFloat* dy, int64_t rows, int64_t size,
                                                    float* sums, bool first) {
  Vec sum[kSquare][V];
  SBNET_UNROLL for (int i = 0; i < kSquare; ++i) SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = Vec{};
  for (int64_t r = 0; r < rows; r += 2, x += 2 * size, dy += 2 * size) {
    __m512i right[V];
    SBNET_UNROLL for (int v = 0; v < V; ++v) right[v] = _mm512_loadu_si512(dy + 2 * v * kLanes);
    SBNET_UNROLL for (int i = 0; i < kSquare; ++i) {
      int32_t two;
      __builtin_memcpy(&two, x + 2 * i, 4);
      const __m512bh left = pairs(_mm512_set1_epi32(two));
      SBNET_UNROLL for (int v = 0; v < V; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], left, pairs(right[v]));
    }
  }
  add_sums(sum, size, sums, first);
}

static void pack_rows(const TensorView& t, const int64_t* rows, int64_t count, int64_t feature, int64_t size, bool,
                      void* to) {
  pack_row_pairs(t, rows, count, feature, size, static_cast<BFloat*>(to));
}

static void weight_grad(const BlocksparseWeightGradParams& p, const WeightGradTask& task) {
  each_block(p, task, [&](const char* x_panel, const char* dy_panel, int64_t size, float* sums) {
    const BFloat* x = reinterpret_cast<const BFloat*>(x_panel);
    const BFloat* dy = reinterpret_cast<const BFloat*>(dy_panel);
    for (int64_t i = 0; i < size; i += kSquare)
      if (size == kLanes)
        add_row_pairs<1>(x + 2 * i, dy, task.rows, size, sums + i * size, task.first);
      else
        for (int64_t j = 0; j < size; j += 2 * kLanes)
          add_row_pairs<2>(x + 2 * i, dy + 2 * j, task.rows, size, sums + i * size + j, task.first);
  });
}

}  // namespace SBNET_ISA

const MatmulKernels kMatmulKernelsBf16 = {matmul_bf16::kGroup,
                                          sizeof(matmul_bf16::BFloat),
                                          matmul_bf16::pack_weights,
                                          matmul_bf16::multiply_of<matmul_bf16::BFloat>,
                                          2,
                                          matmul_bf16::pack_rows,
                                          matmul_bf16::weight_grad};
}  // namespace sbnet
#endif

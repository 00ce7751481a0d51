// The instruction-set dependent half of block-sparse attention on the CPU, as plain functions behind a table.
//
// Every pass has a side that stays and a side that goes by. Up to 32 positions stay, as the lanes of vectors: queries
// in the forward and for dQ, keys for dK and dV. Up to 64 positions at a time go by, as rows of float32 [row][dim], and
// scores are [row][lane]; what the pass sums is [lane][dim].
#pragma once
#include "core/attention/attention.h"

namespace sbnet {

constexpr int kAttentionLanes = 32;
constexpr int kAttentionRows = 64;

struct AttentionStep {
  int64_t count;                     // rows
  int32_t at[kAttentionRows];        // their positions
  uint32_t visible[kAttentionRows];  // bit l: do row i and lane l see each other?
  uint32_t kept[kAttentionRows];     // bit l: not dropped
  bool masked, drops;                // are there bits to look at?
};

// What a query's softmax became: weight = exp(score - largest) * factor.
struct AttentionRow {
  float largest, factor, delta;
};

struct AttentionKernels {
  int64_t width;  // dims are padded to multiples of this
  // Rows at[0 ... count) of data[.][stride] as [count, rounded up to 8][padded], zeros beyond.
  void (*pack_rows)(DType dtype, const void* data, int64_t stride, const int32_t* at, int64_t count, int64_t dim,
                    int64_t padded, float* to);
  // The first `count` rows, transposed: [dim][32], zeros beyond.
  void (*pack_lanes)(DType dtype, const void* data, int64_t stride, int64_t count, int64_t dim, float* to);
  // to[row][lane] = rows . lanes
  void (*multiply)(const float* rows, int64_t count, const float* lanes, int64_t dim, int64_t padded, float* to);
  // sums[lane][dim] += sum over rows of weights[row][lane] * rows[row][dim]
  void (*accumulate)(const float* weights, const float* rows, int64_t count, int64_t lanes, int64_t padded,
                     float* sums);
  // Scores to exp(scale * score - largest so far), dropped ones to 0; largest, total and sums[lane] brought up to date.
  void (*softmax)(const AttentionStep& step, float scale, int64_t lanes, int64_t padded, float* scores, float* largest,
                  float* total, float* sums);
  // Scores to weights (dropped and scaled by `keep`), grads (of weights) to those of scaled scores. `queries` holds
  // those of lanes or those of rows.
  void (*softmax_grad)(const AttentionStep& step, float scale, float keep, bool queries_are_lanes,
                       const AttentionRow* queries, float* scores, float* grads);
  // data[lane][0 ... dim) = factors[lane] * sums[lane]
  void (*store_lanes)(DType dtype, void* data, int64_t stride, int64_t count, int64_t dim, int64_t padded,
                      const float* factors, const float* sums);
  // The sum over dims of a[i] * b[i].
  float (*dot)(DType dtype, const void* a, const void* b, int64_t dim);
};

// Those of the instruction set that is in use.
const AttentionKernels& attention_kernels();

extern const AttentionKernels kAttentionKernelsGeneric;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionKernelsAvx2;
extern const AttentionKernels kAttentionKernelsAvx512;
#endif

}  // namespace sbnet

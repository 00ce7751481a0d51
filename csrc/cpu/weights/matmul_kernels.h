// The instruction-set dependent half of products with block-sparse weights on the CPU, as plain functions behind a
// table.
//
// Forward and input gradient. A task is a tile of rows and some output blocks. It packs its rows of x as float32 panels
// [group of rows][feature][row], so that a microkernel reads the rows of a group at constant offsets; weights are
// float32 blocks [input feature][output feature]: the tensor itself where it is that, else a copy in the workspace.
// Where a processor multiplies pairs of 16 bits, both are packed as those instead (matmul_pairs.h).
//
// Weight gradient. A task is some blocks; rows go by in chunks, packed as float32 [row][feature].
#pragma once
#include "core/weights/matmul.h"

namespace sbnet {

constexpr int64_t kMatmulRows = 192;           // of a tile, at most
constexpr int64_t kMatmulTileBytes = 2 << 20;  // of its packed rows
constexpr int64_t kMatmulDepth = 256;          // products summed in a row: longer sums are added up from parts

// Inline functions of core stay out of kernels (cpu/simd/isa.h): what they compute comes in the tasks.
struct MatmulTask {
  int64_t in_blocks, in_features, out_features;
  const int32_t *start, *entries;  // of output blocks
  const void* weight;              // blocks of [input feature][output feature]
  void* x;                         // packed rows
  int64_t* x_rows;                 // [kMatmulRows] offsets, -1: no row
  int64_t* y_rows;
  int64_t rows;                    // of the tile
  int64_t first_block, end_block;  // output blocks
};

struct WeightGradTask {
  float *x, *dy;    // packed chunks of kMatmulDepth rows of one block
  float* sums;      // [block_size, block_size]
  int64_t* x_rows;  // [kMatmulDepth] offsets
  int64_t* dy_rows;
  int64_t rows[kMaxWeightGradPairs];  // of each pair
  int64_t first_block, end_block;
};

// Offsets of rows first ... first + count in two matrices, -1 for a row that is no pixel.
void list_rows(const TensorView& a, const TensorView& b, const ActiveView& active, int64_t first, int64_t count,
               int64_t* a_rows, int64_t* b_rows);

struct MatmulKernels {
  int64_t group;          // rows of a microkernel
  int64_t element_bytes;  // of packed rows and weights
  // Blocks [begin, end), gates multiplied in.
  void (*pack_weights)(const BlocksparseMatmulParams& p, void* packed, int64_t begin, int64_t end);
  void (*multiply)(const BlocksparseMatmulParams& p, const MatmulTask& task);
  void (*weight_grad)(const BlocksparseWeightGradParams& p, const WeightGradTask& task);
};

extern const MatmulKernels kMatmulKernelsGeneric;
#if defined(__x86_64__)
extern const MatmulKernels kMatmulKernelsAvx2;
extern const MatmulKernels kMatmulKernelsAvx512;
extern const MatmulKernels kMatmulKernelsBf16;  // bfloat16, blocks of 16 and more, forward and input gradient alone
#endif
#if defined(SBNET_AMX)
extern const MatmulKernels kMatmulKernelsAmx;  // 16-bit elements, as above
#endif

}  // namespace sbnet

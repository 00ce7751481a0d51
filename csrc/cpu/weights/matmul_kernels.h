// The instruction-set dependent half of products with block-sparse weights on the CPU, as plain functions behind a
// table.
//
// Forward and input gradient. A task is a tile of rows and some output blocks. It packs its rows of x as float32 panels
// [group of rows][feature][row], so that a microkernel reads the rows of a group at constant offsets; weights are
// float32 blocks [input feature][output feature]: the tensor itself where it is that, else a copy in the workspace.
// Where a processor multiplies pairs of 16 bits, both are packed as those instead (matmul_pairs.h).
//
// Weight gradient. Rows of x and dy are packed once for all blocks, a panel for each block of features: as float32
// [row][feature], or in pairs of 16 bits. A task is some blocks.
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
  const char *x, *dy;   // panels of the blocks of features
  int64_t panel_bytes;  // of one
  int64_t rows;         // in each: whole steps
  float* sums;          // [block_size, block_size], of each block or of this one
  bool sums_of_all;
  bool first, last;  // of the slabs of rows: sums begin, gradients are written
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
  int64_t grad_step;  // rows of a panel come in so many
  // Whole steps of rows of a panel, features of a block from `feature` on: zeros for rows -1 and beyond the last
  // feature.
  void (*pack_rows)(const TensorView& t, const int64_t* rows, int64_t count, int64_t feature, int64_t size, bool left,
                    void* to);
  void (*weight_grad)(const BlocksparseWeightGradParams& p, const WeightGradTask& task);
};

extern const MatmulKernels kMatmulKernelsGeneric;
#if defined(__x86_64__)
extern const MatmulKernels kMatmulKernelsAvx2;
extern const MatmulKernels kMatmulKernelsAvx512;
extern const MatmulKernels kMatmulKernelsBf16;  // bfloat16, blocks of 16 and more
#endif
#if defined(SBNET_AMX)
extern const MatmulKernels kMatmulKernelsAmx;  // 16-bit elements, as above
#endif

}  // namespace sbnet

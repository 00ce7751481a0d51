// The layout of block-sparse weights: which blocks of a matrix W [C, K] are stored, and the look-up tables over them.
//
// W is cut into block_size x block_size blocks: block_rows of them along C (inputs), block_columns along K (outputs).
// The stored ones are numbered 0 ... blocks-1 in the order of the weight tensor [blocks, block_size, block_size], each
// block [c, k]. The tables are one int32 array, made on the host once per layout and copied to each device:
//
//   coords          [blocks, 2]          (block row, block column) of block b
//   column_start    [block_columns + 1]  entries of block column k: column_start[k] ... column_start[k + 1]
//   column_entries  [blocks, 2]          (block row, b), ascending block rows: what x . W reads
//   row_start       [block_rows + 1]
//   row_entries     [blocks, 2]          (block column, b), ascending block columns: what dy . W^T reads
//
// A plan (below) is what a kernel needs beyond them; also int32, made once, and private to that kernel.
#pragma once
#include "core/types.h"

namespace sbnet {

constexpr int64_t kMaxBlockWeights = int64_t{1} << 40;  // elements of a weight tensor

// 8, 16, 32, 64 or 128.
constexpr bool is_weight_block_size(int64_t s) { return s >= 8 && s <= 128 && (s & (s - 1)) == 0; }

// Sizes alone: what a binding knows without reading the tables.
struct BlockLayoutShape {
  int64_t block_rows, block_columns, blocks;
  int64_t in_features, out_features;  // C and K; the last block row (column) may reach beyond them
  int32_t block_size;
};

struct BlockLayoutView {
  BlockLayoutShape shape;
  const int32_t* coords;
  const int32_t* column_start;
  const int32_t* column_entries;
  const int32_t* row_start;
  const int32_t* row_entries;
  // The tables lie on the device, where the host cannot check them: kernels skip entries that name no block, clamp the
  // starts, and never follow a number out of bounds. See entry_of() in the kernels.
};

// Block size, counts, features against blocks; everything that does not depend on the tables' contents.
SBNET_EXPORT Status validate(const char* op, const BlockLayoutShape& s);
// Int32 words of the tables.
SBNET_EXPORT int64_t block_layout_words(const BlockLayoutShape& s);
// The five parts of tables at `words`, on whichever device they are.
SBNET_EXPORT BlockLayoutView block_layout_view(const BlockLayoutShape& s, const int32_t* words);
// Fills `words` (host, block_layout_words()) from coords [blocks, 2] (host). Refuses blocks outside the matrix and
// blocks named twice. Order of coords is the order of the weights and is kept.
SBNET_EXPORT Status make_block_layout(const BlockLayoutShape& s, const int32_t* coords, int32_t* words);

// What a plan is for.
enum class MatmulPass : int32_t { kForward, kInputGradient, kWeightGradient };

// The static plan of the Hopper kernels: union look-up tables per output tile with masks, most work first, for every
// tile shape that a kernel may choose at the call. It depends on the layout alone: not on the number of rows, the dtype
// or the device, so that it can be made before any of them is known. Zero words: there is none, and portable kernels
// serve the layout. `host` is a view whose tables lie in host memory.
SBNET_EXPORT int64_t blocksparse_plan_words(const BlockLayoutView& host, MatmulPass pass);
SBNET_EXPORT void make_blocksparse_plan(const BlockLayoutView& host, MatmulPass pass, int32_t* words);

}  // namespace sbnet

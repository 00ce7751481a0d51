// Tokens of a plane, packed: the active pixels of each image side by side in raster order, between rows that are always
// there (class token, registers); and copies of rows between such an order and others.
#pragma once
#include "core/kernels.h"

namespace sbnet {

// Which tokens each image has, and where they lie.
struct PackTokensParams {
  const int32_t* block_map;  // [batch, grid.count...]
  BlockGrid grid;            // any grid of the plane
  int64_t batch;
  int32_t height, width, prefix, suffix;  // tokens: prefix, then height * width pixels, then suffix
  int32_t capacity;                       // rows, at least as many as tokens
  int32_t* lengths;                       // [batch] rows that hold tokens
  int64_t* order;                         // [batch, capacity] which token each row holds, 0 behind them
  int64_t* rows;                          // [batch, tokens] the row of each active token; of others any row
  uint8_t* mask;                          // [batch, tokens] active tokens
  uint8_t* filled;                        // [batch, capacity] rows that hold tokens

  SBNET_HOST_DEVICE int64_t tokens() const { return int64_t{prefix} + int64_t{height} * width + suffix; }
};

// [images, rows, channels], elements of a row beside each other; strides in elements.
struct Rows {
  void* data;
  int64_t images, rows, image_stride, row_stride;
};

// Copies rows of `channels` elements: row r of image n, below lengths[n], becomes
//   zeros where mask says that it is not there, or, with keep, what it is;
//   a row of `table`: the first `start` of them before all others, the rest after, ending at lengths[n];
//   else row index[n,r] of x, or r - start beside a table, or r + start without.
// Rows from lengths[n] on keep what they hold, or, with clear, become zeros. x and table with one image serve all.
struct MoveRowsParams {
  Rows x, table, out;  // table.data null: none
  int64_t channels;
  int32_t element_bytes;   // 2 or 4
  const int64_t* index;    // [out.images, out.rows] or null
  const int32_t* lengths;  // [out.images] or null: all rows
  const uint8_t* mask;     // [out.images, out.rows] or null
  int64_t start;
  bool keep, clear;

  SBNET_HOST_DEVICE int64_t length(int64_t n) const { return lengths ? lengths[n] : out.rows; }
  SBNET_HOST_DEVICE bool stays(int64_t n, int64_t r) const {
    return r >= length(n) ? !clear : keep && mask && !mask[n * out.rows + r];
  }
};

// Rows that are patches of an image: row r of image n, below lengths[n], becomes the numbers of patch index[n,r] of x,
// in the order of a convolution's weight [channels, height, width]. Rows from lengths[n] on keep what they hold, or,
// with clear, become zeros.
struct PackPatchesParams {
  TensorView x;  // [N, C, H, W], any strides
  Rows out;      // of C * patch[0] * patch[1] elements
  int32_t patch[2];
  const int64_t* index;
  const int32_t* lengths;
  bool clear;
};

// out[n, s * C + c, i, j] = x[n, c, i * factor + offsets[s][0], j * factor + offsets[s][1]] where (i, j) is active;
// other pixels keep what they hold.
inline constexpr int kMostOffsets = 16;
struct MergePixelsParams {
  TensorView x, out;  // channels_last
  const int32_t* block_map;
  BlockGrid grid;  // tiles the plane of out
  int32_t factor, count;
  int32_t offsets[kMostOffsets][2];
};

SBNET_EXPORT Status validate(const PackTokensParams& p);
SBNET_EXPORT Status validate(const MoveRowsParams& p);
SBNET_EXPORT Status validate(const PackPatchesParams& p);
SBNET_EXPORT Status validate(const MergePixelsParams& p);

// Does a block of the grid that is active cover a pixel?
SBNET_HOST_DEVICE inline bool covered(const int32_t* map, const BlockGrid& g, int32_t y, int32_t x) {
  int32_t first[2], last[2];
  const int32_t at[2] = {y, x};
  for (int d = 0; d < 2; ++d) {
    const int64_t from = int64_t{at[d]} - g.offset[d], over = from - g.size[d];
    if (from < 0) return false;
    first[d] = over < 0 ? 0 : static_cast<int32_t>(over / g.stride[d]) + 1;
    const int64_t end = from / g.stride[d];
    last[d] = static_cast<int32_t>(end < g.count[d] ? end : g.count[d] - 1);
  }
  for (int32_t i = first[0]; i <= last[0]; ++i)
    for (int32_t j = first[1]; j <= last[1]; ++j)
      if (map[int64_t{i} * g.count[1] + j] >= 0) return true;
  return false;
}

// The row of x or of the table that row r of image n becomes; null: zeros.
template <class T>
SBNET_HOST_DEVICE const T* source_of(const MoveRowsParams& p, int64_t n, int64_t r) {
  const int64_t length = p.length(n);
  if (r >= length) return nullptr;
  const auto at = [&](const Rows& rows, int64_t row) -> const T* {
    if (row < 0 || row >= rows.rows) return nullptr;
    return static_cast<const T*>(rows.data) + (rows.images > 1 ? n : 0) * rows.image_stride + row * rows.row_stride;
  };
  if (p.mask && !p.mask[n * p.out.rows + r]) return nullptr;
  if (p.table.data) {
    const int64_t tail = length - (p.table.rows - p.start);
    if (r < p.start) return at(p.table, r);
    return r >= tail ? at(p.table, p.start + r - tail) : at(p.x, r - p.start);
  }
  return at(p.x, p.index ? p.index[n * p.out.rows + r] : r + p.start);
}

}  // namespace sbnet

SBNET_DECLARE(pack_tokens, PackTokensParams)
SBNET_DECLARE(move_rows, MoveRowsParams)
SBNET_DECLARE(pack_patches, PackPatchesParams)
SBNET_DECLARE(merge_pixels, MergePixelsParams)

// Attention within windows of a plane, among its active pixels: out = softmax(scale q k^T + bias) v of each window, for
// the rows of windows that are active pixels. Keys that are not active do not exist, keys of padding do. A row whose
// window has no key gets zeros. What is not active is neither read nor written.
#pragma once
#include "core/kernels.h"

namespace sbnet {

// Most keys of a window on CUDA, where kernels list them in shared memory.
inline constexpr int32_t kMostWindowKeys = 8192;

// Numbers of an optional tensor, float32 or of the op's dtype.
struct WindowNumbers {
  const void* data;  // null: none
  DType dtype;
};

struct WindowAttentionParams {
  TensorView q, k,
      v;              // [N, C, H, W] channels_last, float32, float16 or bfloat16; k and v of one plane, perhaps not q's
  TensorView out;     // [N, heads * value_dim, H, W] channels_last, the plane of q; overlaps none of them
  int64_t starts[3];  // the first channels of q, k and v
  int32_t heads, dim, value_dim;
  int32_t windows, rows, keys;  // of an image; rows and keys of a window
  const int64_t* row_index;     // [windows, rows] the pixel of each row from 1 on, h * W + w + 1; 0: padding
  const int64_t* key_index;     // [windows, keys] the same of keys; whatever points past the plane is padding
  const int32_t* block_map;     // [N, count...] of grid: active pixels of q's plane, and of k's
  BlockGrid grid;               // tiles q's plane
  const uint8_t* active_keys;   // [N, pixels of k] bool, or null: by block_map
  // Of one window of all pixels in their order: [N, capacity] the active ones, as pack_tokens lists them, or null.
  struct Listed {
    const int64_t* order;
    const int32_t* lengths;
    int64_t capacity;
  } listed_rows, listed_keys;
  WindowNumbers bias;    // [1 or windows, heads, rows, keys]
  int64_t bias_windows;  // 1 or windows
  const void *row_table,
      *column_table;                  // [R,R,dim] and [C,C,dim] of q's dtype, R C = rows = keys, or null: the bias of
  int32_t table_rows, table_columns;  // row i C + j for key k C + l is q . (row_table[i,k] + column_table[j,l])
  WindowNumbers scales;               // [heads] by which scores are multiplied before the bias is added
  const void *k_fill, *v_fill;        // [heads * dim], [heads * value_dim] of q's dtype: keys of padding; null: zeros
  float scale;
  float normalize;  // queries and keys are divided by their length, or by this where that is more; 0: they are not

  SBNET_HOST_DEVICE int32_t queries() const { return static_cast<int32_t>(q.size[2] * q.size[3]); }
  SBNET_HOST_DEVICE int32_t pixels_of_keys() const { return static_cast<int32_t>(k.size[2] * k.size[3]); }
  // Elements from a pixel to the next of an image.
  SBNET_HOST_DEVICE static int64_t stride(const TensorView& t) {
    return t.size[3] > 1 ? t.stride[3] : t.size[2] > 1 ? t.stride[2] : t.size[1];
  }
};

// Shared memory of a CTA of CUDA's kernels, in bytes: where each part begins. Tensor cores (float16, bfloat16) hold
// queries and stages of keys and values; float32 holds chunks of both sides, weights, and chunks of values.
struct WindowTile {
  static constexpr int32_t kKeys = 64, kSums = 8;
  int32_t rows, stages, pixels, places, row_factors, key_pixels, key_factors, sums, list;

  SBNET_HOST_DEVICE static constexpr WindowTile of_halves(int32_t rows, int32_t dim, int32_t stages = 2) {
    return parts(rows, rows * dim * 2, stages * 2 * kKeys * dim * 2);
  }
  // [64][33] of queries and of keys, [64][65] of weights, [32][128] of values
  SBNET_HOST_DEVICE static constexpr WindowTile of_floats() {
    return parts(64, 2 * 64 * 33 * 4, 64 * 65 * 4 + 32 * 128 * 4);
  }

  // The list of keys has two bytes each; behind it, products with tables.
  SBNET_HOST_DEVICE constexpr int32_t relative(int32_t keys) const { return list + (keys * 2 + 15) / 16 * 16; }
  // Of a row of products: eight rows of them, a few columns apart, lie in different banks.
  SBNET_HOST_DEVICE static constexpr int32_t relative_stride(int32_t table_rows, int32_t table_columns) {
    return (table_rows + table_columns + 23) / 32 * 32 + 8;
  }
  SBNET_HOST_DEVICE constexpr int32_t bytes(int32_t keys, int32_t table_rows, int32_t table_columns) const {
    const bool tables = table_rows || table_columns;
    return relative(keys) + (tables ? rows * relative_stride(table_rows, table_columns) * 4 : 0);
  }

 private:
  SBNET_HOST_DEVICE static constexpr WindowTile parts(int32_t rows, int32_t stages, int32_t rest) {
    WindowTile t = {};
    t.rows = rows, t.stages = stages, t.pixels = stages + rest;
    t.places = t.pixels + rows * 4, t.row_factors = t.places + rows * 4, t.key_pixels = t.row_factors + rows * 4;
    t.key_factors = t.key_pixels + kKeys * 4, t.sums = t.key_factors + kKeys * 4, t.list = t.sums + kSums * 4;
    return t;
  }
};

// What a CTA has on every GPU since sm_80; sides of tables, of which two make a place of 16 bits.
inline constexpr int32_t kWindowShared = 99 * 1024, kMostTableSide = 256;

SBNET_EXPORT Status validate(const WindowAttentionParams& p);
// The same of what CUDA's kernels need besides.
SBNET_EXPORT Status validate_on_cuda(const WindowAttentionParams& p);

}  // namespace sbnet

SBNET_DECLARE(window_attention, WindowAttentionParams)
// Do CUDA's kernels take heads and windows of these numbers? The CPU's takes all.
extern "C" SBNET_EXPORT int32_t sbnet_window_attention_takes(int32_t is_float, int32_t dim, int32_t value_dim,
                                                             int32_t keys, int32_t table_rows, int32_t table_columns);

// Convolutions with block-sparse weights, 1-D to 3-D: layout, parameters, validation, workspace.
//
// A block maps a list of input channels to a list of output channels; its filter is [outputs, inputs, T, R, S], and the
// filters of all blocks lie one after the other. Lists may overlap between blocks: contributions add up.
//   forward          y[n, k, o] = activation(bias[k] + sum over blocks with k, their channels c and taps t of
//                                  w[block, k, c, t] x[n, c, o * stride - padding + t * dilation])
//   transposed       the exact transpose, from y's side to x's: the gradient of x, and the transposed convolution
//   weight gradient  dw[block, k, c, t] = sum over n, o of dy[n, k, o] x[n, c, o * stride - padding + t * dilation]
//
// The tables are one int32 array, made on the host once per layout and copied to each device:
//
//   header    [kConvLayoutNumbers]   the numbers of BlocksparseConvShape
//   blocks    [blocks, 5]            where the inputs begin in `lists`, how many; the same of the outputs; first weight
//   lists     [list_words]           channels
//   and for each side, outputs first: channels that are in the same blocks form groups of up to 32
//   start     [groups + 1]           entries of a group
//   channels  [groups, 32]           or -1
//   block     [entries]              a block that these channels are in
//   position  [entries, 32]          of each of the channels in the block's list
// and where blocks are squares of a grid, block_size to a side, for each side what the Hopper kernel follows: tiles of
// conv_tile_width() outputs, and the pieces of up to 64 neighbouring inputs that a tile multiplies
//   start     [tiles + 1]            pieces of a tile
//   order     [tiles]                tiles, those of most steps first
//   pieces    [pieces]: [1] first input, [1] steps of 16 inputs, 1 to 4, [1] the place of the tile's first output in
//             its block, [width / 16][4] the block of 16 outputs and of a step, or -1
#pragma once
#include <vector>

#include "core/activation.h"
#include "core/kernels.h"
#include "core/masked/conv.h"
#include "core/types.h"

namespace sbnet {

constexpr int kConvGroup = 32;
constexpr int kConvLayoutNumbers = 13;

// Sizes alone: what a binding knows without reading the tables. Side 0 is the outputs, side 1 the inputs.
struct BlocksparseConvShape {
  int64_t channels[2];  // K, C
  int64_t taps, blocks, list_words, weights;
  int64_t groups[2], entries[2];
  int64_t block_size, pieces[2];  // 0: blocks are no squares of a grid, 16 to 128 channels to a side, each there once
};

struct BlocksparseConvSide {
  const int32_t *start, *channels, *block, *position;
  const int32_t *piece_start, *tile_order, *pieces;
};

struct BlocksparseConvLayout {
  BlocksparseConvShape shape;
  const int32_t *blocks, *lists;
  BlocksparseConvSide side[2];
};

// Outputs of a tile: the wider, the cheaper a product, and the more zeros are multiplied.
int conv_tile_width(const BlocksparseConvShape& s);
inline int64_t conv_tiles(const BlocksparseConvShape& s, int side) {
  return (s.channels[side] + conv_tile_width(s) - 1) / conv_tile_width(s);
}
constexpr int kPieceHead = 3;
SBNET_HOST_DEVICE constexpr int conv_piece_words(int width) { return kPieceHead + width / 4; }

// One block as a kernel reads it.
struct BlocksparseConvBlock {
  const int32_t* list[2];  // outputs, inputs
  int32_t count[2];
  int64_t weight;  // element of the first
};

// Block b, or one without channels where the tables, which are not checked on a device, do not name a block.
SBNET_HOST_DEVICE inline BlocksparseConvBlock conv_block(const BlocksparseConvLayout& layout, int64_t b) {
  if (b < 0 || b >= layout.shape.blocks) return {{layout.lists, layout.lists}, {0, 0}, 0};
  const int32_t* v = layout.blocks + b * 5;
  const int64_t words = layout.shape.list_words;
  const bool good = v[0] >= 0 && v[1] >= 0 && int64_t{v[0]} + v[1] <= words && v[2] >= 0 && v[3] >= 0 &&
                    int64_t{v[2]} + v[3] <= words && v[4] >= 0 &&
                    v[4] + int64_t{v[1]} * v[3] * layout.shape.taps <= layout.shape.weights;
  if (!good) return {{layout.lists, layout.lists}, {0, 0}, 0};
  return {{layout.lists + v[2], layout.lists + v[0]}, {v[3], v[1]}, v[4]};
}

// A 5-D tensor, logically N, C, D, H, W whatever its memory order; strides in elements.
struct VolumeView {
  void* data;
  int64_t size[5];
  int64_t stride[5];
  DType dtype;
};

struct ConvGeometry {
  int32_t kernel[3], stride[3], padding[3], dilation[3];
};

struct BlocksparseConvParams {
  VolumeView x;        // [N, in, ...] float32, float16 or bfloat16, any strides; in = C, or K when transposed
  VolumeView y;        // [N, out, ...] of x.dtype, any strides; its own memory
  const void* weight;  // [weights] of x.dtype
  const void* packed;  // null, or what pack_blocksparse_filters made of weight as it is now. Hopper alone
  const void* bias;    // [out] contiguous or null
  DType bias_dtype;    // x.dtype or float32
  BlocksparseConvLayout layout;
  ConvGeometry geometry;
  ActiveView active;  // not given: all of y. Otherwise the pixels of active blocks alone are written; one D plane.
  bool transposed;
  Activation activation;
  float activation_param;

  // The side that is written, and the one that is read.
  SBNET_HOST_DEVICE int to() const { return transposed ? 1 : 0; }
  SBNET_HOST_DEVICE int from() const { return transposed ? 0 : 1; }
};

// Filters in the order in which Hopper's kernels read them.
struct BlocksparsePackParams {
  const void* weight;  // [weights] float16 or bfloat16
  void* packed;        // sbnet_blocksparse_packed_bytes_cuda()
  DType dtype;
  BlocksparseConvLayout layout;
  bool transposed;
  SBNET_HOST_DEVICE int to() const { return transposed ? 1 : 0; }
};

struct BlocksparseConvWeightGradParams {
  VolumeView x;   // [N, C, D, H, W]
  VolumeView dy;  // [N, K, M, P, Q] of x.dtype
  void* dw;       // [weights] of x.dtype
  BlocksparseConvLayout layout;
  ConvGeometry geometry;
};

// The coordinate that tap t of output o reads along axis d, or -1: within `size`, else none.
SBNET_HOST_DEVICE inline int64_t conv_source(const ConvGeometry& g, bool transposed, int d, int64_t o, int64_t t,
                                             int64_t size) {
  int64_t at;
  if (transposed) {
    at = o + g.padding[d] - t * g.dilation[d];
    if (at < 0 || at % g.stride[d]) return -1;
    at /= g.stride[d];
  } else {
    at = o * g.stride[d] - g.padding[d] + t * g.dilation[d];
  }
  return at >= 0 && at < size ? at : -1;
}

struct VolumePosition {
  int64_t n, at[3];  // n < 0: none
};

// Positions in which a kernel can meet y: for active blocks those of the whole capacity, clipped pixels included.
SBNET_HOST_DEVICE inline int64_t position_capacity(const VolumeView& y, const ActiveView& active) {
  return active.given() ? active.capacity * active.grid.size[0] * active.grid.size[1]
                        : y.size[0] * y.size[2] * y.size[3] * y.size[4];
}

SBNET_HOST_DEVICE inline VolumePosition position_of(const VolumeView& y, const ActiveView& active, int64_t i) {
  if (!active.given()) {
    const int64_t row = i / y.size[4], plane = row / y.size[3];
    return {plane / y.size[2], {plane % y.size[2], row % y.size[3], i % y.size[4]}};
  }
  const BlockGrid& grid = active.grid;
  const int64_t pixels = int64_t{grid.size[0]} * grid.size[1], pixel = i % pixels;
  const int32_t* block = active.indices + i / pixels * 3;
  const int64_t row = int64_t{block[1]} * grid.size[0] + pixel / grid.size[1];
  const int64_t column = int64_t{block[2]} * grid.size[1] + pixel % grid.size[1];
  const bool inside =
      block[0] >= 0 && block[0] < y.size[0] && block[1] >= 0 && row < y.size[3] && block[2] >= 0 && column < y.size[4];
  return {inside ? block[0] : -1, {0, row, column}};
}

SBNET_HOST_DEVICE inline int64_t volume_offset(const VolumeView& t, const VolumePosition& p) {
  return p.n * t.stride[0] + p.at[0] * t.stride[2] + p.at[1] * t.stride[3] + p.at[2] * t.stride[4];
}

// Everything that does not depend on the tables' contents.
SBNET_EXPORT Status validate(const char* op, const BlocksparseConvShape& s);
SBNET_EXPORT Status validate(const BlocksparseConvParams& p);
SBNET_EXPORT Status validate(const BlocksparseConvWeightGradParams& p);
// Why the Hopper kernel does not take p, which is valid; null: it does.
const char* hopper_blocksparse_conv_declines(const BlocksparseConvParams& p);
// p as a convolution of planes, on the active blocks or a block an image: lists and weights that are still to come are
// null. A transposed convolution of stride 1 is one with the taps in opposite order.
Conv2dParams conv_of_planes(const BlocksparseConvParams& p);
// Do the tables, in host memory, name nothing that is not there?
Status check_tables(const char* op, const BlocksparseConvLayout& host);

SBNET_EXPORT int64_t conv_layout_words(const BlocksparseConvShape& s);
SBNET_EXPORT BlocksparseConvLayout conv_layout_view(const BlocksparseConvShape& s, const int32_t* words);
SBNET_EXPORT BlocksparseConvShape conv_layout_shape(const int64_t* numbers);  // kConvLayoutNumbers of a header

// The part for the Hopper kernel of tables whose other parts are there: block_size and pieces of `shape` are filled in.
void append_conv_pieces(const BlocksparseConvLayout& layout, BlocksparseConvShape* shape, std::vector<int32_t>* tables);

// Tables from `lists`: of each block the numbers of its inputs and outputs, the inputs, the outputs. Refuses channels
// outside C and K, channels named twice in a list, and channels that no block has.
SBNET_EXPORT Status make_conv_layout(const int32_t* lists, int64_t words, int64_t inputs, int64_t outputs, int64_t taps,
                                     std::vector<int32_t>* tables);

}  // namespace sbnet

SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(blocksparse_conv, BlocksparseConvParams)
extern "C" {
// Of filters of a layout, given by its kConvLayoutNumbers numbers. 0 where the current device reads filters as they
// are, and none are to be packed.
SBNET_EXPORT int64_t sbnet_blocksparse_packed_bytes_cuda(const int64_t* layout, sbnet::DType dtype, bool transposed);
SBNET_EXPORT sbnet::Status sbnet_pack_blocksparse_filters_cuda(const sbnet::BlocksparsePackParams* p, void* stream);
}
SBNET_DECLARE_WITH_WORKSPACE_OF_DEVICE(blocksparse_conv_weight_grad, BlocksparseConvWeightGradParams)

// How the CPU convolution cuts its work. Nothing here depends on the thread count except the number of scratch areas:
// the order in which a pixel's products are summed, and so its bits, never changes.
//
// A tile is at most kTilePixels output pixels: a part of one big block, or several small blocks ("rects"). For a tile,
//   for each chunk of input channels, for each group of kernel taps:
//     copy the input that these taps read into a patch (zero-padded, channels innermost; float32, or 16 bits for AMX),
//     for each panel of output channels: add its products to the float32 accumulators, some pixels at a time.
// Chunk and tap group are sized so that patch and weight slice stay in the L1 cache. A 1x1 convolution of float32 in
// channels-last memory has no use for a patch: its products read x itself, many channels in a row.
#pragma once
#include "core/masked/conv_quantized.h"
#include "cpu/masked/conv_panels.h"

namespace sbnet {

constexpr int kMicroPixels = 6;
constexpr int kTilePixels = 256;
constexpr int kTileCapacity = (kTilePixels + kMicroPixels - 1) / kMicroPixels * kMicroPixels;
constexpr int kMaxAxisTaps = 8;         // taps of one axis in a group: as many as are left, at most these
constexpr int kMaxSliceChannels = 512;  // of a slice without a patch
constexpr int kTagBytes = 128;

// Output pixels [row, row+height) x [column, column+width) of image n, inside the plane.
struct ConvRect {
  int64_t n, row, column;
  int32_t height, width;
};

// Taps [first, first+taps) of one axis, and the input coordinates that they read for `extent` outputs. Output o of tap
// t is patch slot tap_slot[t] + o * output_step. Without dilation, and with as many taps as the stride, every
// coordinate is read: the slots are simply the inputs in a row. Otherwise each segment keeps only what is read, every
// stride-th.
struct AxisTaps {
  int32_t first, taps, slots, segments;
  int64_t output_step, input_step;
  int32_t tap_slot[kMaxAxisTaps];
  struct Segment {
    int32_t slot, count;  // slots [slot, slot+count) hold ...
    int64_t coordinate;   // ... inputs coordinate + i*input_step, counted from the first output's first tap
  } segment[kMaxAxisTaps];
};

// How a convolution is computed: conv_select.cpp says which takes which.
enum class ConvWay : int32_t {
  kFloat8,           // as float32, of a copy (conv_float8.cpp)
  kInt8Amx,          // conv_int8_amx.cpp
  kInt8,             // conv_int8.h
  kAmx,              // conv_amx.cpp
  kWinograd,         // conv_winograd.h
  kLanewiseInPlace,  // conv_lanewise.h: reads x where it is
  kNarrow,           // conv_narrow.h
  kInPlace,          // 1x1: the microkernels read x where it is, there are no patches
  kLanewise,         // by patches
  kDirect
};

// How the work is cut for an instruction set.
struct ConvShape {
  int32_t lanes, vectors;  // floats per vector, vectors per panel of output channels
  int32_t depth;           // input channels that one product sums
  int32_t element_bytes;   // of patches and packed weights
  int32_t row_pixels;      // > 0: accumulators are kept in runs of at most so many neighbours of a pixel row
};

// What packed weights were made for. They begin with it; equal tags are equal layouts.
struct PackTag {
  char name[8];
  ConvShape shape;
  DType dtype;
  int32_t groups, reserved;
  int64_t size[4];
};
static_assert(sizeof(PackTag) == 72 && sizeof(PackTag) <= kTagBytes, "compared byte by byte");

// How weights are packed: it follows from the weights and the instruction set alone, not from planes and blocks.
struct ConvLayout {
  TensorView weight;
  bool lanewise;        // lanes read input channels of their own: depthwise, and groups narrower than a vector
  int64_t groups;       // 1 for lanewise: its panels span the groups
  int64_t group_in;     // input channels summed per output channel
  int64_t group_out;    // output channels per group
  int64_t chunk;        // input channels per chunk, at most
  int64_t stored_in;    // group_in, filled up to whole products
  int32_t lanes;        // floats per vector
  int32_t panel_width;  // output channels per panel
  int64_t panels;       // per group
  int64_t last_width;   // of the last panel: a multiple of `lanes`
  bool direct;          // the weights are kept in the order of the direct way
  bool winograd;        // ... and in Winograd's form (conv_winograd.h)
  int64_t winograd_at;  // where that begins, in elements
  bool narrow;          // ... and in the form of few output channels (conv_narrow.h)
  int64_t narrow_at;    // where that begins, in elements
  int64_t offsets_at;   // of int8 weights: where what to add to the sum of each output channel begins, in bytes
  int64_t bytes;
  PackTag tag;

  // Not inline: see isa.h.
  int64_t width_of_panel(int64_t panel) const;
  int64_t taps() const;
  // Where a panel's packed weights begin, in elements.
  int64_t panel_offset(int64_t group, int64_t panel) const;
  int64_t winograd_offset(int64_t panel) const;
  // Of a square of 2x2 outputs by Winograd's way, for each pair of channels.
  int64_t winograd_products() const;
};

struct ConvPlan : ConvLayout {
  Conv2dParams p;
  const QuantizedConv2dParams* quantized;  // p with its scales; null of floats
  float per_unit;                          // integers that 1 of a float x is
  int64_t patch_channels;                  // elements per patch slot: chunk, or the panel width for lanewise
  ConvWay way;
  int64_t job_panels;                 // panels per job, at most
  int32_t tile[2];                    // tile height and width
  int64_t tiles[2];                   // tiles per block
  int64_t rects_per_tile;             // small blocks share a tile
  int64_t rect_slots;                 // patch slots per rect, at most
  int64_t sum_rows;                   // accumulators per panel of a job, in pixels
  const WinogradPanel* block_panels;  // of block-sparse weights in Winograd's form: [panels]; null of dense ones
  int64_t squares;                    // of Winograd's: squares of 2x2 outputs per tile, at most, whole microtiles
  int64_t square_channels;            // of Winograd's: inputs that are transformed at once, in whole vectors
  // Byte offsets and sizes in the workspace.
  int64_t weights_at, scratch_at, scratch_bytes, total_bytes;
  // Byte offsets in one thread's scratch.
  int64_t patch_at, inputs_at, sums_at, rects_at, pixels_at;

  int64_t squares_of_tile() const;
};

// The next group of taps of an axis from tap `first` on (0: rows, 1: columns).
AxisTaps next_axis_taps(const ConvPlan& plan, int axis, int32_t first);

// The inputs of the squares of a tile, for Winograd's way (conv_winograd.h).
AxisTaps square_axis(const ConvPlan& plan, int axis);

// Neighbours in a row that a matrix of at most `most` rows takes: equal parts of the tile's width.
int32_t pixels_per_run(const ConvPlan& plan, int32_t most);

// Can a panel run straight from x, without patches (conv_lanewise.h)?
bool runs_straight(const ConvPlan& plan, int64_t panel);

// For validated params. `packed`: the weights have been packed before, the workspace holds none.
ConvLayout make_conv_layout(const TensorView& weight, int32_t groups, const ConvShape& shape);
ConvPlan make_conv_plan(const Conv2dParams& p, const ConvShape& shape, bool packed, int32_t threads);

}  // namespace sbnet

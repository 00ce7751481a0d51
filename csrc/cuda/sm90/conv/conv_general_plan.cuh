// The general Hopper convolution: tile shapes, shared memory layout, arguments.
#pragma once
#include "core/weights/conv.h"
#include "cuda/masked/layer.cuh"
#include "cuda/sm90/conv/conv_args.cuh"
#include "cuda/sm90/conv/ptx.cuh"

namespace sbnet::sm90::general {

constexpr int kThreads = 320;    // two warpgroups of consumers, a warp that loads patches, one that loads weights
constexpr int kPositions = 128;  // of a warpgroup: 16 groups of 8 neighbouring ones, a fixed distance apart
constexpr int kMaxTaps = 128, kMaxUnits = 4;
constexpr int kMaxPatchStages = 3, kMaxWeightStages = 8;

// The positions of a CTA's two warpgroups, and the units of the list that they stand for. A unit is a rectangle of
// output pixels of one block, and has an input patch with its halo.
enum class Shape : int32_t {
  kStrips,  // columns of 8x16 pixels: both of one unit, or one of each of two
  kCells,   // four units of 8x8, whose patch rows alternate in pairs
  kLinear,  // the patch's pixels as they come: those of the halo are computed too, and dropped. One unit or two
};

struct Tap {
  int32_t shift;   // pixels of the patch
  int32_t weight;  // bytes from an output channel's first weight; by TMA the tap's number
};
struct Group {   // taps that share a patch
  int32_t y, x;  // its first pixel, from that of the input on which the unit's first one stands
  int32_t end;   // of its taps
};

// Shared memory: staged outputs, what a consumer knows of a tile, barriers, weights, patches.
template <int kOutputs_, int kStaging_, bool kListed_>
struct SharedLayout {
  static constexpr int kOutputs = kOutputs_;    // channels of a tile
  static constexpr bool kFloats = false;        // operands are float32, for products of tf32
  static constexpr int kHalves = 1;             // 16 bits each, to a channel: channels are counted in these
  static constexpr bool kListed = kListed_;     // a list says which inputs a column of tiles multiplies
  static constexpr int kTap = kOutputs * 128;   // bytes of weights of 64 input channels
  static constexpr int kStaging = kStaging_;    // bytes of a warpgroup's
  static constexpr int kSums = kOutputs * 256;  // of what a warpgroup has summed for 64 positions
  static constexpr int kPlacesAt = 2 * kStaging;
  static constexpr int kBiasAt = kPlacesAt + 2 * kPositions * 16;
  static constexpr int kRecordsAt = kBiasAt + 2 * kOutputs * 4;
  static constexpr int kStepsAt = kRecordsAt + kMaxPatchStages * kMaxUnits * 16;  // of kListed: what a patch is for
  static constexpr int kPatchFull = kStepsAt + (kListed ? 16 : 0);                // barriers from here on
  static constexpr int kPatchEmpty = kPatchFull + 8 * kMaxPatchStages;
  static constexpr int kWeightFull = kPatchEmpty + 8 * kMaxPatchStages;
  static constexpr int kWeightEmpty = kWeightFull + 8 * kMaxWeightStages;
  static constexpr int kSumsReady = kWeightEmpty + 8 * kMaxWeightStages, kSumsFull = kSumsReady + 8;
  static constexpr int kBarriersEnd = kSumsFull + 8;
  static constexpr int kWeightsAt = (kBarriersEnd + 1023) / 1024 * 1024;  // then the patches
};

// Outputs are staged 64 positions at a time, in slabs of 64 channels.
template <class T_, int kOutputs_, bool kWhole_, bool kListed_ = false>
struct Config : SharedLayout<kOutputs_, 64 * 128 * ((kOutputs_ + 63) / 64), kListed_> {
  using T = T_;
  static constexpr bool kWhole = kWhole_;  // outputs (and residuals) move in whole words of 16 bytes
  // 64 channels are the rows of the product, and 128 positions its columns. Elsewhere the positions are rows, 64 at a
  // time, so that no other number of channels has to be filled up to 64.
  static constexpr bool kChannelRows = kOutputs_ == 64;
  static constexpr int kSlabs = (kOutputs_ + 63) / 64, kWords = kOutputs_ / 8;  // of 16 bytes
  static constexpr int kCtas =
      kOutputs_ <= 64 ? 2 : 1;  // on a multiprocessor: one's epilogue runs under another's products
};

// Of float32: outputs are staged as they are, so many positions at a time, in rows of kPitch floats.
template <int kOutputs_>
struct FloatConfig
    : SharedLayout<kOutputs_, kOutputs_ == 64 ? 32 * (kOutputs_ + 4) * 4 : 64 * (kOutputs_ + 8) * 4, false> {
  using T = float;
  static constexpr bool kFloats = true;
  static constexpr int kHalves = 2;
  static constexpr bool kChannelRows = kOutputs_ == 64;
  static constexpr int kCtas = kChannelRows ? 1 : 2;
  static constexpr int kStaged = kChannelRows ? 32 : 64, kPitch = kChannelRows ? kOutputs_ + 4 : kOutputs_ + 8;
};

struct Args : CommonArgs {
  const char *x, *w;  // bytes, as all strides here
  int64_t x_n, w_k;
  int32_t x_y, x_x, x_h, x_w, channels;
  int32_t x_word, w_word, out_word;  // bytes that may be copied at once: 16, 8, 4 or 2; 0: by TMA
  int32_t stride[2], padding[2], dilation[2], kernel[2], w_r, w_s;
  int64_t y_c, residual_c;  // from one channel to the next, in elements
  // Channels: chunks of inputs with outputs of their own, which are a group, or a few small ones side by side whose
  // weights are then a block-diagonal matrix.
  FastDiv columns, tiles_per_chunk, group_inputs, group_outputs;  // columns: tiles of output channels
  int32_t chunk_inputs, chunk_outputs, merged;
  bool mixed;                  // products meet inputs of other groups, times zero
  int32_t slices, last_steps;  // of 64 input channels; steps of 16 in the last one
  // Pixels
  Shape shape;
  int32_t units, unit_h, unit_w;  // of a CTA
  FastDiv units_per_block, units_per_row;
  FastDiv pitch;       // pixels from one row of the patch to the next
  FastDiv patch_rows;  // of a unit, or of two that alternate
  int32_t patch_h, patch_w, positions, patch_bytes, group_stride, second;  // second: warpgroup 1's first position
  int32_t patch_stages, weight_stages, groups;
  int32_t log_cluster;  // of the CTAs that may share a tile's slices
  struct {              // what clear_fringe() wants
    FringeView fringe;
    TensorView y;
  } zeros;
  FringePlan zeros_plan;
  Group group[kMaxTaps];
  Tap tap[kMaxTaps];
  // Of kListed: the pieces of a column of tiles are its slices, their weights [pieces][taps][kOutputs][64].
  struct {
    const int32_t *start, *pieces;
    int count;
  } list;
};
struct Maps {
  CUtensorMap x, w;  // patches of a unit, or their rows; taps
};
static_assert(sizeof(Args) + sizeof(Maps) <= 4096, "a kernel's parameters");

// What a column of tiles computes.
struct Column {
  int first_input, inputs, k, k_end, chunk_k;
  __device__ __forceinline__ Column(const Args& a, uint32_t column) {
    uint32_t chunk, tile;
    a.tiles_per_chunk.divmod(column, &chunk, &tile);
    first_input = chunk * a.chunk_inputs, inputs = min(a.chunk_inputs, a.channels - first_input);
    chunk_k = chunk * a.chunk_outputs, k_end = min(chunk_k + a.chunk_outputs, a.K);
    k = tile;  // times the tile's width
  }
};

// What this CTA does of the tiles from `base` on. While there are as many as CTAs, it takes a whole one. Those left
// over are its last: 2^log neighbours of a cluster sum a part of such a tile's slices each.
struct Share {
  uint32_t tile;
  int log = 0, part;
  __device__ __forceinline__ Share(const Args& a, uint32_t base, uint32_t tiles) {
    while (log < a.log_cluster && (tiles - base) << (log + 1) <= gridDim.x) ++log;
    tile = base + (blockIdx.x >> log), part = blockIdx.x & ((1 << log) - 1);
  }
  __device__ __forceinline__ int2 of(int2 slices) const {
    const int all = slices.y - slices.x;
    return make_int2(slices.x + (all * part >> log), slices.x + (all * (part + 1) >> log));
  }
};

// Where that is: the first of its units, and its column of output channels.
struct TileShare : Share {
  uint32_t first_unit, column;
  __device__ __forceinline__ TileShare(const Args& a, uint32_t base, uint32_t tiles) : Share(a, base, tiles) {
    a.columns.divmod(tile, &first_unit, &column);
  }
};

// The slices of up to 64 input channels that a column of tiles multiplies: the first one's number, and the end.
template <class C>
__device__ __forceinline__ int2 slices_of(const Args& a, uint32_t column) {
  if constexpr (!C::kListed) {
    return make_int2(0, a.slices);
  } else {  // on a device the list is unchecked
    const int first = min(max(load_int(a.list.start + column), 0), a.list.count - 1);
    return make_int2(first, min(max(load_int(a.list.start + column + 1), first + 1), a.list.count));
  }
}
constexpr int kLastSlice = 8;  // beside the steps of a patch
struct Slice {
  int channel, steps;  // the first one; of 16 channels
};
template <class C>
__device__ __forceinline__ Slice slice_of(const Args& a, int slice) {
  if constexpr (!C::kListed) {
    return {slice * 64, slice + 1 < a.slices ? 4 : a.last_steps};
  } else {
    const int32_t* piece = a.list.pieces + int64_t{slice} * conv_piece_words(C::kOutputs);
    return {min(max(load_int(piece), 0), a.channels - 1) & ~15, min(max(load_int(piece + 1), 1), 4)};
  }
}

__device__ __forceinline__ uint32_t tiles_of(const Args& a, int count) {
  const uint32_t units = static_cast<uint32_t>(count) * a.units_per_block.divisor;
  return (units + a.units - 1) / a.units * a.columns.divisor;
}

// Blocks of the list. None given, of kListed: one an image, the whole plane.
template <class C>
__device__ __forceinline__ int count_of(const Args& a) {
  return C::kListed && !a.count ? a.capacity : min(max(load_int(a.count), 0), a.capacity);
}

// Unit `at` of the list as (n, y, x, height << 16 | width) of the output plane; nothing of it is there: height 0.
__device__ __forceinline__ int4 locate(const Args& a, uint32_t at, int count) {
  uint32_t row, sub, sub_y, sub_x;
  a.units_per_block.divmod(at, &row, &sub);
  a.units_per_row.divmod(sub, &sub_y, &sub_x);
  const int dy = sub_y * a.unit_h, dx = sub_x * a.unit_w;
  const int4 block = a.blocks ? load_row(a, row) : make_int4(row, 0, 0, 0);
  int4 unit = unit_of_block(a, block, row < static_cast<uint32_t>(count), dy, dx);
  if (unit.x >= 0)
    unit.w = min(min(a.unit_h, a.block_h - dy), a.H - unit.y) << 16 | min(min(a.unit_w, a.block_w - dx), a.W - unit.z);
  return unit;
}

// f(constant) of the products of 16 channels, one to four, that a slice of a tap takes.
template <class F>
__device__ __forceinline__ void with_steps(int steps, F&& f) {
  if (steps == 4)
    f(std::integral_constant<int, 4>());
  else if (steps == 3)
    f(std::integral_constant<int, 3>());
  else if (steps == 2)
    f(std::integral_constant<int, 2>());
  else
    f(std::integral_constant<int, 1>());
}

}  // namespace sbnet::sm90::general

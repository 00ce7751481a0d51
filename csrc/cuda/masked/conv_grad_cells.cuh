// Lists of blocks as cells of 8x8 pixels, for weight gradients: where the next cell is, and dy of it in shared memory.
#pragma once
#include "cuda/masked/conv_grad_finish.cuh"

namespace sbnet::portable {
namespace {

constexpr int kCell = 8, kCellThreads = 128, kCellOutputs = 64;
constexpr int kLeastCells = 2;  // of a part

struct CellsPlan {
  GradParts parts;
  FastDiv per_block, per_row;
  FastDiv tiles_m, tiles_n, channels, taps_per_row;
  int32_t group_inputs, group_outputs;
};

// Where a cell is, as every thread that copies it wants to know.
struct Spot {
  int grad, x;             // of its first pixel in dy, and of the first that it reads in x, in the kernel's steps
  uint8_t rows, columns;   // pixels that are of the block and of the plane
  uint8_t whole, unused;   // are all, and is all that they read of x in its plane?
  uint8_t low[2], end[2];  // rows and columns of the patch that they read in the plane
  // No more of x than that may be read: elsewhere may be anything, which 0 of dy would not make 0.
  __device__ __forceinline__ bool reads(int row, int column) const {
    return (row >= low[0]) & (row < end[0]) & (column >= low[1]) & (column < end[1]);
  }
};
static_assert(sizeof(Spot) == 16);

constexpr int kSpots = 32;  // of a table: one a lane of the first warp, which makes two in turn
constexpr int kSpotBytes = 2 * kSpots * static_cast<int>(sizeof(Spot));
template <int kStepX>  // elements of x
struct CellSpots {
  const Conv2dParams& p;
  const CellsPlan& plan;
  Spot* const spots;
  PartRange range;

  // Written while those before are read; what was in its place was read before a barrier.
  __device__ __forceinline__ void tabulate(int table) const {
    const int64_t cell = range.begin + table * kSpots + threadIdx.x;
    if (threadIdx.x >= kSpots || cell >= range.end) return;
    const BlockGrid& g = p.active.grid;
    uint32_t slot, rest, d, a;
    plan.per_block.divmod(static_cast<uint32_t>(cell), &slot, &rest);
    plan.per_row.divmod(rest, &d, &a);
    const int place[2] = {static_cast<int>(d) * kCell, static_cast<int>(a) * kCell};
    Spot spot = {};
    BlockIndex block;
    if (load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), g, &block)) {
      const int index[2] = {block.i, block.j};
      int pixels[2], at[2], from[2];
      bool whole = true;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        at[k] = index[k] * g.size[k] + place[k];
        pixels[k] = max(min(min(kCell, g.size[k] - place[k]), static_cast<int>(p.y.size[2 + k]) - at[k]), 0);
        from[k] = at[k] * p.stride[k] - p.padding[k];
        const int reach =
            (pixels[k] - 1) * p.stride[k] + (static_cast<int>(p.weight.size[2 + k]) - 1) * p.dilation[k] + 1;
        const int low = max(-from[k], 0), end = min(reach, static_cast<int>(p.x.size[2 + k]) - from[k]);
        const bool any = pixels[k] > 0 && low < end;
        spot.low[k] = static_cast<uint8_t>(any ? low : 0), spot.end[k] = static_cast<uint8_t>(any ? end : 0);
        whole &= pixels[k] == kCell && low == 0 && end == reach;
      }
      spot.rows = static_cast<uint8_t>(pixels[0]), spot.columns = static_cast<uint8_t>(pixels[1]), spot.whole = whole;
      spot.grad = static_cast<int>((block.n * p.y.stride[0] + at[0] * p.y.stride[2] + at[1] * p.y.stride[3]) / 8);
      spot.x = static_cast<int>((block.n * p.x.stride[0] + from[0] * p.x.stride[2] + from[1] * p.x.stride[3]) / kStepX);
    }
    spots[table % 2 * kSpots + threadIdx.x] = spot;
  }
  // Of the part's cells in order; makes the next table when it comes to one.
  __device__ __forceinline__ Spot take(int cell) const {
    const int4 all = *reinterpret_cast<const int4*>(spots + cell % (2 * kSpots));
    if (cell % kSpots == 0) tabulate(cell / kSpots + 1);
    Spot spot;
    memcpy(&spot, &all, sizeof(spot));
    return spot;
  }
};

// Copies dy: 128 bytes a pixel, whose word w lies at w ^ (column % 8). kM: sixteens of output channels.
template <class T, int kM>
struct CellGrad {
  static constexpr int kBytes = kCell * kCell * 128;
  static constexpr int kWords = 2 * kM, kCopies = kCell * kCell * kWords / kCellThreads;
  static constexpr int kStep = kCellThreads / kWords / kCell;  // rows
  const T* grad;                                               // this thread's channels of its first pixel of a cell
  int rows;                                                    // from copy to copy, in words
  bool in;

  __device__ __forceinline__ CellGrad(const Conv2dParams& p, const CellsPlan& plan, const GradCta& cta) {
    const int k = static_cast<int>(cta.tile_m) * kCellOutputs + static_cast<int>(threadIdx.x) % kWords * kLanes<T>;
    const int first = static_cast<int>(threadIdx.x) / kWords;
    in = k < plan.group_outputs;
    grad = static_cast<const T*>(p.y.data) + static_cast<int64_t>(cta.group) * plan.group_outputs + k +
           first / kCell * p.y.stride[2] + first % kCell * p.y.stride[3];
    rows = kStep * static_cast<int>(p.y.stride[2] / 8);
  }
  // One of kCopies.
  __device__ __forceinline__ void copy(int i, const Spot& spot, uint32_t stage) const {
    const int first = static_cast<int>(threadIdx.x) / kWords, word = static_cast<int>(threadIdx.x) % kWords;
    const bool has = in & (first % kCell < spot.columns) & (first / kCell + i * kStep < spot.rows);
    cp_async_16_or_zeros(stage + (first + i * kStep * kCell) * 128 + ((word ^ (first % kCell)) << 4),
                         grad + int64_t{spot.grad + i * rows} * 8, has);
  }
};

// Where a lane reads the first of two rows of pixels of dy, channels 0 to 15; the next sixteen lie at ^ 32.
__device__ __forceinline__ uint32_t lane_of_grad() {
  const int lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * 128 + (((lane / 8 % 2) ^ (lane % 8)) << 4);
}

// ---- host

inline int64_t cells_of(const Conv2dParams& p, int d) {
  return (std::min<int64_t>(p.active.grid.size[d], p.y.size[2 + d]) + kCell - 1) / kCell;
}
// Are cells full enough, and their numbers known in 32 bits?
inline bool fills_cells(const Conv2dParams& p) {
  const int64_t pixels = PixelList(p).pixels_per_block, cells = cells_of(p, 0) * cells_of(p, 1);
  return pixels * 2 >= cells * kCell * kCell && p.active.capacity * cells < INT32_MAX / 2;
}
// width: columns of a tile, or input channels where a tile has all taps.
inline int64_t cell_tiles(const Conv2dParams& p, int64_t columns, int width) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  return (outputs + kCellOutputs - 1) / kCellOutputs * ((columns + width - 1) / width) * p.groups;
}
inline GradParts parts_of_cells(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t tiles,
                                int64_t wanted) {
  const int64_t block = cells_of(p.conv, 0) * cells_of(p.conv, 1) * kCell * kCell;
  GradParts parts(p, block, wanted ? wanted : parts_for(device, tiles), kCell * kCell, kLeastCells);
  if (!wanted && has_clusters(device)) parts.join(grad_slots(device), tiles);
  return parts;
}
inline CellsPlan plan_of_cells(const Conv2dParams& p, const GradParts& parts, int64_t columns, int width) {
  const int64_t outputs = p.weight.size[0] / p.groups, inputs = p.weight.size[1];
  return {parts,
          FastDiv(cells_of(p, 0) * cells_of(p, 1)),
          FastDiv(cells_of(p, 1)),
          FastDiv((outputs + kCellOutputs - 1) / kCellOutputs),
          FastDiv((columns + width - 1) / width),
          FastDiv(inputs),
          FastDiv(p.weight.size[3]),
          static_cast<int32_t>(inputs),
          static_cast<int32_t>(outputs)};
}

}  // namespace
}  // namespace sbnet::portable

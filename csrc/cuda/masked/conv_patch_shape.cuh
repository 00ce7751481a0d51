// How 3x3 convolutions by patches (conv_patch.cuh) cut their work.
#pragma once
#include <algorithm>

#include "cuda/masked/conv_portable.cuh"

namespace sbnet::portable {

struct PatchPlan {
  FastDiv cells_per_block, cells_per_row;
  int32_t image, row, column;  // strides of x, in units of eight channels
  FringePlan fringe;

  PatchPlan(const Conv2dParams& p, int cell) : fringe(p) {
    // A block larger than the plane is the only one of its direction: no more cells than the plane has.
    const auto cells = [&](int d) {
      return (std::min<int64_t>(p.active.grid.size[d], p.y.size[2 + d]) + cell - 1) / cell;
    };
    cells_per_row = FastDiv(cells(1));
    cells_per_block = FastDiv(cells(0) * cells(1));
    const PixelStrides s = pixel_strides(p.x);
    image = static_cast<int32_t>(s.n / 8), row = static_cast<int32_t>(s.y / 8), column = static_cast<int32_t>(s.x / 8);
  }
};

// kCell: side of a cell. kRows of 16 pixels by kOutputs channels are a unit, that kDown x kAcross warps share, two sets
// of them the channels of each piece if kSplit is 2. kAhead: pieces under way. kKeeps: weights of one chunk of input
// channels and kOutputs channels at most, which come once and stay in shared memory.
template <int kCell_, int kRows_, int kOutputs_, int kDown_, int kAcross_, int kSplit_, int kAhead_,
          bool kKeeps_ = false>
struct PatchShape {
  static constexpr int kCell = kCell_, kRows = kRows_, kOutputs = kOutputs_, kDown = kDown_, kAcross = kAcross_,
                       kSplit = kSplit_, kAhead = kAhead_;
  static constexpr bool kKeeps = kKeeps_;
  static constexpr int kThreads = kDown * kAcross * kSplit * 32;
  static constexpr int kWarpRows = kRows / kDown, kWarpOutputs = kOutputs / kAcross, kTiles = kWarpOutputs / 8;
  static constexpr int kPitch = kCell + 2;
  static constexpr int kPatches = kCell == 16 ? 1 : kRows / 4;  // cells of a unit
  static constexpr int kPatchPixels = kCell == 16 ? (kRows + 2) * kPitch : kPitch * kPitch;
  static constexpr int kPixels = kPatches * kPatchPixels;
  static constexpr int kParts = kCell == 16 ? 16 / kRows : 1;  // units of a cell
  static constexpr int kStagesB = kKeeps ? 3 : kAhead + 1, kStagesA = (5 + kAhead + 2) / 3;
  static constexpr int kStageA = kPixels * 64, kStageB = 3 * kOutputs * 64;
  // A third of a patch comes with each piece, the same number of copies for each thread.
  static constexpr int kCopiesA = ((kPixels + 2) / 3 * 4 + kThreads - 1) / kThreads;
  static constexpr int kThird = kCopiesA * (kThreads / 4);
  static constexpr int kCopiesB = 3 * kOutputs * 4 / kThreads, kRowsB = kOutputs * 4 / kThreads;
  static constexpr int kTable = 3 * kThird;
  static constexpr int kSums = kSplit == 2 ? kWarpRows / 2 * kTiles * 4 * (kThreads / 2) * 4 : 0;
  static constexpr int kSumsAt = kStagesA * kStageA + kStagesB * kStageB, kTableAt = kSumsAt + kSums;
  // Where copies go that no pixel is left for, each thread's to a word of its own.
  static constexpr int kSpareAt = kTableAt + 2 * kTable * 8;
  static constexpr int kShared = kSpareAt + kThreads * 16;
  static_assert(kShared <= 99 * 1024 && kWarpOutputs % 32 == 0 && 3 * kOutputs * 4 % kThreads == 0, "");
  static_assert(!kKeeps || (kRowsB == 1 && kAhead <= 2), "a stage a column, filled before the first piece");
  static_assert(kCell == 16 || (8 % kWarpRows == 0 && kRows % 8 == 0), "");

  static __host__ __device__ __forceinline__ int channel_tiles(int outputs) {
    return (outputs + kOutputs - 1) / kOutputs;
  }
  static __host__ __device__ __forceinline__ int64_t units(int64_t cells, int outputs) {
    return (cells * kParts + kPatches - 1) / kPatches * channel_tiles(outputs);
  }
};

// Two sets of warps have a reduction: each adds the other's sums to its half of the rows.
template <class G, class Sum>
__device__ __forceinline__ void share_sums(char* smem, Sum (&sums)[G::kWarpRows][G::kTiles][4], int set) {
  constexpr int kHalf = G::kWarpRows / 2, kApart = G::kThreads / 2;
  auto* const shared = reinterpret_cast<Pack<Sum, 4>*>(smem + G::kSumsAt) + threadIdx.x % kApart;
  const auto each = [&](int first, const auto& f) {
#pragma unroll
    for (int m = 0; m < kHalf; ++m)
#pragma unroll
      for (int j = 0; j < G::kTiles; ++j) f(shared[(m * G::kTiles + j) * kApart], sums[first + m][j]);
  };
  const auto put = [](Pack<Sum, 4>& to, const Sum(&v)[4]) { to = {v[0], v[1], v[2], v[3]}; };
  const auto add = [](const Pack<Sum, 4>& from, Sum(&v)[4]) {
    const Pack<Sum, 4> other = from;
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] += other.v[e];
  };
  if (set == 1) each(0, put);
  __syncthreads();
  if (set == 0) each(0, add);
  __syncthreads();
  if (set == 0) each(kHalf, put);
  __syncthreads();
  if (set == 1) each(kHalf, add);
}

}  // namespace sbnet::portable

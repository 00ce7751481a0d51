// Convolutions of whole planes whose weights are blocks of 32 x 32 channels, few of which are there, for Hopper: an
// output block multiplies its own input blocks, one after the other, and nothing else.
//
// A cluster of two CTAs has one output block and two neighbouring tiles of 128 positions; each loads its own patches,
// and half of the weights for both. A patch has 32 channels, in rows of 64 bytes; all taps read it in place. Three CTAs
// on a multiprocessor hide each other's waits, and output blocks of most work come first: those that have little fill
// the gaps at the end.
//
//   warps 0-3  WGMMA and epilogue
//   warp 4     patches
//   warp 5     weights, kChunkTaps taps at a time, from the slabs that the general kernel reads
#pragma once
#include <algorithm>

#include "cuda/sm90/conv/conv_general_finish.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90::blocks {

using general::kPositions;
using general::Place;
using general::Shape;

constexpr int kBlock = 32, kRow = 64;  // channels, their bytes
constexpr int kCluster = 2, kCtas = 3, kThreads = 192, kConsumerWarps = 4;
constexpr int kChunkTaps = 3, kChunkRows = kChunkTaps * kBlock, kChunk = kChunkRows * kRow;
constexpr int kShare = kChunkRows / kCluster;  // rows of a chunk that a CTA loads for both
constexpr int kMaxPatchStages = 4, kMaxWeightStages = 12;

template <class T_>
struct Config {
  using T = T_;
  // What general::finish() asks for. No absent block is multiplied: nothing comes out as NaN for it.
  static constexpr bool kListed = false, kWhole = true, kChannelRows = false;
  static constexpr int kOutputs = kBlock, kSlabs = 1, kWords = 4;
  static constexpr int kStaging = 64 * 128;  // bytes of staged output, 64 positions at a time
  static constexpr int kPlacesAt = kStaging;
  static constexpr int kBiasAt = kPlacesAt + kPositions * 16;
  static constexpr int kLastAt = kBiasAt + kOutputs * 4;  // of each patch: is it the last one
  static constexpr int kPatchFull = kLastAt + 4 * kMaxPatchStages;
  static constexpr int kPatchEmpty = kPatchFull + 8 * kMaxPatchStages;
  static constexpr int kWeightFull = kPatchEmpty + 8 * kMaxPatchStages;
  static constexpr int kWeightEmpty = kWeightFull + 8 * kMaxWeightStages;
  static constexpr int kWeightsAt = (kWeightEmpty + 8 * kMaxWeightStages + 1023) / 1024 * 1024;  // then the patches
};

struct Args : general::Args {
  const int32_t* order;  // of output blocks
  FastDiv pairs;         // of tiles of positions
  int chunks;            // of taps
};
struct Maps {
  CUtensorMap x, w;
};

// Of an operand whose rows are 64 bytes: the swizzle XORs address bits 4 and 5 with bits 7 and 8.
__device__ __forceinline__ uint64_t layout_of_rows(uint32_t stride) {
  return static_cast<uint64_t>(stride >> 4 | 1u << 31) << 32;
}

// What this CTA computes, and f(piece, channel, is it the last) of each input block. On a device tables are
// unchecked: whatever they say, all warps of a cluster count the same blocks.
struct Tile {
  int unit, column, first, end;
  __device__ __forceinline__ explicit Tile(const Args& a) {
    uint32_t at, pair;
    a.pairs.divmod(blockIdx.x / kCluster, &at, &pair);
    column = min(max(load_int(a.order + at), 0), static_cast<int>(a.columns.divisor) - 1);
    unit = pair * kCluster + blockIdx.x % kCluster;
    first = min(max(load_int(a.list.start + column), 0), a.list.count - 1);
    end = min(max(load_int(a.list.start + column + 1), first + 1), a.list.count);
  }
  template <class F>
  __device__ __forceinline__ void for_blocks(const Args& a, F&& f) const {
    for (int piece = first; piece < end; ++piece) {
      const int32_t* words = a.list.pieces + int64_t{piece} * conv_piece_words(kBlock);
      const int channel = min(max(load_int(words), 0), a.channels - 1) & ~(kBlock - 1);
      const bool two = load_int(words + 1) > 2;
      f(piece, channel, 0, piece + 1 == end && !two);
      if (two) f(piece, channel + kBlock, kBlock, piece + 1 == end);
    }
  }
};

template <class C>
__device__ void consume(const Args& a, uint32_t smem, uint8_t* shared) {
  using T = typename C::T;
  const int tid = threadIdx.x, lane = tid & 31;
  Place* places = reinterpret_cast<Place*>(shared + C::kPlacesAt);
  float* bias = reinterpret_cast<float*>(shared + C::kBiasAt);
  const uint32_t weights = wgmma_operand(smem + C::kWeightsAt);
  const uint32_t patches = wgmma_operand(smem + C::kWeightsAt + a.weight_stages * kChunk);
  const uint64_t rows_of_weights = layout_of_rows(8 * kRow), rows_of_pixels = layout_of_rows(a.group_stride * kRow);
  take_turn();
  const Tile tile(a);
  const int k0 = tile.column * kBlock;
  const int4 unit = general::locate(a, tile.unit, a.capacity);
  places[tid] = general::place_of(a, &unit, 0, tid);
  if (tid < C::kOutputs) bias[tid] = load_bias<T>(a, k0 + tid);

  float acc[2][16];  // the first tap overwrites it
  int accumulate = 0, last;
  uint32_t patch = 0, patch_phase = 0, weight = 0, weight_phase = 0;
  uint32_t read_weight = 0, read_patch = 0;  // barriers of the stages that the chunk before the last one has read
  auto release = [&] {
    if (read_weight && lane < kCluster) mbar_arrive_at(read_weight, lane);
    if (read_patch && lane == 0) mbar_arrive(read_patch);
    read_weight = read_patch = 0;
  };
#pragma unroll 1
  do {
    mbar_wait(smem + C::kPatchFull + 8 * patch, patch_phase);
    last = __shfl_sync(0xffffffff, reinterpret_cast<const int*>(shared + C::kLastAt)[patch], 0);
    const uint32_t pixels = patches + patch * (a.patch_bytes >> 4);
#pragma unroll 1
    for (int chunk = 0; chunk < a.chunks; ++chunk) {
      const uint32_t slab = weights + weight * (kChunk >> 4);
      mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
      wgmma_fence();
#pragma unroll
      for (int t = 0; t < kChunkTaps; ++t) {
        const uint32_t dp = pixels + a.tap[chunk * kChunkTaps + t].shift * (kRow >> 4);
        const uint32_t dw = slab + t * (kBlock * kRow >> 4);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint64_t w = rows_of_weights | (dw + k * 2), x = rows_of_pixels | (dp + k * 2);
          wgmma<T, kBlock>(acc[0], x, w, accumulate | t | k);
          wgmma<T, kBlock>(acc[1], x + a.group_stride * (8 * kRow >> 4), w, accumulate | t | k);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      release();
      accumulate = 1;
      read_weight = smem + C::kWeightEmpty + 8 * weight;
      read_patch = chunk + 1 == a.chunks ? smem + C::kPatchEmpty + 8 * patch : 0;
      if (++weight == a.weight_stages) weight = 0, weight_phase ^= 1;
    }
    if (++patch == a.patch_stages) patch = 0, patch_phase ^= 1;
  } while (!last);
  wgmma_wait<0>();
  release();
  bar_sync(1, 128);  // places and bias
  general::Column column(a, 0);
  general::finish<C>(a, column, k0, acc, smem, shared, places, bias);
}

template <class C>
__device__ void produce_patches(const Args& a, const CUtensorMap* map, uint32_t smem, uint8_t* shared) {
  grid_dependency_wait();
  const Tile tile(a);
  const int4 unit = general::locate(a, tile.unit, a.capacity);
  uint32_t stage = 0, phase = 1;
  tile.for_blocks(a, [&](int, int channel, int, bool last) {
    const uint32_t full = smem + C::kPatchFull + 8 * stage;
    mbar_wait(smem + C::kPatchEmpty + 8 * stage, phase);
    reinterpret_cast<int*>(shared + C::kLastAt)[stage] = last;
    mbar_expect(full, a.positions * kRow);
    tma_load(smem + C::kWeightsAt + a.weight_stages * kChunk + stage * a.patch_bytes, map, full, channel,
             unit.z + a.group[0].x, unit.y + a.group[0].y, unit.x);
    if (++stage == a.patch_stages) stage = 0, phase ^= 1;
  });
}

template <class C>
__device__ void produce_weights(const Args& a, const CUtensorMap* map, uint32_t smem) {
  grid_dependency_wait();
  const Tile tile(a);
  const int own = cluster_rank() * kShare;
  uint32_t stage = 0, phase = 1;
  tile.for_blocks(a, [&](int piece, int, int half, bool) {
    for (int chunk = 0; chunk < a.chunks; ++chunk) {
      const uint32_t full = smem + C::kWeightFull + 8 * stage;
      mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);  // of both CTAs
      mbar_expect(full, kChunk);
      tma_multicast(smem + C::kWeightsAt + stage * kChunk + own * kRow, map, full, half,
                    (piece * a.chunks + chunk) * kChunkRows + own, (1 << kCluster) - 1);
      if (++stage == a.weight_stages) stage = 0, phase ^= 1;
    }
  });
}

template <class C>
__global__ void __launch_bounds__(kThreads, kCtas)
    conv_blocks_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  if (threadIdx.x == 0)
    cta.init_rings<C, kMaxPatchStages, kMaxWeightStages>({1, kConsumerWarps}, {1, kConsumerWarps * kCluster});
  __syncthreads();
  cluster_sync();
  // Every warp calls grid_dependency_wait() before it touches global memory: so every CTA has waited when it exits.
  if (cta.warp < kConsumerWarps)
    consume<C>(a, cta.smem, shared);
  else if (cta.warp == kConsumerWarps && cta.lane == 0)
    produce_patches<C>(a, &maps.x, cta.smem, shared);
  else if (cta.warp > kConsumerWarps && cta.lane == 0)
    produce_weights<C>(a, &maps.w, cta.smem);
  __syncwarp();
  cluster_sync();  // the other CTA still counts on the barriers here
}

// ---------------------------------------------------------------- host

constexpr int64_t kShared = 228 * 1024 / kCtas - 1024;  // bytes a CTA may have

// How a plane is cut into tiles of 128 positions.
struct Cut {
  Shape shape = Shape::kStrips;
  int h = 0, w = 0, patch_h = 0, patch_w = 0, positions = 0, group_stride = 0, down = 0, across = 0;
  int64_t beyond = 0;  // bytes read past a patch
  double cycles = 0;   // of a plane; 0: none
  Cut() = default;
  Cut(const Conv2dParams& p, Shape shape, int h, int w) : shape(shape), h(h), w(w) {
    const int64_t reach_y = (p.weight.size[2] - 1) * p.dilation[0], reach_x = (p.weight.size[3] - 1) * p.dilation[1];
    if (std::max(h + reach_y, w + reach_x) > 256) return;
    patch_h = static_cast<int>(h + reach_y), patch_w = static_cast<int>(w + reach_x);
    if (shape == Shape::kLinear && (h - 1) * patch_w + w > kPositions) return;
    positions = patch_h * patch_w;
    group_stride = shape == Shape::kLinear ? 8 : patch_w;
    beyond = std::max<int64_t>(15 * group_stride + 8 + reach_y * patch_w + reach_x - positions, 0) * kRow;
    down = static_cast<int>((p.y.size[2] + h - 1) / h), across = static_cast<int>((p.y.size[3] + w - 1) / w);
    const double taps = static_cast<double>(p.weight.size[2] * p.weight.size[3]);
    const double loads = (positions * kRow + taps * kBlock * kRow / kCluster) / 24;
    cycles = (std::max(taps * 96, loads) + positions * 1e-3) * down * across;  // equals: the smaller patches
  }
};

inline Cut cheapest_cut(const Conv2dParams& p) {
  Cut best(p, Shape::kStrips, 16, 8);
  const int64_t height = p.y.size[2], width = p.y.size[3], reach = (p.weight.size[3] - 1) * p.dilation[1];
  for (int parts = 1; parts <= 16; parts *= 2) {
    const int64_t w = (width + parts - 1) / parts;
    if (w > kPositions) continue;
    const int64_t most = (kPositions - w) / (w + reach) + 1, down = (height + most - 1) / most;
    const Cut cut(p, Shape::kLinear, static_cast<int>((height + down - 1) / down), static_cast<int>(w));
    if (cut.cycles > 0 && (best.cycles == 0 || cut.cycles < best.cycles)) best = cut;
  }
  return best;
}

// Launches, if this kernel suits: else *launched stays false. a: as the general kernel has it, but for the cut.
template <class T>
Status launch(const Conv2dParams& p, const general::Args& common, const int32_t* order, const DeviceInfo& device,
              cudaStream_t stream, bool* launched) {
  using C = Config<T>;
  const int kernel_w = static_cast<int>(p.weight.size[3]), taps = static_cast<int>(p.weight.size[2]) * kernel_w;
  const Cut cut = cheapest_cut(p);
  if (p.active.given() || common.x_word || taps % kChunkTaps || cut.cycles == 0) return ok_status();
  Args a = {};
  static_cast<general::Args&>(a) = common;
  a.order = order, a.chunks = taps / kChunkTaps, a.mixed = false;
  a.shape = cut.shape, a.units = 1, a.unit_h = cut.h, a.unit_w = cut.w;
  a.units_per_block = FastDiv(cut.down * cut.across), a.units_per_row = FastDiv(cut.across);
  a.pitch = FastDiv(cut.patch_w), a.positions = cut.positions, a.group_stride = cut.group_stride;
  a.patch_bytes = (cut.positions * kRow + 1023) / 1024 * 1024;
  a.group[0] = {-p.padding[0], -p.padding[1], taps};
  for (int t = 0; t < taps; ++t)
    a.tap[t].shift = t / kernel_w * p.dilation[0] * cut.patch_w + t % kernel_w * p.dilation[1];
  const int64_t room = kShared - C::kWeightsAt - cut.beyond;
  for (int n = 2; n <= kMaxPatchStages; ++n)  // patches and weights for as many blocks, nearly
    if (n == 2 || n * (a.patch_bytes + (a.chunks - 1) * kChunk) <= room) a.patch_stages = n;
  a.weight_stages =
      static_cast<int>(std::clamp<int64_t>((room - a.patch_stages * a.patch_bytes) / kChunk, 0, kMaxWeightStages));
  if (a.weight_stages < 3) return ok_status();
  const int64_t shared = kShared - room + a.patch_stages * a.patch_bytes + a.weight_stages * kChunk;

  Maps maps;
  const Plane x = plane_of(p.x);
  const cuuint64_t size[4] = {cuuint64_t(p.x.size[1]), cuuint64_t(p.x.size[3]), cuuint64_t(p.x.size[2]),
                              cuuint64_t(p.x.size[0])};
  const cuuint64_t stride[3] = {cuuint64_t(x.x) * 2, cuuint64_t(x.y) * 2, cuuint64_t(x.n) * 2};
  const cuuint32_t box[4] = {kBlock, cuuint32_t(cut.patch_w), cuuint32_t(cut.patch_h), 1};
  SBNET_TRY(make_map(&maps.x, p.x.dtype, "x", 4, x.data, size, stride, box, CU_TENSOR_MAP_SWIZZLE_64B));
  const cuuint64_t rows[2] = {2 * kBlock, cuuint64_t(a.list.count) * taps * kBlock}, line[1] = {2 * kRow};
  const cuuint32_t part[2] = {kBlock, kShare};
  SBNET_TRY(make_map(&maps.w, p.x.dtype, "weight", 2, p.weight.data, rows, line, part, CU_TENSOR_MAP_SWIZZLE_64B));

  const int64_t units = p.active.capacity * cut.down * cut.across, pairs = (units + kCluster - 1) / kCluster;
  a.pairs = FastDiv(pairs);
  constexpr auto kKernel = conv_blocks_kernel<C>;
  SBNET_TRY(allow_most_shared<kKernel>(device, kShared));
  const ClusterLaunch at(pairs * a.columns.divisor * kCluster, kThreads, static_cast<int>(shared), 1, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&at.config, kKernel, maps, a));
  *launched = true;
  return ok_status();
}

}  // namespace sbnet::sm90::blocks

// Hopper 1x1 and 3x3 convolutions whose tiles are few, where one CTA would take long over a tile's sums: stride 1 or 2,
// fp16 or bf16 with fp32 sums, channel-last.
//
// A tile is 64 pixels (a cell of 8x8, or four of 4x4) x 64 or 32 output channels. Its sum is a row of chunks, 64 input
// channels of a tap each. The CTAs of a cluster take a part of the chunks each: their weights set out before the launch
// ahead has ended and stay in shared memory for all tiles of the CTA. Each CTA sends the others its sums of the pixels
// that those finish, and finishes its own, always in the same order. The host cuts a layer by how many tiles there can
// be, so a block's bits do not depend on the list. Most layers take less than half of a multiprocessor's shared memory,
// so that the next launch starts beside this one.
//
//   warps 0-7  two warpgroups, a tile each: WGMMA, exchange of sums, output
//   warp 8     weights, input patches
//   warp 9     zeroes the fringe
#include <algorithm>

#include "core/masked/conv_patches.h"
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv3x3_taps.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90 {
namespace {

constexpr int kWarpgroups = 2, kThreads = kWarpgroups * 128 + 64;
constexpr int kBatch = 4;                                            // chunks to a barrier
constexpr int kMostChunks = 36, kMostPatches = 8, kMostBuffers = 4;  // of a CTA, of a tile, in flight
constexpr int kMostLog = 3;                                          // of the CTAs that share a tile
constexpr int kWeightFull = 0, kPatchFull = kWeightFull + 8 * kMostChunks / kBatch;
constexpr int kPatchEmpty = kPatchFull + 8 * kMostPatches * kMostBuffers, kSumsFull = kPatchEmpty + 8 * kMostBuffers;
constexpr int kSumsFree = kSumsFull + 8 * kWarpgroups, kBarriers = kSumsFree + 8 * kWarpgroups;

template <class T_, int kChannels_, int kTaps_, int kStride_>
struct Config {
  using T = T_;
  static constexpr int kChannels = kChannels_, kTaps = kTaps_;    // output channels of a tile
  static constexpr bool kViews = kTaps == 9 && kStride_ == 2;     // the patch of a slice is four: conv3x3_taps.cuh
  static constexpr int kSide = kTaps == 1 ? 8 : kViews ? 9 : 10;  // of a patch
  static constexpr int kPatch = kSide * kSide * 128, kPatchPitch = (kPatch + 1023) / 1024 * 1024;
  static constexpr int kChunk = kChannels * 128, kSums = 64 * kChannels * 4;  // bytes

  SBNET_HOST_DEVICE static int patch_of(int chunk) {
    const int q = chunk % kTaps;
    return !kViews ? chunk / kTaps : chunk / kTaps * 4 + (q >= 4) + (q >= 6) + (q >= 8);
  }
};

struct Maps {
  CUtensorMap x[4], w;
};

struct Args : CommonArgs {
  int chunks, log_split, log_buffers, groups;  // groups: of tiles, computed at once
  int patches;                                 // that a tile has at most in a CTA
  int log_units, side;                         // cells of a tile, pixels
  int patches_at, sums_at, bias_at, barriers_at;
  FastDiv slabs, units_per_block, units_per_row;
};

// What this CTA computes: tiles `group`, group + a.groups, ... of the list.
template <class C>
struct Job {
  int part, group, slab, first, end, first_patch, patches;  // first, end: chunks
  __device__ __forceinline__ explicit Job(const Args& a) {
    uint32_t g, s;
    a.slabs.divmod(blockIdx.x >> a.log_split, &g, &s);
    group = g, slab = s, part = blockIdx.x & ((1 << a.log_split) - 1);
    first = a.chunks * part >> a.log_split, end = a.chunks * (part + 1) >> a.log_split;
    first_patch = C::patch_of(first), patches = C::patch_of(end - 1) + 1 - first_patch;
  }
};

// How many tiles the list makes, and the cells of a warp's next ones: a lane looks up cell `unit` of each.
struct Cells {
  const Args& a;
  int units, tiles;
  int4 found = {};
  __device__ __forceinline__ explicit Cells(const Args& args) : a(args) {
    units = min(max(load_int(a.count), 0), a.capacity) * static_cast<int>(a.units_per_block.divisor);
    tiles = (units + (1 << a.log_units) - 1) >> a.log_units;
  }
  // Lane l: cell `unit` of the l-th of the tiles `tile`, tile + step, ...; without one all cells of fewer tiles.
  __device__ __forceinline__ void look_up(int tile, int step, int unit = -1) {
    const int lane = threadIdx.x & 31;
    const int ahead = unit < 0 ? lane >> a.log_units : lane, own = unit < 0 ? lane & ((1 << a.log_units) - 1) : unit;
    const int at = ((tile + ahead * step) << a.log_units) + own;
    uint32_t row, sub, y, x;
    a.units_per_block.divmod(at, &row, &sub);
    a.units_per_row.divmod(sub, &y, &x);
    found = unit_of_block(a, load_row(a, row), at < units, y * a.side, x * a.side);
  }
  __device__ __forceinline__ int4 of(int lane) const {  // n < 0: nothing there
    return make_int4(__shfl_sync(0xffffffff, found.x, lane), __shfl_sync(0xffffffff, found.y, lane),
                     __shfl_sync(0xffffffff, found.z, lane), 0);
  }
};

// Warp 8: the weights of this CTA's chunks.
template <class C>
__device__ __forceinline__ void load_weights(const Args& a, const CUtensorMap* map, uint32_t smem, const Job<C>& job) {
  const int lane = threadIdx.x & 31, chunks = job.end - job.first;
  const uint32_t full = smem + a.barriers_at + kWeightFull;
  if (lane * kBatch < chunks) mbar_expect(full + 8 * lane, min(chunks - lane * kBatch, kBatch) * C::kChunk);
  __syncwarp();
  for (int c = lane; c < chunks; c += 32) {
    const int slice = (job.first + c) / C::kTaps, q = (job.first + c) % C::kTaps;
    const int tap = C::kViews ? kTapOrder >> q * 4 & 15 : q;
    tma_load(smem + c * C::kChunk, map, full + 8 * (c / kBatch), slice * 64, tap, job.slab * C::kChannels);
  }
}

template <class C>
__device__ __forceinline__ void produce(const Args& a, const Maps& maps, uint32_t smem, const Job<C>& job, Cells& cells,
                                        bool ahead) {
  const int lane = threadIdx.x & 31, patch = lane >> a.log_units, unit = lane & ((1 << a.log_units) - 1);
  const uint32_t barriers = smem + a.barriers_at;
  const bool mine = patch < job.patches;
  const int index = job.first_patch + patch, slice = C::kViews ? index >> 2 : index, view = C::kViews ? index & 3 : 0;
  const int above = C::kViews ? view < 2 : C::kTaps == 9, left = C::kViews ? view % 2 == 0 : C::kTaps == 9;
  if (job.group < cells.tiles && !ahead) load_weights(a, &maps.w, smem, job);
  const int batch = 32 >> a.log_units;  // tiles that the lanes look up
  cells.look_up(job.group, a.groups);
  pin(cells.found.x, cells.found.y, cells.found.z);
  grid_dependency_wait();
  for (int i = job.group, k = 0; i < cells.tiles; i += a.groups, ++k) {
    if (k > 0 && (k & (batch - 1)) == 0) cells.look_up(i, a.groups);
    const int4 at = cells.of(((k & (batch - 1)) << a.log_units) + unit);
    const int buffer = k & ((1 << a.log_buffers) - 1), round = k >> a.log_buffers;
    const int stage = buffer * a.patches + patch;
    if (round > 0) mbar_wait(barriers + kPatchEmpty + 8 * buffer, (round - 1) & 1);
    if (mine && unit == 0) mbar_expect(barriers + kPatchFull + 8 * stage, C::kPatch);
    __syncwarp();
    if (mine)
      tma_load(smem + a.patches_at + stage * C::kPatchPitch + unit * 2048, &maps.x[view],
               barriers + kPatchFull + 8 * stage, slice * 64, at.z - left, at.y - above, at.x);
  }
  if (ahead && job.group >= cells.tiles)  // never exit with loads in flight
    for (int c = 0; c < job.end - job.first; c += kBatch) mbar_wait(barriers + kWeightFull + 8 * (c / kBatch), 0);
}

template <class T>
struct Slopes {
  const CommonArgs& a;
  int channel;
  __device__ __forceinline__ float operator()(int e) const {
    return load_bias<T>(a.slopes, a.slopes_f32, channel + e, a.K);
  }
};

// Sums of 16 neighbouring channels of a pixel lie in 64 bytes, in the order in which a product's threads have them:
// thread q of four, channels 2q, 2q + 1, 8 + 2q and 9 + 2q. XORed, so that eight pixels' readers meet no bank twice.
__device__ __forceinline__ int sums_of(int row, int pixel, int q) { return row * 64 + ((q ^ (pixel >> 1 & 3)) << 4); }

// Warps 0-7. D[64 pixels, channels] = X[64 pixels, c] * W[channels, c]^T over this part's chunks. What follows the
// products is a single chain in each warp, so its length is what counts: all that can be is known to the compiler.
template <class C, int kLog>
__device__ __forceinline__ void consume(const Args& a, uint32_t smem, uint8_t* shared, const Job<C>& job,
                                        Cells& cells) {
  using T = typename C::T;
  constexpr int kParts = 1 << kLog, kLogPixels = 6 - kLog, kPixels = 64 >> kLog;  // pixels that a CTA finishes
  constexpr int kShare = C::kSums >> kLog;                                        // bytes of their sums
  constexpr int kWords = C::kChannels / 8 * kPixels, kEach = (kWords + 127) / 128;
  const int tid = threadIdx.x & 127, lane = tid & 31, warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0);
  const int wg = warp >> 2, w4 = warp & 3;
  const uint32_t barriers = smem + a.barriers_at;
  const uint32_t full = barriers + kSumsFull + 8 * wg, free = barriers + kSumsFree + 8 * wg;
  const int sums_at = a.sums_at + wg * C::kSums;
  float* biases = reinterpret_cast<float*>(shared + a.bias_at) + wg * C::kChannels;
  cluster_wait();  // the barriers of the others are ready; every thread arrived when it started
  int i = job.group + wg * a.groups;
  if (i >= cells.tiles) return;
  if (tid < C::kChannels) biases[tid] = load_bias<T>(a, job.slab * C::kChannels + tid);

  // What this thread finishes: words tid, tid + 128, ... of 8 channels, all of one pixel.
  const int own = tid >> 1 & (kPixels - 1), pixel = own + job.part * kPixels, log_side = a.side == 8 ? 3 : 2;
  const int unit = a.log_units ? pixel >> 4 : 0, inside = pixel & (a.side * a.side - 1);
  const int dy = inside >> log_side, dx = inside & (a.side - 1);
  const int column = (tid >> 1 >> kLogPixels) * 16 + (tid & 1) * 8, channel = job.slab * C::kChannels + column;
  auto taken = [&](int m) { return (kWords >= 128 || tid < kWords) && channel + m * (16 << kLog) < a.K; };
  const float4* bias = reinterpret_cast<const float4*>(biases + column);
  const uint8_t* sums[4];
#pragma unroll
  for (int q = 0; q < 4; ++q)
    sums[q] = shared + sums_at + sums_of((tid >> 1 >> kLogPixels) * kPixels + own, pixel, q) + (tid & 1) * 8;

  uint32_t to[2], bar[2];  // of this thread's two pixels of the product; all of a warp have one owner
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int p = 16 * w4 + 8 * h + (lane >> 2), owner = p >> kLogPixels;
    to[h] = smem + sums_at + job.part * kShare + sums_of(p & (kPixels - 1), p, lane & 3);
    bar[h] = full;
    if (owner != job.part) to[h] = map_to_rank(to[h], owner), bar[h] = map_to_rank(full, owner);
  }
  const uint32_t weights = wgmma_operand(smem), patches = wgmma_operand(smem + a.patches_at);
  const int q0 = job.first % C::kTaps, chunks = job.end - job.first;
  const uint32_t low = pack<T>(a.low, a.low);
  cells.look_up(i, a.groups * kWarpgroups, unit);  // of all pixels of a warp
  pin(cells.found.x, cells.found.y, cells.found.z, to[0], to[1], bar[0], bar[1]);
  grid_dependency_wait();

  for (int use = 0; i < cells.tiles; ++use) {
    if (use > 0 && use % 32 == 0) cells.look_up(i, a.groups * kWarpgroups, unit);
    const int4 at = cells.of(use % 32);
    const int y = at.y + dy, x = at.z + dx;
    const bool there = at.x >= 0 && y < a.H && x < a.W;
    auto offset = [&](const Plane& p) { return at.x * p.n + y * p.y + x * p.x + channel; };
    uint32_t packed[kEach][4] = {};
    if (a.residual.data) {
      const T* from = static_cast<const T*>(a.residual.data) + offset(a.residual);
#pragma unroll
      for (int m = 0; m < kEach; ++m) {
        if (!there || !taken(m)) continue;
        const uint4 v = *reinterpret_cast<const uint4*>(from + m * (16 << kLog));
        packed[m][0] = v.x, packed[m][1] = v.y, packed[m][2] = v.z, packed[m][3] = v.w;
      }
    }
    const int k = wg + use * kWarpgroups, buffer = k & ((1 << a.log_buffers) - 1), phase = k >> a.log_buffers & 1;
    i += a.groups * kWarpgroups;
    const bool more = i < cells.tiles;
    T* out = static_cast<T*>(a.y.data) + offset(a.y);

    float acc[C::kChannels / 2];
    uint32_t ready = barriers + kPatchFull + 8 * buffer * a.patches, dw = weights;
    uint32_t patch = patches + buffer * a.patches * (C::kPatchPitch >> 4);
    mbar_wait(ready, phase);
    int q = q0;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      if (use == 0 && c % kBatch == 0) mbar_wait(barriers + kWeightFull + 8 * (c / kBatch), 0);
      uint32_t dp = patch;
      if (C::kViews) dp += ((kRightTaps >> q & 1) + (kLowerTaps >> q & 1) * C::kSide) * 8;
      if (C::kTaps == 9 && !C::kViews) dp += (q + ((q >= 3) + (q >= 6)) * (C::kSide - 3)) * 8;
      constexpr int kRow = C::kTaps == 1 ? 1024 : C::kSide * 128;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<T, C::kChannels>(acc, wgmma_layout(kRow) | (dp + k * 2), wgmma_layout(1024) | (dw + k * 2), c | k);
      wgmma_commit();
      dw += C::kChunk >> 4;
      const bool last = C::kTaps == 1 || (C::kViews ? (kLastTaps >> q & 1) != 0 : q == 8);
      if (++q == C::kTaps) q = 0;
      if (last && c + 1 < chunks) patch += C::kPatchPitch >> 4, ready += 8, mbar_wait(ready, phase);
    }
    wgmma_wait<0>();
    if (lane == 0) mbar_arrive(barriers + kPatchEmpty + 8 * buffer);

    if (kLog > 0 && tid == 0) mbar_expect(full, (kParts - 1) * kShare);
    if (kLog > 0 && use > 0) mbar_wait(free, (use - 1) & 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto each = [&](auto put) {
#pragma unroll
        for (int j = 0; j < C::kChannels / 16; ++j)
          put(to[h] + j * kPixels * 64, acc[8 * j + 2 * h], acc[8 * j + 2 * h + 1], acc[8 * j + 4 + 2 * h],
              acc[8 * j + 5 + 2 * h]);
      };
      if (kLog == 0 || (16 * w4 + 8 * h) >> kLogPixels == job.part)
        each([](uint32_t at, float v, float w, float x, float y) { store_shared(at, v, w, x, y); });
      else
        each([&](uint32_t at, float v, float w, float x, float y) { store_async(at, bar[h], v, w, x, y); });
    }
    if (kLog > 0) mbar_wait(full, use & 1);
    bar_sync(1 + wg, 128);  // and this CTA's own are there

    for_epilogue(a, [&](auto simple, auto residual) {
#pragma unroll
      for (int m = 0; m < kEach; ++m) {
        if (!taken(m)) break;
        const float4 b0 = bias[m * (4 << kLog)], b1 = bias[m * (4 << kLog) + 1];
        float v[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
        for (int s = 0; s < kParts; ++s)
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const float2 sum = *reinterpret_cast<const float2*>(sums[q] + s * kShare + m * 64 * 64);
            v[2 * q] += sum.x, v[2 * q + 1] += sum.y;
          }
        finish_sums<T>(a, simple, residual, v, low, packed[m], Slopes<T>{a, channel + m * (16 << kLog)});
        if (there)
          store_words(out + m * (16 << kLog), make_uint4(packed[m][0], packed[m][1], packed[m][2], packed[m][3]));
      }
    });
    if (more) {  // who writes here may do so again
      bar_sync(1 + wg, 128);
      if (kLog > 0 && tid < kParts) mbar_arrive_at(free, tid);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 2)
    conv_few_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  const Job<C> job(a);
  await_settled(a);
  const bool ahead = job.group == 0;  // if any weights are needed, these are: no need to wait for the count
  if (cta.warp == 2 * 4) {
    if (cta.lane < kMostChunks / kBatch) mbar_init(cta.smem + a.barriers_at + kWeightFull + 8 * cta.lane, 1);
    fence_mbar_init();
    __syncwarp();
    if (ahead) load_weights(a, &maps.w, cta.smem, job);
    if (cta.lane < (C::kViews ? 4 : 1)) prefetch_map(&maps.x[cta.lane]);
  } else if (cta.warp == 0) {
    const uint32_t barriers = cta.smem + a.barriers_at;
    if (cta.lane < kMostPatches * kMostBuffers) mbar_init(barriers + kPatchFull + 8 * cta.lane, 1);
    if (cta.lane < kMostBuffers) mbar_init(barriers + kPatchEmpty + 8 * cta.lane, 4);
    if (cta.lane < kWarpgroups) {
      mbar_init(barriers + kSumsFull + 8 * cta.lane, 1);
      mbar_init(barriers + kSumsFree + 8 * cta.lane, 1 << a.log_split);
    }
    fence_mbar_init();
  }
  Cells cells(a);
  __syncthreads();
  cluster_arrive();
  if (cta.warp < 8) {
    auto run = [&](auto log) { consume<C, decltype(log)::value>(a, cta.smem, shared, job, cells); };
    if (a.log_split == 0) return run(std::integral_constant<int, 0>());
    if (a.log_split == 1) return run(std::integral_constant<int, 1>());
    if (a.log_split == 2) return run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 3>());
  } else if (cta.warp == 8) {
    produce<C>(a, maps, cta.smem, job, cells, ahead);
  } else {
    take_turn();
    if (a.fringe) zero_fringe<typename C::T, 1>(a);
  }
}

// ---------------------------------------------------------------- host

constexpr int64_t kMostTiles = 128;
constexpr int kHalf = kSharedLimit / 2 - 512;  // bytes that two CTAs may have on a multiprocessor

int shape_of(const Conv2dParams& p) { return p.weight.size[2] == 1 ? 0 : static_cast<int>(p.stride[0]); }
int channels_of(const Conv2dParams& p) { return (p.weight.size[0] + 31) / 32 % 2 ? 32 : 64; }

// Fills in how a layer is cut; false: it does not fit.
template <class C>
bool cut(const Conv2dParams& p, const DeviceInfo& device, int log_split, int64_t tiles, Args* a) {
  const int parts = 1 << log_split, slices = static_cast<int>((p.x.size[1] + 63) / 64);
  const int slabs = static_cast<int>((p.weight.size[0] + C::kChannels - 1) / C::kChannels);
  a->chunks = slices * C::kTaps, a->log_split = log_split, a->slabs = FastDiv(slabs), a->patches = 0;
  const int most = (a->chunks + parts - 1) >> log_split;
  if (a->chunks < parts || most > kMostChunks) return false;
  for (int part = 0; part < parts; ++part) {
    const int first = a->chunks * part >> log_split, end = a->chunks * (part + 1) >> log_split;
    a->patches = std::max(a->patches, C::patch_of(end - 1) + 1 - C::patch_of(first));
  }
  if (a->patches > kMostPatches) return false;
  auto total = [&](int log_buffers) {
    a->log_buffers = log_buffers;
    a->patches_at = most * C::kChunk;
    a->sums_at = a->patches_at + (a->patches << log_buffers) * C::kPatchPitch;
    a->bias_at = a->sums_at + kWarpgroups * C::kSums;
    a->barriers_at = a->bias_at + kWarpgroups * C::kChannels * 4;
    return a->barriers_at + kBarriers;
  };
  // Two buffers where more would keep the next launch off this one's multiprocessors.
  const int room = total(1) <= kHalf ? kHalf : kSharedLimit;
  if (total(2) > room && total(1) > room) return false;
  // Clusters of four and more leave some multiprocessors out.
  const int64_t clusters = (log_split < 2 ? device.sm_count : device.sm_count * 10 / 11) >> log_split;
  a->groups = static_cast<int>(std::clamp<int64_t>(clusters / slabs, 1, std::max<int64_t>(tiles, 1)));
  return true;
}

// The cut that a full list takes least with: each tile of a warpgroup takes as long, whatever its chunks, and without
// room for the next launch beside this one as much again. False: none fits. pays: is it faster than the other kernels?
// (Weights and limits are measured: docs/log/conv.md.)
template <class C>
bool choose(const Conv2dParams& p, const DeviceInfo& device, int64_t tiles, Args* a, bool* pays = nullptr) {
  double least = 0;
  int best = -1, rounds = 0;
  for (int log = kMostLog; log >= 0; --log) {
    if (!cut<C>(p, device, log, tiles, a)) continue;
    const int64_t each = (tiles + a->groups - 1) / a->groups;
    const int turns = static_cast<int>((each + kWarpgroups - 1) / kWarpgroups);
    const double cost = 0.6 * turns + (a->barriers_at + kBarriers > kHalf ? 0.7 : 0);
    if (best < 0 || cost < least) least = cost, best = log, rounds = turns;
  }
  if (pays) *pays = a->chunks >= 15 ? rounds <= (C::kViews ? 5 : 3) : least < (a->chunks >= 8 ? 1.25 : 0.65);
  return best >= 0 && cut<C>(p, device, best, tiles, a);
}

int64_t tiles_of(const Conv2dParams& p) {
  const int64_t cell = p.weight.size[2] == 1 ? conv1x1_cell(p.active.grid) : 8;
  return (p.active.capacity * (p.active.grid.size[0] / cell) * (p.active.grid.size[1] / cell) * cell * cell + 63) / 64;
}

template <class F>
auto with_config(const Conv2dParams& p, const F& run) {
  auto of = [&](auto type) {
    using T = decltype(type);
    const bool narrow = channels_of(p) == 32;
    switch (shape_of(p)) {
      case 0:
        return narrow ? run(Config<T, 32, 1, 1>()) : run(Config<T, 64, 1, 1>());
      case 1:
        return narrow ? run(Config<T, 32, 9, 1>()) : run(Config<T, 64, 9, 1>());
      default:
        return narrow ? run(Config<T, 32, 9, 2>()) : run(Config<T, 64, 9, 2>());
    }
  };
  return p.x.dtype == DType::kBF16 ? of(__nv_bfloat16()) : of(__half());
}

template <class C>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t tiles = tiles_of(p);
  if (p.x.size[0] == 0 || (tiles == 0 && !has_fringe(p))) return ok_status();
  Args a = {};
  fill_common(p, &a);
  a.side = C::kTaps == 1 ? conv1x1_cell(p.active.grid) : 8;
  a.log_units = a.side == 8 ? 0 : 2;
  const int per_row = p.active.grid.size[1] / a.side;
  a.units_per_row = FastDiv(per_row), a.units_per_block = FastDiv(p.active.grid.size[0] / a.side * per_row);
  SBNET_CHECK(choose<C>(p, device, tiles, &a), "%s: plan (a bug): expected a layer that fits, got %d input channels",
              kOp, static_cast<int>(p.x.size[1]));
  Maps maps = {};
  for (int view = 0; view < (C::kViews ? 4 : 1); ++view)
    SBNET_TRY(plane_map(&maps.x[view], "x", p.x, C::kTaps == 1 ? a.side : C::kSide, C::kTaps == 1 ? a.side : C::kSide,
                        static_cast<int>(p.stride[0]), C::kViews && view < 2, C::kViews && view % 2 == 0));
  SBNET_TRY(tap_map(&maps.w, p, C::kChannels));
  constexpr auto kernel = conv_few_kernel<C>;
  SBNET_TRY(allow_most_shared<kernel>(device, kSharedLimit));
  const ClusterLaunch at((a.groups * static_cast<int64_t>(a.slabs.divisor)) << a.log_split, kThreads,
                         a.barriers_at + kBarriers, a.log_split, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&at.config, kernel, maps, a));
  return ok_status();
}

}  // namespace

bool conv_few_takes(const Conv2dParams& p, const DeviceInfo& device) {
  const int64_t C = p.x.size[1], K = p.weight.size[0];
  const bool pointwise = is_pixelwise(p);
  if (p.stride[0] > 2 || C < 64 || (!pointwise && p.weight.size[2] * p.weight.size[3] != 9)) return false;
  if (!pointwise && (p.weight.size[2] != 3 || p.padding[0] != 1)) return false;  // patches, which have a stride of 3
  const int64_t tiles = tiles_of(p);
  if (tiles == 0 || tiles > kMostTiles || (pointwise && K > C)) return false;
  Args a = {};
  bool pays = false;
  return with_config(p, [&](auto config) { return choose<decltype(config)>(p, device, tiles, &a, &pays); }) && pays;
}

Status conv_few(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  return with_config(p, [&](auto config) { return launch<decltype(config)>(p, device, stream); });
}

}  // namespace sbnet::sm90

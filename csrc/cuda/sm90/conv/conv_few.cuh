// Device code of conv_few.cu: how a CTA's share of a launch is found, loaded and computed.
#pragma once
#include "cuda/sm90/conv/conv3x3_taps.cuh"
#include "cuda/sm90/conv/conv_args.cuh"

namespace sbnet::sm90::few_detail {

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

}  // namespace sbnet::sm90::few_detail

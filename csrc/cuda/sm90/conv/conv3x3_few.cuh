// Part of the Hopper 3x3 convolution: few cells of many channels, where one CTA would take long over a tile's sums.
//
// A job is a cell of 8x8 pixels x 64 output channels. The CTAs of a cluster sum a part of its input channels each;
// their part of the weights stays in shared memory for all their jobs, and sets out before the launch ahead has ended.
// Each CTA sends the others its sums of the pixels that those finish, and finishes its own: always in the same order.
//
//   warps 0-3    WGMMA, exchange of sums, output
//   warp 16      input patches
//   warp 17      weights
//   warps 18-19  zero the fringe
#pragma once
#include "cuda/sm90/conv/conv3x3_load.cuh"

namespace sbnet::sm90 {

template <class C>
struct Few {
  static constexpr int kLog = C::kFewLog, kParts = 1 << kLog;            // CTAs that share a job
  static constexpr int kSlices = 2, kTaps = kSlices * 9;                 // at most, of a part
  static constexpr int kPatch = 100 * 128, kPatchPitch = 13312;          // bytes: 10x10 pixels, and their room
  static constexpr int kPixels = 64 >> kLog, kShare = kPixels * 64 * 4;  // of a CTA; bytes of its sums from one other
  static constexpr int kPairs = kPixels * 32 / 128;                      // of channels, that a thread finishes
  static constexpr int kBatch = 3;                                       // taps to a barrier
  // Two buffers of patches. The barriers lie behind those of many tiles: the count decides when all are made.
  static constexpr int kPatchesAt = kTaps * C::kTap, kSumsAt = kPatchesAt + 2 * kSlices * kPatchPitch;
  static constexpr int kWeightFull = C::kFewBarriers;
  static constexpr int kPatchFull = kWeightFull + 8 * kTaps / kBatch, kPatchEmpty = kPatchFull + 8 * 2 * kSlices;
  static constexpr int kSumsFull = kPatchEmpty + 8 * 2, kSumsFree = kSumsFull + 8;
  static_assert(kSumsFree + 8 <= C::kShared && kSumsAt + kParts * kShare <= C::kTilesAt && kPatch <= kPatchPitch);

  static __device__ __forceinline__ void init_barriers(uint32_t smem) {  // one thread
    for (int at = kWeightFull; at < kPatchEmpty; at += 8) mbar_init(smem + at, 1);
    for (int b = 0; b < 2; ++b) mbar_init(smem + kPatchEmpty + 8 * b, 4);
    mbar_init(smem + kSumsFull, 1), mbar_init(smem + kSumsFree, kParts);
  }
};

// The jobs of this CTA: cells `first`, first + groups, ... of the list, output channels from k0 on.
template <class C>
struct FewJobs {
  const Args& a;
  int cells, first, part, slices, k0;
  __device__ __forceinline__ FewJobs(const Args& args, int count) : a(args) {
    uint32_t group, slab;
    a.ktiles.divmod(blockIdx.x >> Few<C>::kLog, &group, &slab);
    cells = static_cast<int>(group) < a.few_groups ? count : 0;
    first = group, part = cluster_rank(), slices = a.slices >> Few<C>::kLog, k0 = slab * 64;
  }
  __device__ __forceinline__ int4 cell(int at) const {  // n < 0: nothing there
    uint32_t row, sub, y, x;
    a.units_per_block.divmod(at, &row, &sub);
    a.units_per_row.divmod(sub, &y, &x);
    return unit_of_block(a, load_row(a, row), at < cells, y * 8, x * 8);
  }
};

// Warp 16: patches of 64 channels, a lane each.
template <class C>
__device__ __forceinline__ void produce_few_patches(const Args& a, const CUtensorMap* map, uint32_t smem, int cells) {
  using F = Few<C>;
  const FewJobs<C> jobs(a, cells);
  const int lane = threadIdx.x & 31;
  int4 at = jobs.cell(jobs.first);
  grid_dependency_wait();
  for (int i = jobs.first, use = 0; i < jobs.cells; i += a.few_groups, ++use) {
    const int buffer = use & 1;
    mbar_wait(smem + F::kPatchEmpty + 8 * buffer, (use >> 1 & 1) ^ 1);
    if (lane < jobs.slices) {
      const int stage = buffer * F::kSlices + lane;
      const uint32_t full = smem + F::kPatchFull + 8 * stage, to = smem + F::kPatchesAt + stage * F::kPatchPitch;
      mbar_expect(full, F::kPatch);
      tma_load(to, map, full, (jobs.part * jobs.slices + lane) * 64, at.z - 1, at.y - 1, at.x);
    }
    __syncwarp();
    at = jobs.cell(i + a.few_groups);
  }
}

// Warp 17, one lane.
template <class C>
__device__ __forceinline__ void produce_few_weights(const Args& a, const CUtensorMap* map, uint32_t smem, int cells) {
  using F = Few<C>;
  const FewJobs<C> jobs(a, cells);
  if (jobs.first >= jobs.cells) return;
  for (int v = 0; v < jobs.slices * 9; ++v) {
    const uint32_t full = smem + F::kWeightFull + 8 * (v / F::kBatch);
    if (v % F::kBatch == 0) mbar_expect(full, F::kBatch * C::kTap);
    tma_load(smem + v * C::kTap, map, full, (jobs.part * jobs.slices + v / 9) * 64, v % 9, jobs.k0);
  }
}

// Warps 0-3: D[64 pixels, 64 channels] = X[64 pixels, c] * W[64 channels, c]^T over this part's channels c. A thread
// has two pixels and pairs of channels; where the sums of a pixel's share lie, pairs come in the order of the threads
// that finish them.
template <class C>
__device__ __forceinline__ void consume_few(const Args& a, uint32_t smem, uint8_t* shared, int cells) {
  using F = Few<C>;
  using T = typename C::T;
  const FewJobs<C> jobs(a, cells);
  const int tid = threadIdx.x, lane = tid & 31, w4 = __shfl_sync(0xffffffff, tid >> 5, 0);
  cluster_wait();  // the barriers of the others are ready; every thread arrived when it started
  if (jobs.first >= jobs.cells) return;
  int4 next = jobs.cell(jobs.first);
  // Pair m of this thread: pixel `pixel` of the cell, the channels from `channel` on.
  auto pair_of = [&](int m, int* pixel, int* channel) {
    const int u = tid + 128 * m, slot = u >> 1;
    *pixel = (slot >> 2 & (F::kPixels - 1)) + jobs.part * F::kPixels;
    *channel = jobs.k0 + (slot >> (8 - F::kLog)) * 16 + (u & 1) * 8 + (slot & 3) * 2;
  };
  float2 bias[F::kPairs];
#pragma unroll
  for (int m = 0; m < F::kPairs; ++m) {
    int pixel, channel;
    pair_of(m, &pixel, &channel);
    bias[m] = make_float2(load_bias<T>(a, channel), load_bias<T>(a, channel + 1));
  }
  uint32_t to[2], bar[2];  // of this thread's two pixels
  bool own[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int pixel = 16 * w4 + 8 * h + (lane >> 2), owner = pixel / F::kPixels, p = pixel % F::kPixels;
    own[h] = owner == jobs.part;
    to[h] = F::kSumsAt + jobs.part * F::kShare + (p * 4 + (lane & 3)) * 16;
    if (!own[h]) to[h] = map_to_rank(smem + to[h], owner);
    bar[h] = map_to_rank(smem + F::kSumsFull, owner);
  }
  const uint32_t weights = wgmma_operand(smem), patches = wgmma_operand(smem + F::kPatchesAt);
  const uint32_t low = pack<T>(a.low, a.low);
  grid_dependency_wait();

  for (int i = jobs.first, use = 0; i < jobs.cells; i += a.few_groups, ++use) {
    const bool more = i + a.few_groups < jobs.cells;
    const int4 at = next;
    auto offset = [&](const Plane& p, int pixel) {  // negative: nowhere
      const int y = at.y + (pixel >> 3), x = at.z + (pixel & 7);
      return at.x >= 0 && y < a.H && x < a.W ? at.x * p.n + y * p.y + x * p.x : int64_t{-1};
    };
    uint32_t added[F::kPairs];
#pragma unroll
    for (int m = 0; m < F::kPairs; ++m) {
      int pixel, channel;
      pair_of(m, &pixel, &channel);
      const int64_t from = a.residual.data ? offset(a.residual, pixel) : -1;
      added[m] =
          from < 0 ? 0 : *reinterpret_cast<const uint32_t*>(static_cast<const T*>(a.residual.data) + from + channel);
    }
    if (more) next = jobs.cell(i + a.few_groups);

    float acc[32];
    const int buffer = use & 1;
    for (int s = 0; s < jobs.slices; ++s) {
      const int stage = buffer * F::kSlices + s;
      const uint32_t patch = patches + stage * (F::kPatchPitch >> 4);
      mbar_wait(smem + F::kPatchFull + 8 * stage, use >> 1 & 1);
#pragma unroll
      for (int q = 0; q < 9; ++q) {
        const int v = s * 9 + q;
        if (use == 0 && q % F::kBatch == 0) mbar_wait(smem + F::kWeightFull + 8 * (v / F::kBatch), 0);
        const uint32_t dp = patch + (q / 3 * 10 + q % 3) * 8, dw = weights + v * (C::kTap >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<T, 64>(acc, wgmma_layout(1280) | (dp + k * 2), wgmma_layout(1024) | (dw + k * 2), v | k);
        wgmma_commit();
      }
    }
    wgmma_wait<0>();
    if (lane == 0) mbar_arrive(smem + F::kPatchEmpty + 8 * buffer);

    if (tid == 0) mbar_expect(smem + F::kSumsFull, (F::kParts - 1) * F::kShare);
    if (use > 0) mbar_wait(smem + F::kSumsFree, (use - 1) & 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 16 channels
        const float4 v =
            make_float4(acc[8 * j + 2 * h], acc[8 * j + 2 * h + 1], acc[8 * j + 4 + 2 * h], acc[8 * j + 5 + 2 * h]);
        const uint32_t there = to[h] + j * F::kPixels * 64;
        if (own[h])
          *reinterpret_cast<float4*>(shared + there) = v;
        else
          store_async(there, bar[h], v.x, v.y, v.z, v.w);
      }
    }
    mbar_wait(smem + F::kSumsFull, use & 1);
    bar_sync(1, 128);  // and this CTA's own are there
#pragma unroll
    for (int m = 0; m < F::kPairs; ++m) {
      const uint8_t* from = shared + F::kSumsAt + (tid + 128 * m) * 8;
      float v[2] = {bias[m].x, bias[m].y};
#pragma unroll
      for (int s = 0; s < F::kParts; ++s) {
        const float2 part = *reinterpret_cast<const float2*>(from + s * F::kShare);
        v[0] += part.x, v[1] += part.y;
      }
      const auto activate_pair = [&] {
        activate(a, v, [&](int e) {
          int pixel, channel;
          pair_of(m, &pixel, &channel);
          return load_bias<T>(a.slopes, a.slopes_f32, channel + e, a.K);
        });
      };
      const bool simple = ends_in_max(a);
      const float2 more = unpack<T>(added[m]);  // zeros without a residual
      const bool before = a.residual.data && !a.after;
      if (before) v[0] += more.x, v[1] += more.y;
      if (!simple) activate_pair();
      if (a.residual.data && a.after) v[0] += more.x, v[1] += more.y;
      uint32_t packed = pack<T>(v[0], v[1]);
      if (simple) packed = max_pair<T>(packed, low);
      int pixel, channel;
      pair_of(m, &pixel, &channel);
      const int64_t out = offset(a.y, pixel);
      if (out >= 0) *reinterpret_cast<uint32_t*>(static_cast<T*>(a.y.data) + out + channel) = packed;
    }
    if (more) {  // who writes here may do so again
      bar_sync(1, 128);
      if (tid < F::kParts) mbar_arrive_at(smem + F::kSumsFree, tid);
    }
  }
}

}  // namespace sbnet::sm90

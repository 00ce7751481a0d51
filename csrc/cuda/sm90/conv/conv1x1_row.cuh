// Part of conv1x1_split.cu: a list of all blocks that is a little more than a job for each CTA. Jobs of 128 pixels x
// 128 output channels would take a second, split round; cut as one row of pixels they may be as much larger as makes
// them one for each: kPixels x 128 channels. Two neighbours share the pixels by multicast.
#pragma once
#include "cuda/sm90/conv/conv1x1_load.cuh"

namespace sbnet::sm90::conv1x1_detail {

constexpr int kRowChannels = 128, kRowConsumers = 256;

template <int kPixels>
struct Row {
  static constexpr int kStage = 2 * kSlab + kPixels * 128, kRingAt = kWideControl;
  static constexpr int kStages = (kSharedLimit - kRingAt) / kStage, kShared = kRingAt + kStages * kStage;
  static_assert(kRingAt % 1024 == 0 && kStages <= kMaxStages && 2 * kPixels * 128 <= kStages * kStage);
  bool live;
  int pixel, channel;  // its first
  __device__ __forceinline__ explicit Row(const Args& a) {
    const int tile = a.ktiles.quotient(blockIdx.x);
    pixel = tile * kPixels, channel = (blockIdx.x - tile * a.ktiles.divisor) * kRowChannels;
    live = pixel < a.pixels;
  }
};

// The producer warp: a lane loads this CTA's weights, and half of the pixels for both.
template <int kPixels>
__device__ __forceinline__ void produce_row(const Args& a, const Maps& maps, uint32_t smem) {
  using R = Row<kPixels>;
  const R job(a);
  if (!job.live || (threadIdx.x & 31)) return;
  grid_dependency_wait();
  const int rank = cluster_rank(), half = rank & 1, first = half * kPixels / 2;
  int stage = 0, phase = 1;
  for (int c = 0; c < a.slices; ++c) {
    const uint32_t full = smem + kFull + 8 * stage, to = smem + R::kRingAt + stage * R::kStage;
    mbar_wait(smem + kEmpty + 8 * stage, phase);
    mbar_expect(full, R::kStage);
    for (int s = 0; s < 2; ++s) tma_load(to + s * kSlab, &maps.w, full, c * 64, job.channel + s * 64);
    tma_multicast(to + 2 * kSlab + first * 128, &maps.row, full, c * 64, job.pixel + first, 3u << (rank & ~1));
    if (++stage == R::kStages) stage = 0, phase ^= 1;
  }
  // Never exit while the other CTA may still report here what it has read.
  for (int s = 0; s < R::kStages; ++s) {
    mbar_wait(smem + kEmpty + 8 * stage, phase);
    if (++stage == R::kStages) stage = 0, phase ^= 1;
  }
}

// Warps 0-7. A warpgroup computes D[64 channels, kPixels] = W[64 channels, C] * X[kPixels, C]^T.
template <class T, int kPixels>
__device__ __forceinline__ void consume_row(const Args& a, const Maps& maps, uint32_t smem) {
  using R = Row<kPixels>;
  const R job(a);
  if (!job.live) return;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), w4 = warp & 3, wg = warp >> 2;
  const int rank = cluster_rank(), k0 = job.channel + wg * 64, channel = k0 + w4 * 16 + (lane >> 2);
  const uint32_t ring = smem + R::kRingAt;
  const uint32_t weights = wgmma_operand(ring + wg * kSlab), pixels = wgmma_operand(ring + 2 * kSlab);
  const float bias0 = load_bias<T>(a, channel), bias1 = load_bias<T>(a, channel + 8);
  auto release = [&](uint32_t empty) {
    if (lane < 2) mbar_arrive_at(empty, (rank & ~1) + lane);
  };
  float acc[kPixels / 2];
  uint32_t read = 0;  // barrier of the stage that the slice before the last one issued has read
  int stage = 0, phase = 0;
  for (int c = 0; c < a.slices; ++c) {
    mbar_wait(smem + kFull + 8 * stage, phase);
    const uint32_t step = stage * (R::kStage >> 4);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<T, kPixels>(acc, wgmma_layout(1024) | (weights + step + k * 2),
                        wgmma_layout(1024) | (pixels + step + k * 2), c | k);
    wgmma_commit();
    wgmma_wait<1>();
    if (read) release(read);
    read = smem + kEmpty + 8 * stage;
    if (++stage == R::kStages) stage = 0, phase ^= 1;
  }
  wgmma_wait<0>();
  release(read);

  bar_sync(1, kRowConsumers);  // both have read the ring: the output takes its place
  const int i8 = lane & 7, mat = lane >> 3;
  const uint32_t staging = ring + wg * kPixels * 128;
  finish_tile<T, kPixels>(a, acc, bias0, bias1,
                          staging + (mat >> 1) * 1024 + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4), 2048);
  fence_async_proxy();
  bar_sync(2 + wg, 128);
  if ((threadIdx.x & 127) == 0) {
    tma_store(&maps.of[1].y, staging, k0, job.pixel, 0, 0);
    tma_store_commit();
    tma_store_wait_read();
  }
}

// ---------------------------------------------------------------- host
inline bool row_takes(const Conv2dParams& p, const Args& a) {
  return a.flat_count >= 0 && !p.residual.data && p.weight.size[0] % (2 * kRowChannels) == 0;
}
// Can jobs of `pixels` be one for each CTA, where those of 128 cannot?
inline bool row_pays(const Conv2dParams& p, const Args& a, int pixels, int ctas) {
  auto jobs = [&](int64_t size) { return (a.pixels + size - 1) / size * (p.weight.size[0] / kRowChannels); };
  return jobs(128) > ctas && jobs(pixels) <= ctas;
}

inline Status row_maps(Maps* maps, const Conv2dParams& p, const Args& a, int pixels) {
  const cuuint64_t size[2] = {cuuint64_t(a.C), cuuint64_t(a.pixels)}, stride[1] = {cuuint64_t(plane_of(p.x).x) * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(pixels / 2)};
  SBNET_TRY(make_map(&maps->row, p.x.dtype, "x", 2, p.x.data, size, stride, box));
  return flat_map(&maps->of[1].y, "out", p.y, pixels);
}

}  // namespace sbnet::sm90::conv1x1_detail

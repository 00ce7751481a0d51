// Parts of conv1x1_split.cu: sums that CTAs of a cluster exchange, the output of a part of a tile's channels, and rows
// of tiles.
#pragma once
#include "cuda/sm90/conv/conv1x1_load.cuh"

namespace sbnet::sm90::conv1x1_detail {

constexpr int kSplitChannels = 128, kSums = 64 * kSplitChannels * 4;  // of a job; bytes of a warpgroup's sums
constexpr int kStagingAt = kWideControl, kSumsAt = kStagingAt + 8 * kRows;
constexpr int kSumsOfOthers = kSums * 3 / 4;  // at most, for a warpgroup

// A warp's 16 pixels of the output: where each lies.
struct WarpPixels {
  const Args& a;
  int4 first;
  int log_row;  // pixels of a row: 8 or 4, or 16 of a flat plane
  __device__ __forceinline__ WarpPixels(const Args& args, int4 unit, int w4) : a(args), first(unit) {
    const bool flat = unit.w & kFlat;
    log_row = flat ? 4 : a.side == 8 ? 3 : 2;
    if (a.side == 8) (flat ? first.z : first.y) += w4 * (flat ? 16 : 2);
  }
  // Elements from the plane's beginning; negative: nowhere.
  __device__ __forceinline__ int64_t offset(const Plane& p, int i) const {
    const bool flat = first.w & kFlat;
    const int y = first.y + (i >> log_row), x = first.z + (i & ((1 << log_row) - 1));
    if (first.x < 0 || y >= a.H || x >= (flat ? a.pixels : a.W)) return -1;
    return first.x * p.n + y * p.y + x * p.x;
  }
};

// Sums are finished 32 channels at a time: of a warp's 16 pixels a lane holds two words of 16 bytes, of four to a
// pixel.
constexpr int kChannels = 32, kWords = 2;
struct Words {
  uint4 of[kWords];
};
template <class F>
__device__ __forceinline__ void for_words(F&& f) {  // i, pixel, word of the pixel
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kWords; ++i) f(i, lane / 4 + i * 8, lane % 4);
}
template <class T>
__device__ __forceinline__ Words fetch_residual(const Args& a, const WarpPixels& pixels, int channel) {
  Words held = {};
  for_words([&](int i, int pixel, int word) {
    const int64_t at = pixels.offset(a.residual, pixel);
    if (at >= 0)
      held.of[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(a.residual.data) + at + channel + word * 8);
  });
  return held;
}
// Sums of the channels from `channel` on: bias, residual, activation, store.
template <class T>
__device__ __forceinline__ void finish(const Args& a, const WarpPixels& pixels, int channel, const float* sums,
                                       const float2 (&bias)[kChannels / 8], const Words& added, uint8_t* staging) {
  auto staged = [&](int pixel, int word) {
    return reinterpret_cast<uint4*>(staging + pixel * 128 + ((word ^ (pixel & 7)) << 4));
  };
  __syncwarp();  // what was staged before has been read
  if (a.residual.data) {
    for_words([&](int i, int pixel, int word) { *staged(pixel, word) = added.of[i]; });
    __syncwarp();
  }
  float biased[kChannels];
#pragma unroll
  for (int e = 0; e < kChannels; ++e) biased[e] = sums[e] + (e & 1 ? bias[e / 4].y : bias[e / 4].x);
  for_epilogue(a, [&](auto simple, auto residual) {
    finish_rows<T, kChannels / 8>(a, simple, residual, biased, smem_address(staging));
  });
  __syncwarp();
  for_words([&](int, int pixel, int word) {
    const int64_t at = pixels.offset(a.y, pixel);
    if (at >= 0) *reinterpret_cast<uint4*>(static_cast<T*>(a.y.data) + at + channel + word * 8) = *staged(pixel, word);
  });
}

// The first sums become this CTA's share of the job's, 16 / kParts groups of 8 channels: those of all kParts CTAs, in
// their order.
template <int kParts>
__device__ __forceinline__ void exchange(uint32_t smem, float (&acc)[64]) {
  constexpr int kShare = 64 / kParts, kBytes = kSums / kParts;
  const int wg = threadIdx.x >> 7, tid = threadIdx.x & 127, rank = cluster_rank(), part = rank & (kParts - 1);
  const uint32_t full = smem + kResidualFull + 8 * wg, from = smem + kSumsAt + wg * kSumsOfOthers + tid * 16;
  if (tid == 0) mbar_expect(full, (kParts - 1) * kBytes);
#pragma unroll
  for (int o = 0; o < kParts; ++o) {
    if (o == part) continue;
    const int slot = part - (part > o);
    const uint32_t to = map_to_rank(from + slot * kBytes, rank - part + o), bar = map_to_rank(full, rank - part + o);
#pragma unroll
    for (int v = 0; v < kShare; v += 4)
      store_async(to + v * 512, bar, acc[o * kShare + v], acc[o * kShare + v + 1], acc[o * kShare + v + 2],
                  acc[o * kShare + v + 3]);
  }
#pragma unroll
  for (int o = 1; o < kParts; ++o)
    if (o == part)
#pragma unroll
      for (int e = 0; e < kShare; ++e) acc[e] = acc[o * kShare + e];
  mbar_wait(full, 0);
#pragma unroll
  for (int v = 0; v < kShare; v += 4) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int o = 0; o < kParts; ++o) {
      const float4 mine = make_float4(acc[v], acc[v + 1], acc[v + 2], acc[v + 3]);
      const float4 more = o == part ? mine : load_shared(from + (o - (o > part)) * kBytes + v * 512);
      sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    acc[v] = sum.x, acc[v + 1] = sum.y, acc[v + 2] = sum.z, acc[v + 3] = sum.w;
  }
}

// A list of all blocks that is a little more than a tile for each CTA: tiles of 128 pixels x 128 output channels would
// take a second, split round; cut as one row of pixels they may be as much larger as makes them one for each: kPixels x
// 128 channels. Two neighbours share the pixels by multicast.
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

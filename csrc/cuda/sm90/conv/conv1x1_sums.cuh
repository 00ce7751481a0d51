// Part of conv1x1_split.cu: sums that CTAs of a cluster exchange, and the output of a part of a job's channels.
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

}  // namespace sbnet::sm90::conv1x1_detail

// The general Hopper convolution of float32, its products in tf32: the epilogue.
#pragma once
#include "cuda/sm90/conv/conv_general_finish.cuh"

namespace sbnet::sm90::general {

// Four sums of a position, from channel k on, become outputs. whole: they move as one word of 16 bytes. Where a.mixed,
// those that are NaN are not written: returns a bit for each.
template <class Simple>
__device__ __forceinline__ uint32_t finish_four(const Args& a, Simple simple, bool whole, const Place& place, int k,
                                                int channels, float (&v)[4]) {
  const auto activate_four = [&] {
    activate(a, v, [&](int e) { return load_bias<HalfOf<float>>(a.slopes, a.slopes_f32, k + e, a.K); });
  };
  if (!simple && a.after) activate_four();
  if (a.residual.data) {
    const float* from = residual_at<float>(a, place, k);
    if (whole) {
      const float4 word = *reinterpret_cast<const float4*>(from);
      v[0] += word.x, v[1] += word.y, v[2] += word.z, v[3] += word.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (e < channels) v[e] += from[e * a.residual_c];
    }
  }
  if (simple) {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = max_nan(v[e], a.low);
  } else if (!a.after) {
    activate_four();
  }
  uint32_t nan = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) nan |= (e < channels && v[e] != v[e]) << e;
  if (!a.mixed) nan = 0;
  float* to = static_cast<float*>(a.y.data) + place.y + k * a.y_c;
  if (whole && !nan) {
    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < channels && !(nan >> e & 1)) to[e * a.y_c] = v[e];
  }
  return nan;
}

// The tile's sums become outputs, C::kStaged of a warpgroup's positions at a time, through rows of floats in shared
// memory. One copy of the code runs for all of them, whose sums are moved. halves: as of finish().
template <class C, class Acc>
__device__ __forceinline__ void finish_floats(const Args& a, const Column& column, int k0, Acc& acc, uint8_t* shared,
                                              const Place* places, const float* bias, int2 halves = {0, 2}) {
  const int tid = threadIdx.x & 127, lane = tid & 31, wg = threadIdx.x >> 7, w4 = tid >> 5;
  constexpr int kWords = C::kOutputs / 4, kEach = C::kStaged * kWords / 128, kSums = C::kStaged * C::kOutputs / 128;
  float* staged = reinterpret_cast<float*>(shared + wg * C::kStaging);
  const bool whole = a.out_word == 16;
  uint64_t nan = 0;  // outputs that are to be summed again, once registers are free: a bit each
#pragma unroll 1
  for (int first = halves.x * 64; first < halves.y * 64; first += C::kStaged) {
    if (first != halves.x * 64) bar_sync(1 + wg, 128);
    if constexpr (C::kChannelRows) {
      float* mine = staged + (lane & 3) * 2 * C::kPitch + w4 * 16 + (lane >> 2);
#pragma unroll
      for (int e = 0; e < kSums; ++e) mine[(e / 4 * 8 + e % 2) * C::kPitch + e / 2 % 2 * 8] = acc[0][e];
#pragma unroll
      for (int e = 0; e < 64 - kSums; ++e) acc[0][e] = acc[0][e + kSums];
    } else {
      float* mine = staged + (w4 * 16 + (lane >> 2)) * C::kPitch + (lane & 3) * 2;
#pragma unroll
      for (int e = 0; e < kSums; e += 2)
        *reinterpret_cast<float2*>(mine + e / 2 % 2 * 8 * C::kPitch + e / 4 * 8) =
            make_float2(acc[0][e], acc[0][e + 1]);
#pragma unroll
      for (int e = 0; e < kSums; ++e) acc[0][e] = acc[1][e];
    }
    bar_sync(1 + wg, 128);
    const auto finish_words = [&](auto simple) {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const int at = tid + i * 128, position = at / kWords, word = at % kWords, k = k0 + word * 4;
        const Place place = places[first + position];
        if (place.y < 0 || k >= column.k_end) continue;
        const float4 sum = *reinterpret_cast<const float4*>(staged + position * C::kPitch + word * 4);
        const float4 add = *reinterpret_cast<const float4*>(bias + word * 4);
        float v[4] = {sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w};
        nan |= static_cast<uint64_t>(finish_four(a, simple, whole, place, k, column.k_end - k, v))
               << (first / C::kStaged * kEach + i) * 4;
      }
    };
    if (ends_in_max(a))
      finish_words(Known<true>());
    else
      finish_words(Known<false>());
  }
#pragma unroll 1
  for (; nan; nan &= nan - 1) {
    const int bit = __ffsll(static_cast<int64_t>(nan)) - 1, word = bit / 4, at = tid + word % kEach * 128;
    const int k = k0 + at % kWords * 4 + bit % 4;
    const Place place = places[word / kEach * C::kStaged + at / kWords];
    static_cast<float*>(a.y.data)[place.y + k * a.y_c] = own_group_output<float>(a, place, k);
  }
}

}  // namespace sbnet::sm90::general

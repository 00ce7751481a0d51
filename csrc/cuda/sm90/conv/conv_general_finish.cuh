// The general Hopper convolution: where positions lie in the output, epilogue and stores.
#pragma once
#include <type_traits>

#include "cuda/sm90/conv/conv_general_plan.cuh"

namespace sbnet::sm90::general {

// Where a position's first channel is in y, in elements, < 0 for nowhere; and which pixel it is.
struct alignas(16) Place {
  int64_t y;
  int32_t n;
  uint32_t pixel;  // row << 16 | column
};

// Where position `at` of warpgroup `wg` goes, given its tile's units.
__device__ __forceinline__ Place place_of(const Args& a, const int4* units, int wg, int at) {
  uint32_t row = at >> 3, column = at & 7;
  int which = a.units == 1 ? 0 : wg;
  if (a.shape == Shape::kLinear) {
    a.pitch.divmod(at + (a.units == 1 ? wg * kPositions : 0), &row, &column);
  } else if (a.shape == Shape::kCells) {
    which = wg * 2 + (row & 1), row >>= 1;
  } else if (a.units == 1) {
    column += wg * 8;
  }
  const int4 unit = units[which];
  if (static_cast<int>(row) >= unit.w >> 16 || static_cast<int>(column) >= (unit.w & 0xffff)) return {-1, 0, 0};
  const uint32_t y = unit.y + row, x = unit.z + column;
  return {unit.x * a.y.n + y * a.y.y + x * a.y.x, unit.x, y << 16 | x};
}
template <class T>
__device__ __forceinline__ const T* residual_at(const Args& a, const Place& place, int k) {
  return static_cast<const T*>(a.residual.data) + place.n * a.residual.n + (place.pixel >> 16) * a.residual.y +
         (place.pixel & 0xffff) * a.residual.x + k * a.residual_c;
}

// Copies a word of 8 channels, of which `channels` are there, between shared and global memory. word: bytes that may be
// copied at once; *_apart: elements from one channel to the next.
__device__ __forceinline__ void copy_channels(void* to, int64_t to_apart, const void* from, int64_t from_apart,
                                              int word, int channels) {
  if (word == 16 && channels >= 8) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    return;
  }
  auto* target = static_cast<uint16_t*>(to);
  const auto* source = static_cast<const uint16_t*>(from);
#pragma unroll 1
  for (int e = 0; e < min(channels, 8);) {
    if (word >= 8 && e + 4 <= channels)
      *reinterpret_cast<uint2*>(target + e) = *reinterpret_cast<const uint2*>(source + e), e += 4;
    else
      target[e * to_apart] = source[e * from_apart], ++e;
  }
}

template <class T>
__device__ __forceinline__ bool is_nan(uint16_t bits) {
  const float v = unpack<T>(bits).x;
  return v != v;
}
// What bias and slopes may be instead of float32: nothing else where T is float.
template <class T>
using HalfOf = std::conditional_t<std::is_same_v<T, float>, __half, T>;
// The element at `from` of global memory.
template <class T>
__device__ __forceinline__ float load_element(const void* from) {
  if constexpr (std::is_same_v<T, float>)
    return load_float(from);
  else
    return unpack<T>(load_half(from)).x;
}
// Groups multiply inputs of each other by zero where they are computed together, or where one ends within a step of 16
// channels. Of an infinity or NaN that is NaN: what came out as NaN is summed again over its own group alone.
template <class T>
__device__ __forceinline__ float own_group_output(const Args& a, Place place, int k) {
  const int row = place.pixel >> 16, column = place.pixel & 0xffff;
  const int group = k / static_cast<int>(a.group_outputs.divisor);
  const int bytes = sizeof(T), inputs = a.group_inputs.divisor * 2 / bytes;
  float v[1] = {load_bias<HalfOf<T>>(a, k)};
  for (int r = 0; r < a.kernel[0]; ++r) {
    for (int s = 0; s < a.kernel[1]; ++s) {
      const int y = row * a.stride[0] - a.padding[0] + r * a.dilation[0];
      const int x = column * a.stride[1] - a.padding[1] + s * a.dilation[1];
      if (static_cast<uint32_t>(y) >= static_cast<uint32_t>(a.x_h) ||
          static_cast<uint32_t>(x) >= static_cast<uint32_t>(a.x_w))
        continue;
      const char* pixel = a.x + place.n * a.x_n + static_cast<int64_t>(y) * a.x_y + static_cast<int64_t>(x) * a.x_x;
      const char* w = a.w + k * a.w_k + r * a.w_r + s * a.w_s;
      for (int c = 0; c < inputs; ++c)
        v[0] += load_element<T>(pixel + (group * inputs + c) * bytes) * load_element<T>(w + c * bytes);
    }
  }
  const float added = a.residual.data ? load_element<T>(residual_at<T>(a, place, k)) : 0.f;
  if (!a.after) v[0] += added;
  activate(a, v, [&](int) { return load_bias<HalfOf<T>>(a.slopes, a.slopes_f32, k, a.K); });
  if (a.after) v[0] += added;
  return v[0];
}

// The same of a list's outputs, whose absent blocks are zeros, too.
template <class C>
__device__ __forceinline__ float own_blocks_output(const Args& a, const Place& place, int k) {
  using T = typename C::T;
  const int column = k / C::kOutputs, output = k % C::kOutputs;
  const int2 slices = slices_of<C>(a, column);
  float v[1] = {load_bias<T>(a, k)};
#pragma unroll 1
  for (int slice = slices.x; slice < slices.y; ++slice) {
    const Slice own = slice_of<C>(a, slice);
    const int32_t* blocks =
        a.list.pieces + int64_t{slice} * conv_piece_words(C::kOutputs) + kPieceHead + output / 16 * 4;
    const char* weights = a.w + int64_t{slice} * a.kernel[0] * a.kernel[1] * C::kOutputs * 128 + output * a.w_k;
#pragma unroll 1
    for (int at = 0; at < own.steps * 16 * a.kernel[0] * a.kernel[1]; ++at) {
      const int c = at % (own.steps * 16), tap = at / (own.steps * 16);
      const int r = tap / a.kernel[1], s = tap % a.kernel[1];
      const int y = static_cast<int>(place.pixel >> 16) * a.stride[0] - a.padding[0] + r * a.dilation[0];
      const int x = static_cast<int>(place.pixel & 0xffff) * a.stride[1] - a.padding[1] + s * a.dilation[1];
      if (static_cast<uint32_t>(y) >= static_cast<uint32_t>(a.x_h) ||
          static_cast<uint32_t>(x) >= static_cast<uint32_t>(a.x_w) || own.channel + c >= a.channels ||
          load_int(blocks + c / 16) < 0)
        continue;
      const char* pixel = a.x + place.n * a.x_n + static_cast<int64_t>(y) * a.x_y + static_cast<int64_t>(x) * a.x_x;
      v[0] += unpack<T>(load_half(pixel + (own.channel + c) * 2)).x *
              unpack<T>(load_half(weights + r * a.w_r + s * a.w_s + c * 2)).x;
    }
  }
  if (is_max(a.activation))
    v[0] = max_nan(v[0], a.low);
  else
    activate(a, v);
  return v[0];
}

// Is any of 8 elements NaN? Its exponent is all ones, and its mantissa is not zero.
template <class T>
__device__ __forceinline__ bool has_nan(uint4 v) {
  constexpr uint32_t kInfinity = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  bool nan = false;
#pragma unroll
  for (const uint32_t pair : {v.x, v.y, v.z, v.w})
    nan |= (pair & 0x7fffu) > kInfinity || (pair >> 16 & 0x7fffu) > kInfinity;
  return nan;
}

// The tile's sums become outputs, 64 positions at a time: through staged rows of 128 bytes, kSlabs to a position, as
// the threads that have a position's channels are not those that should write them. Where channels are rows of the
// product, all of a warpgroup share its staging memory; where positions are, a warp's 16 positions are its own.
// halves: which of the warpgroup's two times 64 positions, the first and the end; the sums are acc's from its
// beginning.
//
// The second 64 positions run the same instructions as the first, with their sums moved: for code that runs once per
// tile, instruction fetch costs as much as execution.
template <class C, class Acc>
__device__ __forceinline__ void finish(const Args& a, const Column& column, int k0, Acc& acc, uint32_t smem,
                                       uint8_t* shared, const Place* places, const float* bias, int2 halves = {0, 2}) {
  using T = typename C::T;
  const int tid = threadIdx.x & 127, lane = tid & 31, wg = threadIdx.x >> 7;
  const int w4 = __shfl_sync(0xffffffff, tid >> 5, 0);
  constexpr bool kShare = C::kChannelRows;
  constexpr int kMine = kShare ? 64 : 16, kTeam = kShare ? 128 : 32;  // positions and threads that share memory
  constexpr int kEach = kMine * C::kWords / kTeam;                    // words of a thread
  const int member = kShare ? tid : lane, first = kShare ? 0 : w4 * 16;
  const uint32_t staging = wg * C::kStaging + first * C::kSlabs * 128;
  auto meet = [&] {
    if constexpr (kShare)
      bar_sync(1 + wg, 128);
    else
      __syncwarp();
  };
  // f(bytes from the beginning of shared memory, where its position goes, first channel) for a word of this thread.
  auto word_of_thread = [&](int i, auto&& f) {
    const int at = member + i * kTeam, position = at / C::kWords, word = at % C::kWords;
    const int row = position * C::kSlabs + word / 8, k = k0 + word * 8;
    const Place* place = places + first + position;
    if (place->y >= 0 && k < column.k_end) f(staging + row * 128 + (((word ^ row) & 7) << 4), place, k);
  };
  auto for_words = [&](auto&& f) {
    if constexpr (C::kWhole) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) word_of_thread(i, f);
    } else {
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) word_of_thread(i, f);
    }
  };
  bool resum = false;
  places += halves.x * 64;
#pragma unroll 1
  for (int half = halves.x; half < halves.y; ++half, places += 64) {
    if (half != halves.x) meet();
    if (a.residual.data) {
      for_words([&](uint32_t at, const Place* place, int k) {
        const T* from = residual_at<T>(a, *place, k);
        if constexpr (C::kWhole)
          *reinterpret_cast<uint4*>(shared + at) = *reinterpret_cast<const uint4*>(from);
        else
          copy_channels(shared + at, 1, from, a.residual_c, a.out_word, column.k_end - k);
      });
      meet();
    }
    for_epilogue(a, [&](auto simple, auto residual) {
      if constexpr (kShare) {
        const uint32_t low = pack<T>(a.low, a.low);
        const int i8 = lane & 7, mat = lane >> 3;
        const float bias0 = bias[w4 * 16 + (lane >> 2)], bias1 = bias[w4 * 16 + (lane >> 2) + 8];
        const uint32_t lane_row = smem + staging + (mat >> 1) * 1024 + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float v[8];
          uint32_t packed[4];
#pragma unroll
          for (int e = 0; e < 8; ++e) v[e] = acc[0][j * 8 + e] + (e & 2 ? bias1 : bias0);
          if (residual) ldmatrix_trans(lane_row + j * 2048, packed);
          finish_sums<T>(a, simple, residual, v, low, packed, RowSlopes<T>{a, k0 + w4 * 16 + (lane >> 2)});
          stmatrix_trans(lane_row + j * 2048, packed[0], packed[1], packed[2], packed[3]);
        }
      } else {
#pragma unroll
        for (int e = 0; e < C::kOutputs / 2; e += 4) {
          const float2 pair = *reinterpret_cast<const float2*>(bias + e * 2 + (lane & 3) * 2);
          acc[0][e] += pair.x, acc[0][e + 1] += pair.y, acc[0][e + 2] += pair.x, acc[0][e + 3] += pair.y;
        }
        finish_rows<T, (C::kOutputs < 64 ? C::kOutputs : 64) / 8, C::kSlabs>(a, simple, residual, acc[0],
                                                                             smem + staging, 0, ColumnSlopes<T>{a, k0});
        if constexpr (C::kSlabs == 2)
          finish_rows<T, (C::kOutputs - 64) / 8, 2>(a, simple, residual, acc[0] + 32, smem + staging, 1,
                                                    ColumnSlopes<T>{a, k0 + 64});
      }
    });
    if constexpr (kShare) {
#pragma unroll
      for (int e = 0; e < 32; ++e) acc[0][e] = acc[0][32 + e];
    } else {
#pragma unroll
      for (int e = 0; e < C::kOutputs / 2; ++e) acc[0][e] = acc[1][e];
    }
    meet();
    if (!C::kListed && (!C::kWhole || a.mixed)) {
      bool nan = false;
      if (a.mixed)
        for_words(
            [&](uint32_t at, const Place*, int) { nan |= has_nan<T>(*reinterpret_cast<const uint4*>(shared + at)); });
      if (__any_sync(0xffffffff, nan)) {
#pragma unroll 1
        for (int i = 0; i < kEach; ++i)
          word_of_thread(i, [&](uint32_t at, const Place* place, int k) {
#pragma unroll 1
            for (int e = 0; e < 8 && k + e < column.k_end; ++e) {
              uint16_t* output = reinterpret_cast<uint16_t*>(shared + at) + e;
              if (is_nan<T>(*output)) *output = pack<T>(own_group_output<T>(a, *place, k + e), 0.f);
            }
          });
      }
    }
    for_words([&](uint32_t at, const Place* place, int k) {
      T* to = static_cast<T*>(a.y.data) + place->y + (C::kWhole ? k : k * a.y_c);
      if (C::kListed && a.mixed) resum |= has_nan<T>(*reinterpret_cast<const uint4*>(shared + at));
      if constexpr (C::kWhole)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(shared + at);
      else
        copy_channels(to, a.y_c, shared + at, 1, a.out_word, column.k_end - k);
    });
  }
  if (C::kListed && resum) {  // in memory, now that registers are free: what this thread has just written
    places -= 2 * 64;
#pragma unroll 1
    for (int half = 0; half < 2; ++half, places += 64)
#pragma unroll 1
      for (int i = 0; i < kEach; ++i)
        word_of_thread(i, [&](uint32_t, const Place* place, int k) {
#pragma unroll 1
          for (int e = 0; e < 8; ++e) {
            T* output = static_cast<T*>(a.y.data) + place->y + k + e;
            if (is_nan<T>(static_cast<uint16_t>(load_half(output))))
              *output = from_float<T>(own_blocks_output<C>(a, *place, k + e));
          }
        });
  }
}

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

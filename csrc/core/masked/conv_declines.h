// Why the kernels of every GPU do not take a convolution, and what all kernels ask of planes: part of conv_select.cpp.
#pragma once
#include <algorithm>

#include "core/masked/conv_patches.h"
#include "core/masked/conv_select.h"
#include "core/memory.h"

namespace sbnet {
namespace {

constexpr int kMostMergedOutputs = 16, kMostRowsTaps = 8;
// 5x5 and 7x7 of 64 channels took 12 and 21 % longer by rows than by the implicit GEMM, 3x3 as fast (H200).
constexpr int kFewRowsOutputs = 64, kMostRowsSum = 768;
constexpr int kMaxDepthwiseTaps = 128;
constexpr int kMostFewChannels = 4, kMostFewTaps = 16, kMostFewOutputs = 128;

bool is_half(DType t) { return t == DType::kF16 || t == DType::kBF16; }

// Tiles and units are counted in 31 bits, with room for a scheduler that looks ahead.
bool tiles_fit(const ActiveView& active, const FringeView& fringe, int cell, int64_t channel_tiles) {
  const int64_t per_block = int64_t{active.grid.size[0] / cell} * (active.grid.size[1] / cell);
  return active.capacity < INT32_MAX && fringe.capacity < INT32_MAX && per_block < 1 << 30 &&
         active.capacity * per_block < (1 << 30) / channel_tiles;
}

const char* grouped_planes_decline(const Conv2dParams& p) {
  if (p.x.size[1] % 8) return "input channels are no multiple of 8";
  if (p.weight.size[0] % 8) return "output channels are no multiple of 8";
  if (!weights_packed(p.weight)) return "weights are not packed channels-last and 16-byte aligned";
  if (!tma_reads(p.x) || !tma_reads(p.y) || (p.residual.data && !tma_reads(p.residual)))
    return "a tensor is not channels-last with 16-byte aligned pixels";
  return nullptr;
}

const char* planes_decline(const Conv2dParams& p) { return p.groups != 1 ? "groups" : grouped_planes_decline(p); }

const char* half_planes_decline(const Conv2dParams& p) {
  return is_half(p.x.dtype) ? planes_decline(p) : "dtype is neither float16 nor bfloat16";
}
const char* product_planes_decline(const Conv2dParams& p) {
  return p.x.dtype != DType::kF32 || p.allow_tf32 ? planes_decline(p) : "float32 without allow_tf32";
}

const char* stride_declines(const Conv2dParams& p) {
  return p.stride[0] != p.stride[1] || p.stride[0] > 2 ? "stride is neither 1 nor 2" : nullptr;
}

// Sides in 16 bits, distances within an image in 32.
bool sides_fit(const TensorView& t) {
  const PixelStrides s = pixel_strides(t);
  for (int d = 2; d < 4; ++d)
    if (t.size[d] > UINT16_MAX) return false;
  return s.y >= 0 && s.x >= 0 && s.y < 1 << 30 && s.x < 1 << 30;
}

const char* few_channels_decline(const Conv2dParams& p) {
  if (!is_half(p.x.dtype)) return "dtype is neither float16 nor bfloat16";
  if (p.x.size[1] > kMostFewChannels || p.groups != 1) return "more than 4 input channels";
  if (p.weight.size[2] * p.weight.size[3] > kMostFewTaps) return "more than 16 taps";
  if (p.weight.size[0] > kMostFewOutputs) return "more than 128 output channels";
  if (p.residual.data) return "a residual";
  const PixelStrides x = pixel_strides(p.x);
  if (!sides_fit(p.x) || x.y * p.x.size[2] + x.x * p.x.size[3] > INT32_MAX) return "a plane too large to count";
  return tiles_fit(p.active, p.fringe, 1, 1) ? nullptr : "too many tiles to count";
}

const char* first_declines(const Conv2dParams& p) {
  const int64_t R = p.weight.size[2], S = p.weight.size[3];
  if (!is_half(p.x.dtype)) return "dtype is neither float16 nor bfloat16";
  if (p.x.size[1] > kMostFewChannels || p.groups != 1) return "more than 4 input channels";
  if (R * S <= kMostFewTaps || R > 8 || S > 8) return "taps are not 17 to 64, up to 8 along an axis";
  if (p.weight.size[0] > 64 || p.weight.size[0] % 8) return "output channels are no multiple of 8 up to 64";
  if (!channels_vectorize(p.y) || (p.residual.data && !channels_vectorize(p.residual)))
    return "an output is not channels-last with 16-byte aligned pixels";
  double pixels = 1;
  for (int d = 0; d < 2; ++d) {
    if (p.active.grid.size[d] % 8) return "block sides are no multiples of 8";
    // and a row of outputs apart, for zeros
    pixels *= 8. * p.stride[d] + static_cast<double>(p.weight.size[2 + d] - 1) * p.dilation[d] + 1;
  }
  if (pixels > kMostFirstPatch) return "taps too far apart";
  return tiles_fit(p.active, p.fringe, 8, 1) ? nullptr : "too many tiles to count";
}

const char* depthwise_declines(const Conv2dParams& p) {
  if (p.weight.size[1] != 1 || (p.groups == 1 && p.weight.size[0] > 8)) return "more than one input channel a group";
  if (p.weight.size[2] * p.weight.size[3] > kMaxDepthwiseTaps) return "more than 128 taps";
  return (p.weight.size[0] + 31) / 32 < 65536 ? nullptr : "too many channels to count";
}

// Words of eight channels of a channels-last plane are counted in 31 bits.
bool words_fit(const TensorView& t) {
  const PixelStrides s = pixel_strides(t);
  return static_cast<double>(t.size[0] - 1) * static_cast<double>(s.n) +
                 static_cast<double>(t.size[2]) * static_cast<double>(s.y) +
                 static_cast<double>(t.size[3]) * static_cast<double>(s.x) <
             8. * (1 << 30) &&
         s.n / 8 < 1 << 30;
}

// 3x3 of stride 1, in cells of 8x8.
const char* patch_window_declines(const Conv2dParams& p) {
  if (p.weight.size[2] != 3 || p.weight.size[3] != 3) return "kernel is not 3x3";
  for (int d = 0; d < 2; ++d) {
    if (p.stride[d] != 1) return "stride is not 1";
    if (p.padding[d] != 1) return "padding is not 1";
    if (p.dilation[d] != 1) return "dilation is not 1";
    if (p.active.grid.size[d] % 8) return "block sides are no multiples of 8";
  }
  return tiles_fit(p.active, p.fringe, 8, (p.weight.size[0] + 63) / 64) ? nullptr : "too many tiles to count";
}

const char* patch_3x3_declines(const Conv2dParams& p) {
  if (p.weight.size[2] != 3 || p.weight.size[3] != 3) return "kernel is not 3x3";
  if (const char* why = product_planes_decline(p)) return why;
  if (!words_fit(p.x)) return "a plane too large to count";
  return patch_window_declines(p);
}

const char* groups_3x3_decline(const Conv2dParams& p) {
  const int64_t channels = p.weight.size[1];
  if (p.weight.size[2] != 3 || p.weight.size[3] != 3) return "kernel is not 3x3";
  if (!is_half(p.x.dtype)) return "dtype is neither float16 nor bfloat16";
  if (channels != 4 && channels != 8 && channels != 16 && channels != 32)
    return "not 4, 8, 16 or 32 input channels a group";
  if (p.weight.size[0] != p.x.size[1]) return "not as many output channels as input channels";
  if (p.x.size[1] % (channels > 8 ? 64 : 32)) return "channels are no multiple of 32, or of 64";
  if (const char* why = grouped_planes_decline(p)) return why;
  if (const char* why = stride_declines(p)) return why;
  for (int d = 0; d < 2; ++d) {
    if (p.dilation[d] != 1) return "dilation is not 1";
    if (p.active.grid.size[d] % 8) return "block sides are no multiples of 8";
  }
  if (!words_fit(p.x)) return "a plane too large to count";
  return tiles_fit(p.active, p.fringe, 8, p.weight.size[0] / 32) ? nullptr : "too many tiles to count";
}

// Up to 8x8 taps, and a residual that lies as the output does.
const char* rows_window_declines(const Conv2dParams& p) {
  if (p.weight.size[2] > kMostRowsTaps || p.weight.size[3] > kMostRowsTaps) return "more than 8 taps along an axis";
  if (p.residual.data) {
    const PixelStrides y = pixel_strides(p.y), residual = pixel_strides(p.residual);
    if (y.n != residual.n || y.y != residual.y || y.x != residual.x)
      return "the residual's strides are not the output's";
  }
  for (int d = 0; d < 2; ++d)  // so that taps stay countable, too
    if (p.padding[d] > UINT16_MAX || p.dilation[d] > UINT16_MAX) return "taps too far apart";
  return nullptr;
}

const char* rows_decline(const Conv2dParams& p) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  const DType dtype = p.x.dtype;
  if (dtype == DType::kF32 && !p.allow_tf32) return "float32 without allow_tf32";
  if (const char* why = grouped_planes_decline(p)) return why;
  if (p.groups > 1 && outputs <= kMostMergedOutputs) return "up to 16 output channels a group";
  if (p.weight.size[1] % 8 || outputs % 8) return "channels a group are no multiple of 8";
  const double sum = static_cast<double>(p.weight.size[1]) * p.weight.size[2] * p.weight.size[3];
  if (!is_pixelwise(p) && outputs <= kFewRowsOutputs && sum > kMostRowsSum) return "long sums of few output channels";
  if (const char* why = rows_window_declines(p)) return why;
  if (!words_fit(p.x) || !words_fit(p.y) || p.weight.size[0] * p.weight.stride[0] > INT32_MAX)
    return "a plane too large to count";
  return tiles_fit(p.active, p.fringe, 1, p.groups * ((outputs + 63) / 64)) ? nullptr : "too many tiles to count";
}

const char* implicit_gemm_declines(const Conv2dParams& p) {
  if (p.x.dtype != DType::kF32) return nullptr;
  if (!p.allow_tf32) return "float32 without allow_tf32";
  const bool words = channels_vectorize(p.x) && p.weight.size[1] % 4 == 0 && channels_vectorize(p.weight);
  return words ? nullptr : "channels are no 16-byte words";
}

const char* simt_words_decline(const Conv2dParams& p) {
  if (p.x.dtype != DType::kF32) return "dtype is not float32";
  const bool words = channels_vectorize(p.x) && channels_vectorize(p.weight) && p.weight.size[1] % 4 == 0;
  return words ? nullptr : "channels are no 16-byte words";
}

const char* simt_declines(const Conv2dParams& p) { return p.x.dtype == DType::kF32 ? nullptr : "dtype is not float32"; }

}  // namespace
}  // namespace sbnet

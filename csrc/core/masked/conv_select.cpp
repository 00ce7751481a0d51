#include "core/masked/conv_select.h"

#include <algorithm>
#include <cstdio>
#include <initializer_list>

#include "core/masked/conv_declines.h"
#include "core/masked/conv_pairs.h"
#include "core/masked/conv_patches.h"
#include "core/memory.h"

namespace sbnet {
namespace {

constexpr int kStemCell = 8;
constexpr int kMaxGeneralTaps = 128, kLeastGeneralPixels = 36;
// Beyond 64 channels the 3x3 kernel fills up to the next 64. Up to so many the general one, which does not, is faster
// where its tiles of 16x16 pixels are enough for several rounds of a device's multiprocessors.
constexpr int kMostNarrowChannels = 96, kEnoughNarrowTiles = 800;
constexpr int kMaxBottleneckChannels = 512, kMaxBottleneckWidth = 128;

// More than 64 channels, but not many more.
bool is_narrow(const Conv2dParams& p) {
  const int64_t most = std::max(p.x.size[1], p.weight.size[0]);
  const BlockGrid& grid = p.active.grid;
  const double pixels = static_cast<double>(p.active.capacity) * grid.size[0] * grid.size[1];
  return most > 64 && most <= kMostNarrowChannels && pixels >= 256. * kEnoughNarrowTiles;
}

const char* hopper_3x3_declines(const Conv2dParams& p) {
  const BlockGrid& grid = p.active.grid;
  if (p.weight.size[2] != 3 || p.weight.size[3] != 3) return "kernel is not 3x3";
  if (const char* why = half_planes_decline(p)) return why;
  if (const char* why = stride_declines(p)) return why;
  for (int d = 0; d < 2; ++d) {
    if (p.padding[d] != 1) return "padding is not 1";
    if (p.dilation[d] != 1) return "dilation is not 1";
    if (grid.size[d] % 8) return "block sides are no multiples of 8";
  }
  if (p.stride[0] == 2 && p.slope) return "slopes a channel, with stride 2";
  if (p.stride[0] == 2 && (p.x.size[2] < 2 || p.x.size[3] < 2)) return "a plane of one row or column";
  if (p.stride[0] == 1 && is_narrow(p) && !hopper_general_declines(p))
    return "65 to 96 channels, which it fills up to 128";
  return tiles_fit(p.active, p.fringe, 8, (p.weight.size[0] + 63) / 64) ? nullptr : "too many tiles to count";
}

const char* hopper_1x1_declines(const Conv2dParams& p) {
  const bool patches = reads_patches(p);
  if (!patches && !is_pixelwise(p)) return "kernel is neither 1x1 nor the stride";
  if (const char* why = half_planes_decline(p)) return why;
  if (!patches)
    if (const char* why = stride_declines(p)) return why;
  if (p.padding[0] || p.padding[1]) return "padding is not 0";
  if (p.slope) return "slopes a channel";
  if (!conv1x1_cell(p.active.grid)) return "block sides are no multiples of 4";
  return tiles_fit(p.active, p.fringe, 4, (p.weight.size[0] + 63) / 64) ? nullptr : "too many tiles to count";
}

const char* hopper_stem_declines(const Conv2dParams& p) {
  if (p.weight.size[2] != 7 || p.weight.size[3] != 7) return "kernel is not 7x7";
  if (!is_half(p.x.dtype)) return "dtype is neither float16 nor bfloat16";
  if (p.x.size[1] != 3 || p.groups != 1) return "input channels are not 3";
  if (p.weight.size[0] > 64 || p.weight.size[0] % 8) return "output channels are no multiple of 8 up to 64";
  if (p.residual.data) return "a residual";
  if (p.slope) return "slopes a channel";
  if (!weights_packed(p.weight)) return "weights are not packed channels-last and 16-byte aligned";
  for (int d = 0; d < 2; ++d) {
    if (p.stride[d] != 2 || p.padding[d] != 3 || p.dilation[d] != 1) return "not stride 2, padding 3, dilation 1";
    if (p.active.grid.size[d] % kStemCell) return "block sides are no multiples of 8";
  }
  const PixelStrides x = pixel_strides(p.x);
  if (reinterpret_cast<uintptr_t>(p.x.data) % 16 || p.x.stride[1] != 1 || x.x != 3 || !tma_reads(p.y))
    return "a tensor is not channels-last with 16-byte aligned rows";
  for (const int64_t s : {x.n, x.y})
    if (s <= 0 || s % 8 || s >= (int64_t{1} << 39)) return "rows of the input are not 16-byte aligned";
  for (int d = 0; d < 4; ++d)
    if (p.x.size[d] >= INT32_MAX / 8) return "a side too long to count";
  return tiles_fit(p.active, p.fringe, kStemCell, 1) ? nullptr : "too many tiles to count";
}

}  // namespace

const ConvKernelRow kConvTable[kConvKernels] = {
    {ConvKernel::kHopper3x3, "Hopper 3x3", 90, hopper_3x3_declines},
    {ConvKernel::kHopper1x1, "Hopper 1x1", 90, hopper_1x1_declines},
    {ConvKernel::kHopperStem, "Hopper stem", 90, hopper_stem_declines},
    {ConvKernel::kFewChannels, "few channels", 0, few_channels_decline},
    {ConvKernel::kGroups3x3, "3x3 by groups", 0, groups_3x3_decline},
    {ConvKernel::kFirst, "first layer", 0, first_declines},
    {ConvKernel::kHopperGeneral, "Hopper general", 90, hopper_general_declines},
    {ConvKernel::kDepthwise, "depthwise", 0, depthwise_declines},
    {ConvKernel::kPatch3x3, "3x3 by patches", 0, patch_3x3_declines},
    {ConvKernel::kRows, "by rows", 0, rows_decline},
    {ConvKernel::kImplicitGemm, "implicit GEMM", 0, implicit_gemm_declines},
    {ConvKernel::kSimtWords, "float32 in words", 0, simt_words_decline},
    {ConvKernel::kSimt, "float32", 0, simt_declines},
};

namespace {

template <class Row, int kRows, class Params>
const Row& select(const Row (&table)[kRows], const Params& p, int32_t capability) {
  for (const Row& row : table)
    if ((!row.capability || row.capability == capability) && !row.declines(p)) return row;
  return table[kRows - 1];
}

// The chosen kernel's name, and a line for each row above it.
template <class Row, int kRows, class Params>
void describe(const Row (&table)[kRows], const Params& p, int32_t capability, char* text, int64_t room) {
  const Row& chosen = select(table, p, capability);
  int64_t used = snprintf(text, static_cast<size_t>(room), "%s", chosen.name);
  for (const Row& row : table) {
    if (row.kernel == chosen.kernel || used >= room) break;
    const bool elsewhere = row.capability && row.capability != capability;
    const char* why = elsewhere ? "not this device" : row.declines(p);
    used += snprintf(text + used, static_cast<size_t>(room - used), "\n%s: %s", row.name, why);
  }
}

}  // namespace

const ConvKernelRow& select_conv(const Conv2dParams& p, int32_t capability) {
  return select(kConvTable, p, capability);
}

bool hopper_taps_fit(const Conv2dParams& p) {
  const int64_t C = p.x.size[1], K = p.weight.size[0];
  return !half_planes_decline(p) && !is_pixelwise(p) && p.groups == 1 && C % 64 == 0 && K % 128 == 0 && !p.slope &&
         p.stride[0] == 1 && p.stride[1] == 1 && conv1x1_cell(p.active.grid) &&
         tiles_fit(p.active, p.fringe, 4, K / 64);
}

const char* hopper_general_declines(const Conv2dParams& p) {
  const TensorView& w = p.weight;
  const int64_t inputs = w.size[1];
  if (p.x.dtype == DType::kF32 && !p.allow_tf32) return "float32 without allow_tf32";
  if (inputs == 1 && p.groups > 1) return "one input channel a group";
  if (w.size[2] * w.size[3] > kMaxGeneralTaps) return "more than 128 taps";
  if (p.x.stride[1] != 1 && p.x.size[1] > 1) return "the input's channels are not adjacent";
  if (w.stride[1] != 1 && inputs > 1) return "the weights' channels are not adjacent";
  if (p.x.dtype == DType::kF32) {
    const Conv2dParams pairs = half_pairs(p);
    if (p.stride[0] != 1 || p.stride[1] != 1) return "float32 with a stride";
    if (inputs % 4 || !tma_reads(pairs.x) || !weights_packed(pairs.weight)) return "float32 in no 16-byte words";
    return hopper_general_declines(pairs);
  }
  if (!sides_fit(p.x) || !sides_fit(p.y)) return "a plane too large to count";
  for (int d = 2; d < 4; ++d)
    if (w.size[d] > 1 && (w.stride[d] < 0 || w.stride[d] * (w.size[d] - 1) >= 1 << 28)) return "weights too far apart";
  if (w.size[0] >= 1 << 24 || p.x.size[1] >= 1 << 24) return "too many channels to count";
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]),
                width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  if (height * width < kLeastGeneralPixels) return "blocks of few pixels";
  // A tile has at least 16 channels of a group, or more small groups together; no way to cut a block is taken that
  // makes more than a few times as many units as 8x8 pixels would.
  const double columns = static_cast<double>(p.groups) * static_cast<double>((w.size[0] / p.groups + 15) / 16),
               units = 8. * static_cast<double>((height + 7) / 8 * ((width + 7) / 8)) *
                       static_cast<double>(p.active.capacity);
  return units * columns < 1 << 30 && p.fringe.capacity < INT32_MAX ? nullptr : "too many tiles to count";
}

Conv2dParams byte_pairs(const QuantizedConv2dParams& p) {
  Conv2dParams pairs = p;
  for (TensorView* t : {&pairs.x, &pairs.weight}) {
    t->dtype = DType::kF16;
    t->size[1] = (t->size[1] + 1) / 2;
    for (const int d : {0, 2, 3}) t->stride[d] /= 2;
  }
  return pairs;
}

namespace {

// Of a sum of float8 that tensor cores keep to its end (conv_float8.cu).
constexpr int64_t kMostShortChannels = 18 * 32;

const char* hopper_1x1_bytes_declines(const QuantizedConv2dParams& p) {
  if (p.weight.size[2] != 1 || p.weight.size[3] != 1) return "kernel is not 1x1";
  if (p.x.dtype != p.weight.dtype) return "x is of floats";
  if (p.groups != 1) return "groups";
  if (p.x.size[1] % 16) return "input channels are no multiple of 16";
  if (p.x.dtype == DType::kF8 && p.x.size[1] > kMostShortChannels) return "sums of more than 576 products in runs";
  const Conv2dParams pairs = byte_pairs(p);
  if (!weights_packed(pairs.weight)) return "weights are not packed channels-last and 16-byte aligned";
  if (!tma_reads(pairs.x)) return "the input is not channels-last with 16-byte aligned pixels";
  if (p.y.stride[1] != 1 || (p.residual.data && p.residual.stride[1] != 1)) return "channels are not adjacent";
  if (p.stride[0] != p.stride[1] || p.stride[0] > 2) return "stride is neither 1 nor 2";
  if (p.padding[0] || p.padding[1]) return "padding is not 0";
  if (!conv1x1_cell(p.active.grid)) return "block sides are no multiples of 4";
  if (!sides_fit(p.x) || !sides_fit(p.y)) return "a plane too large to count";
  return tiles_fit(p.active, p.fringe, 4, (p.weight.size[0] + 63) / 64) ? nullptr : "too many tiles to count";
}

// What both kernels of tensor cores ask of a layer of int8: words of 16 channels.
const char* int8_planes_decline(const QuantizedConv2dParams& p) {
  if (p.weight.dtype != DType::kI8 || p.x.dtype != DType::kI8) return "dtype is not int8";
  if (p.groups != 1) return "groups";
  if (p.x.size[1] % 16 || !channels_vectorize(p.x) || !tma_reads(p.x)) return "channels are no 16-byte words";
  if (!weights_packed(p.weight)) return "weights are not packed channels-last and 16-byte aligned";
  return words_fit(p.x) && p.weight.size[0] * p.weight.stride[0] <= INT32_MAX ? nullptr : "a plane too large to count";
}

const char* int8_patch_declines(const QuantizedConv2dParams& p) {
  if (const char* why = int8_planes_decline(p)) return why;
  if (p.weight.size[0] % 8 || !eights_are_words(p.y) || (p.residual.data && !eights_are_words(p.residual)))
    return "output channels are no words of eight";
  return patch_window_declines(p);
}

const char* int8_rows_decline(const QuantizedConv2dParams& p) {
  if (const char* why = int8_planes_decline(p)) return why;
  if (const char* why = rows_window_declines(p)) return why;
  const PixelStrides y = pixel_strides(p.y);  // elements of y are counted in 31 bits
  const double last = static_cast<double>(p.y.size[0]) * static_cast<double>(y.n);
  if (y.n < 0 || y.y < 0 || y.x < 0 || last > INT32_MAX) return "a plane too large to count";
  return tiles_fit(p.active, p.fringe, 1, (p.weight.size[0] + 63) / 64) ? nullptr : "too many tiles to count";
}

const char* hopper_bytes_declines(const QuantizedConv2dParams& p) {
  if (p.x.dtype != p.weight.dtype) return "x is of floats";
  if (p.groups != 1) return "groups";
  if (p.x.size[1] % 2) return "an odd number of input channels";
  for (const TensorView* t : {&p.x, &p.weight}) {
    if (t->stride[1] != 1) return "channels are not adjacent";
    if (reinterpret_cast<uintptr_t>(t->data) % 2) return "pairs of channels are not aligned";
    for (const int d : {0, 2, 3})
      if (t->size[d] > 1 && t->stride[d] % 2) return "pairs of channels are not aligned";
  }
  // Measured (docs/log/conv.md): with a stride or few channels mma.sync takes a quarter to a half of the time.
  const bool slow = p.stride[0] > 1 || p.stride[1] > 1 || p.x.size[1] <= 32;
  if (slow && !int8_rows_decline(p)) return "int8 by rows or patches is faster";
  return hopper_general_declines(byte_pairs(p));
}

const char* never_bytes(const QuantizedConv2dParams&) { return nullptr; }

}  // namespace

const BytesKernelRow kBytesTable[kBytesKernels] = {
    {BytesKernel::kHopper1x1, "Hopper 1x1 bytes", 90, hopper_1x1_bytes_declines},
    {BytesKernel::kHopper, "Hopper bytes", 90, hopper_bytes_declines},
    {BytesKernel::kPatch3x3, "int8 3x3 by patches", 0, int8_patch_declines},
    {BytesKernel::kRows, "int8 by rows", 0, int8_rows_decline},
    {BytesKernel::kPortable, "portable bytes", 0, never_bytes},
};

const BytesKernelRow& select_bytes(const QuantizedConv2dParams& p, int32_t capability) {
  return select(kBytesTable, p, capability);
}

const char* hopper_bottleneck_declines(const BottleneckParams& p) {
  const int64_t C = p.x.size[1], width = p.weight[0].size[0];
  if (!is_half(p.x.dtype)) return "dtype is neither float16 nor bfloat16";
  if (C % 8 || C > kMaxBottleneckChannels) return "channels are no multiple of 8 up to 512";
  if (width % 8 || width > kMaxBottleneckWidth) return "hidden channels are no multiple of 8 up to 128";
  if (!p.active.block_map) return "no block map";
  for (const TensorView& w : p.weight)
    if (!weights_packed(w)) return "weights are not packed channels-last and 16-byte aligned";
  if (!tma_reads(p.x) || !tma_reads(p.y)) return "a tensor is not channels-last with 16-byte aligned pixels";
  if (p.active.grid.size[0] % 8 || p.active.grid.size[1] % 8) return "block sides are no multiples of 8";
  return tiles_fit(p.active, p.fringe, 8, 1) ? nullptr : "too many tiles to count";
}

int conv1x1_cell(const BlockGrid& grid) {
  const int sides = grid.size[0] | grid.size[1];
  return sides % 8 == 0 ? 8 : sides % 4 == 0 ? 4 : 0;
}

}  // namespace sbnet

extern "C" {

sbnet::Status sbnet_select_conv2d_cuda(const SbnetConvQuery* q, char* text, int64_t room) {
  using namespace sbnet;
  Conv2dParams p = {};
  SBNET_TRY(read_query(*q, &p));
  const int32_t capability = static_cast<int32_t>(q->capability);
  if (is_compute_dtype(p.x.dtype)) {
    describe(kConvTable, p, capability, text, room);
  } else {
    QuantizedConv2dParams bytes = {};
    static_cast<Conv2dParams&>(bytes) = p;
    describe(kBytesTable, bytes, capability, text, room);
  }
  return ok_status();
}

int32_t sbnet_select_bottleneck2d(int64_t channels, int64_t hidden, int64_t block_h, int64_t block_w) {
  using namespace sbnet;
  for (const int64_t v : {channels, hidden, block_h, block_w})
    if (v < 1 || v > 1 << 20) return 0;
  static const int32_t map = -1;
  BottleneckParams p = {};
  p.x = p.y = channels_last(DType::kF16, 1, channels, block_h, block_w);
  p.weight[0] = channels_last(DType::kF16, hidden, channels, 1, 1);
  p.weight[1] = channels_last(DType::kF16, hidden, hidden, 3, 3);
  p.weight[2] = channels_last(DType::kF16, channels, hidden, 1, 1);
  p.active.block_map = &map;
  p.active.capacity = 1;
  for (int d = 0; d < 2; ++d) p.active.grid.size[d] = static_cast<int32_t>(d ? block_w : block_h);
  return !hopper_bottleneck_declines(p);
}
}

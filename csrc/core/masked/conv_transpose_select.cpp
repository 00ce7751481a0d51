// Which CUDA kernels serve a transposed convolution.
#include <algorithm>
#include <cstdio>
#include <string>

#include "core/masked/conv_layers.h"
#include "core/masked/conv_select.h"
#include "core/memory.h"

namespace sbnet {

const char* hopper_transpose_declines(const ConvTransposeParams& p) {
  constexpr int kCell = 8, kWidth = 64, kMostTaps = 128, kMostPatch = 180;
  const TensorView& w = p.weight;
  const int64_t K = p.y.size[1], columns = (K + kWidth - 1) / kWidth;
  if (p.x.dtype != DType::kF16 && p.x.dtype != DType::kBF16) return "dtype is neither float16 nor bfloat16";
  if (p.groups != 1) return "groups";
  if (p.stride[0] * p.stride[1] == 1) return "stride 1";
  if (K % 8) return "output channels are no multiple of 8";
  if (K * 2 < columns * kWidth) return "few output channels, which it fills up to 64";
  if (w.size[2] * w.size[3] > kMostTaps) return "more than 128 taps";
  if (w.stride[1] != 1 || reinterpret_cast<uintptr_t>(w.data) % 16)
    return "the weights' output channels are not adjacent and aligned";
  for (const int d : {0, 2, 3})
    if (w.size[d] > 1 && (w.stride[d] <= 0 || w.stride[d] % 8 || w.stride[d] >= int64_t{1} << 38))
      return "the weights' output channels are not adjacent and aligned";
  if (!tma_reads(p.x) || !tma_reads(p.y) || (p.residual.data && !tma_reads(p.residual)))
    return "a tensor is not channels-last with 16-byte aligned pixels";
  int64_t patch = 1;
  double units = static_cast<double>(p.active.capacity);
  for (int d = 0; d < 2; ++d) {
    if (p.stride[d] > kMaxTransposeStride) return "stride is larger than 8";
    if (p.active.grid.size[d] % (kCell * p.stride[d])) return "block sides are no multiples of 8 times the stride";
    if (p.y.size[2 + d] > UINT16_MAX) return "a plane too large to count";
    int64_t first = INT32_MAX, last = INT32_MIN;
    for (int32_t i = 0; i < p.stride[d]; ++i) {
      const TransposePhase phase = transpose_phase(p, d, i);
      if (!phase.taps) return "a phase without taps";
      first = std::min<int64_t>(first, phase.first);
      last = std::max<int64_t>(last, phase.first + int64_t{phase.taps - 1} * phase.dilation);
    }
    patch *= std::min<int64_t>(kCell + last - first, kMostPatch + 1);
    units *= p.active.grid.size[d] / (kCell * p.stride[d]);
  }
  if (patch > kMostPatch) return "taps too far apart";
  const double jobs = (units / 4 + 1) * static_cast<double>(columns * p.stride[0] * p.stride[1]);
  return units < 1 << 30 && jobs < 1 << 30 && p.active.capacity < INT32_MAX && p.fringe.capacity < INT32_MAX
             ? nullptr
             : "too many tiles to count";
}

namespace {

constexpr const char* kOp = "select_conv_transpose2d";

Status read_query(const SbnetConvQuery& q, const int64_t* output_padding, ConvTransposeParams* to) {
  constexpr int kLog2Longest = 14;  // so that no product below overflows
  constexpr int64_t kLongest = int64_t{1} << kLog2Longest;
  const DType dtype = static_cast<DType>(q.dtype);
  SBNET_TRY(check_query(kOp, q, kLog2Longest, is_compute_dtype(dtype), "float32, float16 or bfloat16"));
  ConvTransposeParams p = {};
  p.weight = channels_last(dtype, q.channels, q.out_channels / q.groups, q.kernel[0], q.kernel[1]);
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(q.padding[d] < kLongest && output_padding[d] < kLongest,
                "%s: padding, output_padding: expected less than 2^14, got %lld, %lld", kOp,
                static_cast<long long>(q.padding[d]), static_cast<long long>(output_padding[d]));
    p.stride[d] = static_cast<int32_t>(q.stride[d]), p.padding[d] = static_cast<int32_t>(q.padding[d]);
    p.dilation[d] = static_cast<int32_t>(q.dilation[d]);
    p.output_padding[d] = static_cast<int32_t>(output_padding[d]);
  }
  p.groups = static_cast<int32_t>(q.groups);
  SBNET_TRY(ConvTransposeLayer::check(p));
  int64_t out[2];
  const int64_t in[2] = {q.height, q.width};
  for (int d = 0; d < 2; ++d) SBNET_TRY(ConvTransposeLayer::size(p, 2 + d, in[d], &out[d]));
  fill_query(q, out, &p);
  *to = p;
  return ok_status();
}

// The kernels of all phases, each named once.
std::string kernels_of_phases(const ConvTransposeParams& p, int32_t capability) {
  std::string names;
  for (int i = 0; i < p.stride[0]; ++i)
    for (int j = 0; j < p.stride[1]; ++j) {
      const TransposePhase row = transpose_phase(p, 0, i), column = transpose_phase(p, 1, j);
      if (!row.side || !column.side) continue;
      const std::string name = select_conv(phase_conv(p, row, column, i, j, p.weight.data), capability).name;
      if (names.find(name) == std::string::npos) names += (names.empty() ? "" : ", ") + name;
    }
  return names;
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_select_conv_transpose2d_cuda(const SbnetConvQuery* query, const int64_t* output_padding, char* text,
                                                 int64_t room) {
  using namespace sbnet;
  ConvTransposeParams p = {};
  SBNET_TRY(read_query(*query, output_padding, &p));
  const int32_t capability = static_cast<int32_t>(query->capability);
  const char* why = capability == 90 ? hopper_transpose_declines(p) : "not this device";
  std::string said = "Hopper transposed";
  if (why) {
    const std::string declined = std::string("\nHopper transposed: ") + why;
    said = runs_by_phases(p)
               ? "by phases: " + kernels_of_phases(p, capability) + declined
               : "by pixel" + declined + "\nby phases: the stride does not divide the blocks, or a phase has no taps";
  }
  snprintf(text, static_cast<size_t>(room), "%s", said.c_str());
  return ok_status();
}

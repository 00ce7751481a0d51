// What test_conv_transpose_emulated.py calls.
#include "conv_case.h"
#include "core/masked/conv_layers.h"
#include "core/masked/conv_select.h"
#include "cuda/common.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/sm90/conv/conv.h"

namespace {

// As csrc/cuda/masked/conv_transpose.cu, whose other kernel writes the phases' weights and the fringe.
template <class Word>
int run_phases(const Case& v, const sbnet::ConvTransposeParams& p, char* message, int64_t room) {
  using namespace sbnet;
  if (!runs_by_phases(p) || p.stride[0] * p.stride[1] > portable::kMostPhases) return 1;
  const int64_t pixel = p.y.size[1];
  for (int i = 0; i < std::min<int64_t>(*p.fringe.count, p.fringe.capacity); ++i)
    std::fill_n(static_cast<Word*>(p.y.data) + p.fringe.pixels[i] * pixel, pixel, Word(0));
  std::vector<Word> weights(transpose_weights(p));
  Word* to = weights.data();
  std::vector<Conv2dParams> convs;
  for (int i = 0; i < p.stride[0]; ++i)
    for (int j = 0; j < p.stride[1]; ++j) {
      const TransposePhase row = transpose_phase(p, 0, i), column = transpose_phase(p, 1, j);
      if (!row.side || !column.side) continue;
      convs.push_back(phase_conv(p, row, column, i, j, to));
      if (select_conv(convs.back(), 0).kernel != ConvKernel::kRows) return 1;
      for (int64_t k = 0; k < p.y.size[1]; ++k)
        for (int r = 0; r < row.taps; ++r)
          for (int s = 0; s < column.taps; ++s)
            for (int64_t c = 0; c < p.x.size[1]; ++c)
              *to++ =
                  static_cast<const Word*>(p.weight.data)[c * p.weight.stride[0] + k * p.weight.stride[1] +
                                                          (row.last_tap - r * row.tap_step) * p.weight.stride[2] +
                                                          (column.last_tap - s * column.tap_step) * p.weight.stride[3]];
    }
  const Status status = portable::launch_rows_phases(convs.data(), static_cast<int>(convs.size()), v.device(), nullptr);
  return told(status, message, room);
}

}  // namespace

extern "C" {

// kernel: 0 Hopper's, 1 by rows. weight [c, r, s, k]; y's plane says what the output padding is.
__attribute__((visibility("default"))) int emulate_conv_transpose(const Case* given, char* message, int64_t room) {
  using namespace sbnet;
  const Case& v = *given;
  ConvTransposeParams p = {};
  p.x = v.view(v.x, v.n, v.c, v.h, v.w), p.weight = v.view(v.weight[0], v.c, v.k, v.r, v.s);
  p.bias = v.bias[0], p.bias_dtype = v.dtype(), p.y = v.view(v.y, v.n, v.k, v.ho, v.wo);
  if (v.residual) p.residual = v.view(v.residual, v.n, v.k, v.ho, v.wo);
  p.active = v.active(), p.fringe = {v.fringe, v.fringe_count, v.fringe_capacity};
  p.slope = v.slope, p.slope_dtype = v.dtype(), p.allow_tf32 = true;
  p.groups = 1, p.activation = static_cast<Activation>(v.activation), p.activation_param = 0.01f;
  for (int d = 0; d < 2; ++d) {
    p.stride[d] = v.stride, p.padding[d] = v.padding, p.dilation[d] = v.dilation;
    int64_t least = 0;
    const Status status = ConvTransposeLayer::size(p, 2 + d, p.x.size[2 + d], &least);
    if (!status.ok()) return told(status, message, room);
    p.output_padding[d] = static_cast<int32_t>(p.y.size[2 + d] - least);
  }
  const Status status = validate(p);
  if (!status.ok()) return told(status, message, room);
  if (v.kernel == 1)
    return v.dtype() == DType::kF32 ? run_phases<uint32_t>(v, p, message, room)
                                    : run_phases<uint16_t>(v, p, message, room);
  if (hopper_transpose_declines(p)) return 1;
  return told(sm90::conv_transpose(p, v.device(), nullptr), message, room);
}
}

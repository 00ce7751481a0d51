// What test_emulator.py calls.
#include "conv_case.h"
#include "core/masked/conv_patches.h"
#include "core/masked/conv_select.h"
#include "cuda/common.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/sm90/conv/conv.h"

extern "C" {

__attribute__((visibility("default"))) int emulate_bottleneck(const Case* given, char* message, int64_t room) {
  using namespace sbnet;
  const Case& v = *given;
  BottleneckParams p = {};
  p.x = v.view(v.x, v.n, v.c, v.h, v.w), p.y = v.view(v.y, v.n, v.c, v.h, v.w);
  p.weight[0] = v.view(v.weight[0], v.k, v.c, 1, 1), p.weight[1] = v.view(v.weight[1], v.k, v.k, 3, 3);
  p.weight[2] = v.view(v.weight[2], v.c, v.k, 1, 1);
  for (int i = 0; i < 3; ++i) p.bias[i] = v.bias[i];
  p.bias_dtype = v.dtype(), p.active = v.active(), p.fringe = {v.fringe, v.fringe_count, v.fringe_capacity};
  p.activation = static_cast<Activation>(v.activation), p.activation_param = 0.01f;
  if (hopper_bottleneck_declines(p)) return 1;
  return told(sm90::bottleneck(p, v.device(), nullptr), message, room);
}

__attribute__((visibility("default"))) int emulate_conv(const Case* given, char* message, int64_t room) {
  using namespace sbnet;
  const Case& v = *given;
  Conv2dParams p = {};
  p.x = v.view(v.x, v.n, v.c, v.h, v.w), p.weight = v.view(v.weight[0], v.k, v.c / v.groups, v.r, v.s);
  p.bias = v.bias[0], p.bias_dtype = v.dtype(), p.y = v.view(v.y, v.n, v.k, v.ho, v.wo);
  if (v.residual) p.residual = v.view(v.residual, v.n, v.k, v.ho, v.wo);
  p.active = v.active(), p.fringe = {v.fringe, v.fringe_count, v.fringe_capacity};
  p.slope = v.slope, p.slope_dtype = v.dtype(), p.allow_tf32 = true, p.residual_after = v.residual_after;
  p.groups = v.groups, p.activation = static_cast<Activation>(v.activation), p.activation_param = 0.01f;
  for (int d = 0; d < 2; ++d) p.stride[d] = v.stride, p.padding[d] = v.padding, p.dilation[d] = v.dilation;

  const DeviceInfo device = v.device();
  const ConvKernel chosen = select_conv(p, 90).kernel;
  const bool pointwise = chosen == ConvKernel::kHopper1x1;
  if (v.kernel == 0 && pointwise) return told(sm90::conv1x1(p, device, nullptr), message, room);
  if (v.kernel == 1 && hopper_taps_fit(p)) return told(sm90::conv1x1_wide(p, device, nullptr), message, room);
  if (v.kernel == 1 && pointwise) return told(sm90::conv1x1_wide(as_patches(p), device, nullptr), message, room);
  if (v.kernel == 2 && hopper_taps_fit(p) && sm90::conv1x1_split_takes(p))
    return told(sm90::conv1x1_split(p, device, nullptr), message, room);
  if (v.kernel == 2 && pointwise && sm90::conv1x1_split_takes(as_patches(p)))
    return told(sm90::conv1x1_split(as_patches(p), device, nullptr), message, room);
  if (v.kernel == 3 && chosen == ConvKernel::kHopper3x3) return told(sm90::conv3x3(p, device, nullptr), message, room);
  if (v.kernel == 13 && p.x.size[1] >= 64 && (pointwise ? is_pixelwise(p) : chosen == ConvKernel::kHopper3x3))
    return told(sm90::conv_few(p, device, nullptr), message, room);
  if (v.kernel == 4 && chosen == ConvKernel::kHopperStem)
    return told(sm90::conv_stem(p, device, nullptr), message, room);
  if (v.kernel == 7 && chosen == ConvKernel::kFewChannels)
    return told(portable::launch_few_channels(p, device, nullptr), message, room);
  if (v.kernel == 6 && chosen == ConvKernel::kDepthwise)
    return told(portable::launch_depthwise(p, device, nullptr), message, room);
  if (v.kernel == 5 && !hopper_general_declines(p)) return told(sm90::conv_general(p, device, nullptr), message, room);
  const ConvKernel chosen_of_all = select_conv(p, 0).kernel;
  if (v.kernel == 8 && chosen_of_all == ConvKernel::kPatch3x3)
    return by_dtype(p.x.dtype, [&](auto t) {
      return told(portable::launch_patch<decltype(t)>(p, device, nullptr), message, room);
    });
  if (v.kernel == 10 && chosen_of_all == ConvKernel::kGroups3x3)
    return told(portable::launch_groups_3x3(p, device, nullptr), message, room);
  if (v.kernel == 11 && chosen_of_all == ConvKernel::kFirst)
    return told(portable::launch_first(p, device, nullptr), message, room);
  if (v.kernel == 12 && chosen_of_all == ConvKernel::kImplicitGemm)
    return told(portable::launch_implicit_gemm(p, device, nullptr), message, room);
  if (v.kernel == 9 && chosen_of_all == ConvKernel::kRows)
    return told(portable::launch_rows(p, device, nullptr), message, room);
  return 1;
}

__attribute__((visibility("default"))) int emulate_conv_bytes(const QuantizedCase* given, char* message, int64_t room) {
  using namespace sbnet;
  const QuantizedConv2dParams p = given->params();
  const Status status = validate(p);
  if (!status.ok()) return told(status, message, room);
  const BytesKernel chosen = select_bytes(p, 90).kernel;
  if (chosen != BytesKernel::kHopper && chosen != BytesKernel::kHopper1x1) return 1;
  const auto general = p.x.dtype == DType::kI8 ? sm90::conv_int8 : sm90::conv_float8;
  const auto conv = chosen == BytesKernel::kHopper ? general : sm90::conv1x1_bytes;
  return told(conv(p, given->conv.device(), nullptr), message, room);
}
}

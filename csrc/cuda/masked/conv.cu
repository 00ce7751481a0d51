// The CUDA entry of sparse_conv2d: which kernel serves which convolution.
#include <algorithm>

#include "core/masked/conv_select.h"
#include "cuda/capability.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/conv_run.cuh"
#include "cuda/masked/pixels.cuh"
#ifdef SBNET_SM90
#include "cuda/sm90/conv/conv.h"
#endif

namespace sbnet {

namespace {

// What the kernels count in 32 or 64 bits, beyond what every backend asks for.
Status check_limits(const Conv2dParams& p) {
  const double reduction = static_cast<double>(p.weight.size[1]) * p.weight.size[2] * p.weight.size[3];
  SBNET_CHECK(reduction < INT32_MAX / 2, "%s: weight: expected fewer than 2^30 elements per output channel, got %.0f",
              portable::kConvOp, reduction);
  const double entries = static_cast<double>(p.active.capacity) *
                         std::min<int64_t>(p.active.grid.size[0], p.y.size[2]) *
                         std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  SBNET_CHECK(entries < 1e15, "%s: active: expected room for fewer than 10^15 pixels, got %.0f", portable::kConvOp,
              entries);
  return ok_status();
}

}  // namespace

Status run_conv(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  SBNET_TRY(check_limits(p));
  switch (select_conv(p, select_capability(device)).kernel) {
#ifdef SBNET_SM90
    case ConvKernel::kHopper3x3:
      return sm90::conv_few_takes(p, device) ? sm90::conv_few(p, device, stream) : sm90::conv3x3(p, device, stream);
    case ConvKernel::kHopper1x1:
      return sm90::conv_few_takes(p, device) ? sm90::conv_few(p, device, stream) : sm90::conv1x1(p, device, stream);
    case ConvKernel::kHopperStem:
      return sm90::conv_stem(p, device, stream);
    case ConvKernel::kHopperGeneral:
      return sm90::conv_general(p, device, stream);
#endif
    case ConvKernel::kFewChannels:
      return portable::launch_few_channels(p, device, stream);
    case ConvKernel::kDepthwise:
      return portable::launch_depthwise(p, device, stream);
    case ConvKernel::kFirst:
      return portable::launch_first(p, device, stream);
    case ConvKernel::kGroups3x3:
      return portable::launch_groups_3x3(p, device, stream);
    case ConvKernel::kPatch3x3:
      return by_dtype(p.x.dtype, [&](auto t) { return portable::launch_patch<decltype(t)>(p, device, stream); });
    case ConvKernel::kRows:
      return portable::launch_rows(p, device, stream);
    case ConvKernel::kImplicitGemm:
      return portable::launch_implicit_gemm(p, device, stream);
    case ConvKernel::kSimtWords:
      return portable::launch_simt_words(p, device, stream);
    default:
      return portable::launch_simt(p, device, stream);
  }
}

}  // namespace sbnet

extern "C" {

int64_t sbnet_sparse_conv2d_workspace_bytes_cuda(const sbnet::Conv2dParams*) { return 0; }

sbnet::Status sbnet_sparse_conv2d_cuda(const sbnet::Conv2dParams* p, void*, void* stream_handle) {
  using namespace sbnet;
  return run_layer(portable::kConvOp, *p, stream_handle,
                   [&](const DeviceInfo& device, cudaStream_t stream) { return run_conv(*p, device, stream); });
}
}

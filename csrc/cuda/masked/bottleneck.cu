// The CUDA entry of sparse_bottleneck2d: one kernel where there is one, else its three convolutions, one after the
// other, with h1 and h2 in the workspace.
#include "core/masked/conv_select.h"
#include "cuda/capability.h"
#include "cuda/common.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/masked/pixels.cuh"
#ifdef SBNET_SM90
#include "cuda/sm90/conv/conv.h"
#endif

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_bottleneck2d";

bool in_one_kernel(const BottleneckParams& p, const DeviceInfo& device) {
  return select_capability(device) == 90 && !hopper_bottleneck_declines(p);
}

}  // namespace
}  // namespace sbnet

extern "C" {

int64_t sbnet_sparse_bottleneck2d_workspace_bytes_cuda(const sbnet::BottleneckParams* p) {
  using namespace sbnet;
  DeviceInfo device;
  if (!validate(*p).ok() || !current_device(kOp, &device).ok() || in_one_kernel(*p, device)) return 0;
  return 2 * bottleneck_plane_bytes(*p);
}

sbnet::Status sbnet_sparse_bottleneck2d_cuda(const sbnet::BottleneckParams* p, void* workspace, void* stream_handle) {
  using namespace sbnet;
  return run_layer(kOp, *p, stream_handle, [&](const DeviceInfo& device, cudaStream_t stream) {
#ifdef SBNET_SM90
    if (in_one_kernel(*p, device)) return sm90::bottleneck(*p, device, stream);
#endif
    Conv2dParams layers[3];
    bottleneck_layers(*p, workspace, layers);
    // The 3x3 convolution reads a halo around the active blocks, which is not written.
    SBNET_CUDA_TRY(kOp, cudaMemsetAsync(workspace, 0, static_cast<size_t>(bottleneck_plane_bytes(*p)), stream));
    for (int k = 0; k < 3; ++k) SBNET_TRY(status_of_layer(sbnet_sparse_conv2d_cuda(&layers[k], nullptr, stream), k));
    return ok_status();
  });
}
}

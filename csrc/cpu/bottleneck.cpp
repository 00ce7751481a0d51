// sparse_bottleneck2d on the CPU: its three convolutions, one after the other, with h1 and h2 in the workspace.
#include "core/bottleneck.h"

#include <algorithm>
#include <cstring>

namespace sbnet {
namespace {

constexpr int64_t kClearedAtOnce = 1 << 16;

// The 3x3 convolution reads a halo around the active blocks, which nobody wrote.
void clear(char* plane, int64_t bytes, const Parallel& parallel) {
  parallel_for(parallel, bytes, kClearedAtOnce,
               [&](int64_t begin, int64_t end) { std::memset(plane + begin, 0, static_cast<size_t>(end - begin)); });
}

}  // namespace
}  // namespace sbnet

extern "C" int64_t sbnet_sparse_bottleneck2d_workspace_bytes_cpu(const sbnet::BottleneckParams* p, int32_t threads) {
  if (!sbnet::validate(*p).ok()) return 0;
  sbnet::Conv2dParams layers[3];
  sbnet::bottleneck_layers(*p, nullptr, layers);
  int64_t scratch = 0;
  for (sbnet::Conv2dParams& layer : layers) {
    scratch = std::max(scratch, sbnet_sparse_conv2d_workspace_bytes_cpu(&layer, nullptr, threads));
  }
  return 2 * sbnet::bottleneck_plane_bytes(*p) + scratch;
}

extern "C" sbnet::Status sbnet_sparse_bottleneck2d_cpu(const sbnet::BottleneckParams* p, void* workspace,
                                                       const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  sbnet::Conv2dParams layers[3];
  sbnet::bottleneck_layers(*p, workspace, layers);
  const int64_t plane = sbnet::bottleneck_plane_bytes(*p);
  char* scratch = static_cast<char*>(workspace) + 2 * plane;
  sbnet::clear(static_cast<char*>(workspace), plane, *parallel);
  for (int k = 0; k < 3; ++k)
    SBNET_TRY(sbnet::status_of_layer(sbnet_sparse_conv2d_cpu(&layers[k], nullptr, scratch, parallel), k));
  return sbnet::ok_status();
}

// Shared by blocks_copy.cu and blocks_transpose.cu.
#pragma once
#include "core/masked/gather_scatter.h"
#include "cuda/common.cuh"

namespace sbnet {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // independent loads a thread has under way

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Kernel, class Args>
cudaError_t launch(const DeviceInfo& device, Kernel kernel, int64_t ctas, int per_sm, cudaStream_t stream,
                   const Args& args) {
  const int64_t most = static_cast<int64_t>(device.sm_count) * per_sm;
  return launch_dependent(device, kernel, dim3(static_cast<unsigned>(ctas < most ? ctas : most)), dim3(kThreads), 0,
                          stream, args);
}

// Copies between a channels_last and an NCHW-ordered side; elements of 2 or 4 bytes.
cudaError_t launch_block_transpose(const BlockCopyParams& p, const DeviceInfo& device, bool plane_is_pixels,
                                   cudaStream_t stream);

}  // namespace sbnet

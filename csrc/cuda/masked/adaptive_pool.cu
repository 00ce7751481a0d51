// sparse_adaptive_pool2d on CUDA: one launch folds the blocks of parts (block_fold.cuh), one merges the slices of each
// window.
#include "core/masked/adaptive_pool.h"
#include "cuda/masked/block_fold.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_adaptive_pool2d";
constexpr int kChannels = 32, kRows = 16;  // of a CTA that merges: neighbours read neighbouring channels

template <class T>
__global__ void __launch_bounds__(kChannels* kRows)
    merge_kernel(const __grid_constant__ AdaptivePoolParams p, const __grid_constant__ FoldParts parts, int chunks,
                 const float* values, const float* counts) {
  __shared__ float found[kRows][kChannels], pixels[kRows][kChannels];
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t C = p.x.size[1], tasks = parts.all_windows() * chunks;
  const bool max = p.kind == AdaptivePoolKind::kMax;
  const int lane = threadIdx.x % kChannels, row = threadIdx.x / kChannels;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t window = task / chunks, c = (task - window * chunks) * kChannels + lane;
    float value = max ? -INFINITY : 0.f, count = 0.f;
    const int slices = c < C ? parts.slices : 0;
#pragma unroll 4
    for (int s = row; s < slices; s += kRows) {
      const int64_t part = window * parts.slices + s;
      const float other = values[part * C + c];
      value = max ? max_nan(value, other) : value + other;
      count += counts[part];
    }
    found[row][lane] = value, pixels[row][lane] = count;
    __syncthreads();
    if (row == 0 && c < C) {
      for (int r = 1; r < kRows; ++r) {
        value = max ? max_nan(value, found[r][lane]) : value + found[r][lane];
        count += pixels[r][lane];
      }
      const BandWalk walk(parts, window * parts.slices);
      const int64_t i = window / parts.windows[1] % parts.windows[0], j = window % parts.windows[1];
      T* y = static_cast<T*>(p.y.data) + walk.image() * p.y.stride[0] + c * p.y.stride[1] + i * p.y.stride[2] +
             j * p.y.stride[3];
      *y = from_float<T>(pooled(p, value, count, walk.pixels()));
    }
    __syncthreads();  // before the next task overwrites what this one reads
  }
}

template <class T>
Status launch_type(const AdaptivePoolParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  const FoldParts parts = cuda_parts(p);
  if (p.kind == AdaptivePoolKind::kMax)
    SBNET_TRY((launch_fold<T, MaxFold>(kOp, parts, workspace, device, stream)));
  else
    SBNET_TRY((launch_fold<T, SumFold>(kOp, parts, workspace, device, stream)));
  const int chunks = static_cast<int>((p.x.size[1] + kChannels - 1) / kChannels);
  const int64_t tasks = parts.all_windows() * chunks, most = int64_t{device.sm_count} * 32;
  const float *values = static_cast<const float*>(workspace), *counts = fold_counts(parts, fold_kind(p), workspace);
  SBNET_CUDA_TRY(kOp, launch_dependent(device, merge_kernel<T>, dim3(static_cast<unsigned>(std::min(tasks, most))),
                                       dim3(kChannels * kRows), 0, stream, p, parts, chunks, values, counts));
  return ok_status();
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_adaptive_pool2d_cuda(const sbnet::AdaptivePoolParams* params, void* workspace,
                                                void* stream_handle) {
  using namespace sbnet;
  return run_fold(kOp, *params, stream_handle, [&](auto t, const DeviceInfo& device, cudaStream_t stream) {
    return launch_type<decltype(t)>(*params, workspace, device, stream);
  });
}

// sparse_adaptive_pool2d on CUDA: one launch folds the blocks of parts (block_fold.cuh), one merges the slices of each
// window; or, of whole planes, one does both (image_fold.cuh).
#include "core/masked/adaptive_pool.h"
#include "cuda/masked/image_fold.cuh"

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

// Whole planes: the CTAs of a cluster fold a share of an image's pixels each, then give a share of its channels.
template <class T, class Fold>
__global__ void __launch_bounds__(kImageThreads)
    image_kernel(const __grid_constant__ AdaptivePoolParams p, const __grid_constant__ ImagePlan plan, float* values,
                 float* counts) {
  extern __shared__ __align__(16) int smem[];  // blocks
  __shared__ Fold folds[kImageThreads];
  const int n = static_cast<int>(blockIdx.x) / kImageRanks, rank = static_cast<int>(blockIdx.x) % kImageRanks;
  const int C = static_cast<int>(p.x.size[1]);
  grid_dependency_wait();
  grid_dependency_release();
  float *const found = values + int64_t{n} * kImageRanks * C, *const pixels = counts + n * kImageRanks;
  const int active = list_image(p.block_map, p.grid, n, smem);
  fold_image<T, Fold>(p.x, p.grid, plan, n, active, rank, smem, folds, found, pixels);
  meet_cluster();
  T* const y = static_cast<T*>(p.y.data) + n * p.y.stride[0];
  for (int c = rank * kImageThreads + static_cast<int>(threadIdx.x); c < C; c += kImageRanks * kImageThreads) {
    float value = found[c], count = pixels[0];
#pragma unroll
    for (int r = 1; r < kImageRanks; ++r) {
      const float other = found[int64_t{r} * C + c];
      value = Fold::both(value, other);
      count += pixels[r];
    }
    y[c * p.y.stride[1]] = from_float<T>(pooled(p, value, count, p.x.size[2] * p.x.size[3]));
  }
}

template <class T, template <int> class Fold>
Status launch_image(const AdaptivePoolParams& p, const ImagePlan& plan, void* workspace, cudaStream_t stream) {
  float* const values = static_cast<float*>(workspace);
  const size_t shared = size_t{sizeof(int)} * p.grid.count[0] * p.grid.count[1];
  return launch_images(kOp, image_kernel<T, Fold<kLanes<T>>>, p.x.size[0], kImageRanks, shared, stream, p, plan, values,
                       values + p.x.size[0] * kImageRanks * p.x.size[1]);
}

template <class T>
Status launch_type(const AdaptivePoolParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  ImagePlan plan;
  if (p.y.size[2] * p.y.size[3] == 1 && plan_image<T>(p.x, p.grid, device, &plan))
    return p.kind == AdaptivePoolKind::kMax ? launch_image<T, MaxFold>(p, plan, workspace, stream)
                                            : launch_image<T, SumFold>(p, plan, workspace, stream);
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

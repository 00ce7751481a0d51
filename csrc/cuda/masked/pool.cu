// Max and average pooling on active blocks, for every window and layout: a thread computes one output for a word of
// channels, straight from memory. What networks use goes through shared memory instead (pool_tiles.cu).
#include "cuda/masked/pool.cuh"

namespace sbnet {
namespace {

// The first tap of an axis inside the plane, and how many there are.
__device__ __forceinline__ void clip_taps(const PoolParams& p, int d, int begin, int* first, int* taps) {
  const int step = p.dilation[d], side = static_cast<int>(p.x.size[2 + d]);
  const int skipped = begin < 0 ? (step - 1 - begin) / step : 0;
  *first = begin + skipped * step;
  const int inside = *first < side ? (side - *first + step - 1) / step : 0;
  *taps = min(p.kernel[d] - skipped, inside);
}

template <class T, int kN, class Pool>
__global__ void __launch_bounds__(kPixelThreads)
    pool_kernel(const __grid_constant__ PoolParams p, const __grid_constant__ PixelPlan plan) {
  using Channels = Word<T, kN>;
  for_pixels<T>(p, plan, [&](int n, int row, int column, int word) {
    const int first_row = row * p.stride[0] - p.padding[0], first_column = column * p.stride[1] - p.padding[1];
    const int64_t channel = int64_t{word} * kN;
    int top, left, down, taps;
    clip_taps(p, 0, first_row, &top, &down);
    clip_taps(p, 1, first_column, &left, &taps);
    const T* x = static_cast<const T*>(p.x.data) + n * p.x.stride[0] + channel * p.x.stride[1] + top * p.x.stride[2] +
                 left * p.x.stride[3];
    Pool output;
    for (int r = 0; r < down; ++r) {
      const T* at = x + int64_t{r} * p.dilation[0] * p.x.stride[2];
      Pool across;  // sums in the order of pool_tiles.cu: the same bits for every layout
#pragma unroll 4
      for (int s = 0; s < taps; ++s)
        across.add(*reinterpret_cast<const Channels*>(at + int64_t{s} * p.dilation[1] * p.x.stride[3]));
      output.merge(across);
    }
    T* y = static_cast<T*>(p.y.data) + n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3] +
           channel * p.y.stride[1];
    *reinterpret_cast<Channels*>(y) = output.finish(pool_divisor(p, first_row, first_column));
  });
}

template <class T, template <class, int> class Pool>
Status launch_pool(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kN = kLanes<T>;
  const char* op = pool_name(p.kind);
  return words_of_channels<T>(p) ? launch_pixels<pool_kernel<T, kN, Pool<T, kN>>>(op, p, kN, device, stream)
                                 : launch_pixels<pool_kernel<T, 1, Pool<T, 1>>>(op, p, 1, device, stream);
}

template <class T>
Status launch_type(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.kind == PoolKind::kMax ? launch_pool<T, Maximum>(p, device, stream)
                                  : launch_pool<T, Average>(p, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pool2d_cuda(const sbnet::PoolParams* params, void* stream_handle) {
  using namespace sbnet;
  const PoolParams& p = *params;
  return run_layer(pool_name(p.kind), p, stream_handle, [&](const DeviceInfo& device, cudaStream_t stream) {
    if (pool_tiles_takes(p)) return launch_pool_tiles(p, device, stream);
    return by_dtype(p.x.dtype, [&](auto t) { return launch_type<decltype(t)>(p, device, stream); });
  });
}

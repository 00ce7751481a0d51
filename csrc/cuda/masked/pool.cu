// Max and average pooling on active blocks, for every window and layout: a thread computes one output for a word of
// channels, straight from memory. What networks use goes through shared memory instead (pool_tiles.cu).
#include <algorithm>

#include "cuda/masked/pool.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256;

struct PoolPlan {
  int64_t block_items;  // outputs x words of a block
  FastDiv block, inner, width;
  bool channels_inner;  // neighbouring threads take the words of an output, else the outputs of a word
  bool wide;            // too many items for 32 bits
  FringePlan fringe;
};

// The first tap of an axis inside the plane, and how many there are.
__device__ __forceinline__ void clip_taps(const PoolParams& p, int d, int begin, int* first, int* taps) {
  const int step = p.dilation[d], side = static_cast<int>(p.x.size[2 + d]);
  const int skipped = begin < 0 ? (step - 1 - begin) / step : 0;
  *first = begin + skipped * step;
  const int inside = *first < side ? (side - *first + step - 1) / step : 0;
  *taps = min(p.kernel[d] - skipped, inside);
}

template <class T, int kN, class Pool>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const __grid_constant__ PoolParams p, const __grid_constant__ PoolPlan plan) {
  using Channels = Word<T, kN>;
  grid_dependency_wait();
  grid_dependency_release();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  clear_fringe<T>(p, plan.fringe, thread, threads);

  const BlockGrid& grid = p.active.grid;
  const int64_t items = clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * plan.block_items;
  for (int64_t item = thread; item < items; item += threads) {
    uint32_t slot, rest, pixel, word, row, column;
    if (plan.wide) {
      slot = static_cast<uint32_t>(item / plan.block_items);
      rest = static_cast<uint32_t>(item - slot * plan.block_items);
    } else {
      plan.block.divmod(static_cast<uint32_t>(item), &slot, &rest);
    }
    plan.inner.divmod(rest, &pixel, &word);
    if (!plan.channels_inner) {
      const uint32_t t = pixel;
      pixel = word, word = t;
    }
    plan.width.divmod(pixel, &row, &column);
    BlockIndex b;
    if (!load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b)) continue;
    row += b.i * grid.size[0], column += b.j * grid.size[1];
    if (row >= p.y.size[2] || column >= p.y.size[3]) continue;

    const int first_row = row * p.stride[0] - p.padding[0], first_column = column * p.stride[1] - p.padding[1];
    const int64_t channel = int64_t{word} * kN;
    int top, left, down, taps;
    clip_taps(p, 0, first_row, &top, &down);
    clip_taps(p, 1, first_column, &left, &taps);
    const T* x = static_cast<const T*>(p.x.data) + b.n * p.x.stride[0] + channel * p.x.stride[1] + top * p.x.stride[2] +
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
    T* y = static_cast<T*>(p.y.data) + b.n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3] +
           channel * p.y.stride[1];
    *reinterpret_cast<Channels*>(y) = output.finish(pool_divisor(p, first_row, first_column));
  }
}

template <class T, int kN, class Pool>
Status launch(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = pool_kernel<T, kN, Pool>;
  // A block larger than the plane is the only one of its direction: no more outputs than the plane has.
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
  const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  const int64_t words = p.y.size[1] / kN;
  const double block = static_cast<double>(height) * width * words;
  SBNET_CHECK(block <= INT32_MAX / 2, "%s: active: blocks of %.0f words of channels; at most 2^30 are wanted",
              pool_name(p.kind), block);

  PoolPlan plan;
  plan.block_items = static_cast<int64_t>(block);
  plan.channels_inner = p.y.stride[1] <= p.y.stride[3];
  plan.block = FastDiv(plan.block_items);
  plan.inner = FastDiv(plan.channels_inner ? words : plan.block_items / words);
  plan.width = FastDiv(width);
  const int64_t most = p.active.capacity * plan.block_items;
  plan.wide = most > INT32_MAX;
  plan.fringe = FringePlan(p);

  static std::atomic<int> ctas_per_sm[kMaxDevices];
  int ctas = device.index < kMaxDevices ? ctas_per_sm[device.index].load(std::memory_order_relaxed) : 0;
  if (!ctas) {
    SBNET_CUDA_TRY(pool_name(p.kind), cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kThreads, 0));
    if (device.index < kMaxDevices) ctas_per_sm[device.index].store(ctas, std::memory_order_relaxed);
  }
  const int64_t wanted = (std::max(most, plan.fringe.threads(p)) + kThreads - 1) / kThreads;
  const dim3 ctas_used(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{ctas} * device.sm_count)));
  SBNET_CUDA_TRY(pool_name(p.kind), launch_dependent(device, kernel, ctas_used, dim3(kThreads), 0, stream, p, plan));
  return ok_status();
}

template <class T, template <class, int> class Pool>
Status launch_pool(const PoolParams& p, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kN = kLanes<T>;
  const bool words = channels_vectorize(p.x) && channels_vectorize(p.y) && p.x.size[1] % kN == 0;
  return words ? launch<T, kN, Pool<T, kN>>(p, device, stream) : launch<T, 1, Pool<T, 1>>(p, device, stream);
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
  SBNET_TRY(validate(p));
  const bool fringe = p.fringe.pixels && p.fringe.capacity > 0;
  if (!p.y.size[0] || (!p.active.capacity && !fringe)) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(pool_name(p.kind), &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (pool_tiles_takes(p)) return launch_pool_tiles(p, device, stream);
  switch (p.x.dtype) {
    case DType::kF16:
      return launch_type<__half>(p, device, stream);
    case DType::kBF16:
      return launch_type<__nv_bfloat16>(p, device, stream);
    default:
      return launch_type<float>(p, device, stream);
  }
}

// sparse_conv2d_quantized of x in floats: x as bytes, where active blocks read it, for the kernels that take bytes.
#include <cuda_fp8.h>

#include "cuda/masked/conv_quantized.cuh"
#include "cuda/masked/pixels.cuh"

namespace sbnet::portable {
namespace {

constexpr int kRun = 8;        // channels that a thread rounds
constexpr int kCtasPerSm = 8;  // 2048 threads
constexpr int64_t kMostJobs = 1 << 30;

// A block reads a rectangle of pixels; a job is so many runs of channels in one as a CTA has threads.
struct RoundPlan {
  int64_t items = 0, jobs;  // of a block; of a full list, kMostJobs where they cannot be counted
  FastDiv jobs_of_block, words, width;
  bool vector = false;  // runs are words of memory

  explicit RoundPlan(const QuantizedConv2dParams& p) {
    int64_t side[2];
    for (int d = 0; d < 2; ++d)
      side[d] = (std::min<int64_t>(p.active.grid.size[d], p.y.size[2 + d]) - 1) * p.stride[d] +
                (p.weight.size[2 + d] - 1) * p.dilation[d] + 1;
    const int64_t runs = (p.x.size[1] + kRun - 1) / kRun;
    const double all = static_cast<double>(side[0]) * static_cast<double>(side[1]) * static_cast<double>(runs);
    jobs = kMostJobs;
    if (all >= kMostJobs || p.active.capacity >= kMostJobs) return;
    items = side[0] * side[1] * runs;
    const int64_t of_block = (items + kPixelThreads - 1) / kPixelThreads;
    jobs = p.active.capacity * of_block;
    jobs_of_block = FastDiv(of_block), words = FastDiv(runs), width = FastDiv(side[1]);
    vector = channels_vectorize(p.x) && p.x.size[1] % kRun == 0;
  }
};

template <class T, class X>
__global__ void __launch_bounds__(kPixelThreads)
    round_kernel(const __grid_constant__ QuantizedConv2dParams p, const __grid_constant__ TensorView bytes,
                 const __grid_constant__ RoundPlan plan) {
  grid_dependency_wait();
  grid_dependency_release();
  const BlockGrid& grid = p.active.grid;
  const int jobs =
      clamped_count(p.active.count, static_cast<int>(p.active.capacity)) * static_cast<int>(plan.jobs_of_block.divisor);
  const float per_unit = 1 / p.x_scale;
  for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
    uint32_t slot, item, pixel, word, row, column;
    plan.jobs_of_block.divmod(job, &slot, &item);
    item = item * kPixelThreads + threadIdx.x;
    BlockIndex b;
    if (item >= plan.items || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b)) continue;
    plan.words.divmod(item, &pixel, &word);
    plan.width.divmod(pixel, &row, &column);
    const int64_t y = int64_t{b.i} * grid.size[0] * p.stride[0] - p.padding[0] + row;
    const int64_t at = int64_t{b.j} * grid.size[1] * p.stride[1] - p.padding[1] + column;
    if (y < 0 || y >= p.x.size[2] || at < 0 || at >= p.x.size[3]) continue;
    const int channel = static_cast<int>(word) * kRun;
    const X* from = static_cast<const X*>(p.x.data) + b.n * p.x.stride[0] + channel * p.x.stride[1] +
                    y * p.x.stride[2] + at * p.x.stride[3];
    T* to = static_cast<T*>(bytes.data) + b.n * bytes.stride[0] + channel + y * bytes.stride[2] + at * bytes.stride[3];
    Pack<X, kRun> floats = {};
    if (plan.vector) {
#pragma unroll
      for (int i = 0; i < kRun; i += kLanes<X>)
        *reinterpret_cast<uint4*>(floats.v + i) = *reinterpret_cast<const uint4*>(from + i);
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e)
        if (channel + e < p.x.size[1]) floats.v[e] = from[e * p.x.stride[1]];
    }
    Pack<T, kRun> result;
    float units[kRun];
#pragma unroll
    for (int e = 0; e < kRun; ++e) units[e] = to_float(floats.v[e]) * per_unit;
    round_all(units, result.v);
    *reinterpret_cast<Pack<T, kRun>*>(to) = result;
  }
}

template <class T, class X>
Status launch(const QuantizedConv2dParams& p, const TensorView& bytes, const DeviceInfo& device, cudaStream_t stream) {
  const RoundPlan plan(p);
  const dim3 ctas(static_cast<unsigned>(std::min<int64_t>(plan.jobs, int64_t{kCtasPerSm} * device.sm_count)));
  if (plan.jobs == 0) return ok_status();
  SBNET_CUDA_TRY(kQuantizedConvOp,
                 launch_dependent(device, round_kernel<T, X>, ctas, dim3(kPixelThreads), 0, stream, p, bytes, plan));
  return ok_status();
}

}  // namespace

bool can_round(const QuantizedConv2dParams& p) { return RoundPlan(p).jobs < kMostJobs; }

Status launch_round(const QuantizedConv2dParams& p, const TensorView& bytes, const DeviceInfo& device,
                    cudaStream_t stream) {
  return by_dtype(p.x.dtype, [&](auto t) {
    return bytes.dtype == DType::kI8 ? launch<int8_t, decltype(t)>(p, bytes, device, stream)
                                     : launch<__nv_fp8_e4m3, decltype(t)>(p, bytes, device, stream);
  });
}

}  // namespace sbnet::portable

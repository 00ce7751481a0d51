// sparse_conv2d_quantized of int8 on the tensor cores of every device since sm_80: the implicit GEMM of
// conv_implicit_gemm.cu, whose stages hold 128 channels of bytes a row. Sums are int32, hence exact. A word of 16
// channels comes from one tap, so any kernel, stride and dilation will do.
#include "cuda/masked/conv_implicit_gemm_tile.cuh"
#include "cuda/masked/conv_quantized.cuh"

namespace sbnet::portable {
namespace {

constexpr int kRows = 8;      // pixels that a thread finishes together, so that their loads are under way together
constexpr int kChannels = 4;  // of each: a warp writes whole lines, and reads the sums without bank conflicts

// v[pixel] += scale * residual[pixel, k ... k + kChannels), as far as k_end.
template <class T>
__device__ __forceinline__ void add_residual(const QuantizedConv2dParams& p, bool words, const Output (&to)[kRows],
                                             int k, int k_end, float (&v)[kRows][kChannels]) {
  const T* residual = static_cast<const T*>(p.residual.data) + k * p.residual.stride[1];
  Pack<T, kChannels> added[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    added[i] = {};
    if (to[i].y < 0) continue;
    const T* from = residual + to[i].residual;
    if (words) {
      added[i] = *reinterpret_cast<const Pack<T, kChannels>*>(from);
    } else {
#pragma unroll
      for (int e = 0; e < kChannels; ++e)
        if (k + e < k_end) added[i].v[e] = from[e * p.residual.stride[1]];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int e = 0; e < kChannels; ++e) v[i][e] = fmaf(p.residual_scale, to_float(added[i].v[e]), v[i][e]);
}

template <class T>
__device__ __forceinline__ void store(const QuantizedConv2dParams& p, bool words, const Output (&to)[kRows], int k,
                                      int k_end, const float (&v)[kRows][kChannels]) {
  const float per_unit = sizeof(T) == 1 ? 1 / p.out_scale : 1.f;
  T* y = static_cast<T*>(p.y.data) + k * p.y.stride[1];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Pack<T, kChannels> result;
#pragma unroll
    for (int e = 0; e < kChannels; ++e) result.v[e] = rounded<T>(sizeof(T) == 1 ? v[i][e] * per_unit : v[i][e]);
    if (to[i].y < 0) continue;
    if (words) {
      *reinterpret_cast<Pack<T, kChannels>*>(y + to[i].y) = result;
    } else {
#pragma unroll
      for (int e = 0; e < kChannels; ++e)
        if (k + e < k_end) y[to[i].y + e * p.y.stride[1]] = result.v[e];
    }
  }
}

// The staged sums of a tile become outputs of channels k on.
template <int kTileN>
__device__ __forceinline__ void finish_tile(const QuantizedConv2dParams& p, const GemmPlan& plan, const int32_t* staged,
                                            const Output* outputs, int k) {
  constexpr int kWords = kTileN / kChannels, kRowStep = kThreads / kWords;
  const int channel = threadIdx.x % kWords * kChannels, k_end = static_cast<int>(p.y.size[1]);
  k += channel;
  if (k >= k_end) return;
  const bool whole = k + kChannels <= k_end;
  float scale[kChannels], bias[kChannels];
#pragma unroll
  for (int e = 0; e < kChannels; ++e) {
    scale[e] = k + e < k_end ? p.scale[k + e] : 0.f;
    bias[e] = p.bias && k + e < k_end ? static_cast<const float*>(p.bias)[k + e] : 0.f;
  }
#pragma unroll 1
  for (int row = threadIdx.x / kWords; row < kTileM; row += kRows * kRowStep) {
    Output to[kRows];
    float v[kRows][kChannels];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to[i] = outputs[row + i * kRowStep];
      const auto sums = *reinterpret_cast<const Pack<int32_t, kChannels>*>(
          staged + (row + i * kRowStep) * Shared<kTileN>::kPitch + channel);
#pragma unroll
      for (int e = 0; e < kChannels; ++e) v[i][e] = fmaf(static_cast<float>(sums.v[e]), scale[e], bias[e]);
    }
    const bool after = adds_after(p);
    if (after) activate_channels<float>(p, v, k, k_end);
    if (p.residual.data) {
      const bool words = plan.vector_residual && whole;
      by_element<int8_t>(p.residual.dtype, [&](auto t) { add_residual<decltype(t)>(p, words, to, k, k_end, v); });
    }
    if (!after) activate_channels<float>(p, v, k, k_end);
    const bool y_words = plan.vector_y && whole;
    by_element<int8_t>(p.y.dtype, [&](auto t) { store<decltype(t)>(p, y_words, to, k, k_end, v); });
  }
}

template <int kTileN>
__global__ void __launch_bounds__(kThreads, kTileN == 128 ? 2 : 3)
    conv_int8_mma_kernel(const __grid_constant__ QuantizedConv2dParams p, const __grid_constant__ GemmPlan plan) {
  using Smem = Shared<kTileN>;
  extern __shared__ __align__(128) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  grid_dependency_wait();
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  by_element<int8_t>(p.y.dtype, [&](auto t) { clear_fringe<decltype(t)>(p, plan.fringe, thread, threads); });

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = static_cast<int>(plan.list.tiles(count, kTileM)) * static_cast<int>(plan.column_tiles.divisor);
  const int steps = (plan.reduction.units + 7) / 8;
  Loader<int8_t, kTileN, Fetch::kWords> loader(p, plan, Smem::sources(smem), nullptr);
  WarpTile<int8_t, kTileN> work(warp, lane);
  // As in conv_implicit_gemm.cu: all tiles have the same weights, and room for them.
  const bool keep_weights = Smem::kKeepsWeights && steps <= kStages && plan.column_tiles.divisor == 1;
  bool fresh = true;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint32_t tile_m, tile_n;
    plan.column_tiles.divmod(tile, &tile_m, &tile_n);
    const int k = static_cast<int>(tile_n) * kTileN;
    const Pixel pixel = locate_pixel(p, plan.list, int64_t{tile_m} * kTileM + threadIdx.x, count);
    const Source source = source_of<int8_t>(p, pixel);
    Smem::sources(smem)[threadIdx.x] = source;
    __syncthreads();

    loader.begin_tile(0, k, min(plan.group_outputs - k, kTileN), source);
    sum_tile(loader, work, smem, steps, fresh);
    fresh = !keep_weights;
    if (tile + gridDim.x >= tiles) grid_dependency_release();

    __syncthreads();  // the stages are free: the sums take their place
    int32_t* const staged = reinterpret_cast<int32_t*>(smem);
    work.stage_sums(staged, Smem::kPitch, warp, lane);
    Smem::outputs(smem)[threadIdx.x] = output_of(p, pixel);
    __syncthreads();
    finish_tile<kTileN>(p, plan, staged, Smem::outputs(smem), k);
    __syncthreads();
  }
}

template <int kTileN>
Status launch(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const GemmPlan plan(p, kLanes<int8_t>, kTileN);
  return launch_tiles<conv_int8_mma_kernel<kTileN>, kTileN>(kQuantizedConvOp, p, plan, 0, device, stream);
}

}  // namespace

Status launch_int8_mma(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return wide_tile(p, device) ? launch<128>(p, device, stream) : launch<64>(p, device, stream);
}

}  // namespace sbnet::portable

// float32 convolution in float32: a GEMM on the ordinary cores, right for any strides and channel counts.
//
// Three tf32 products per multiplication would be faster, but the tensor core cuts its sums off instead of rounding
// them, and over the long reductions of 3x3 layers that error passes twice that of PyTorch's float32.
//
// This kernel fetches element by element: NCHW, odd channels; conv_simt_words.cu has the fast case.
//
// A CTA owns 128 entries of the pixel list and 64 output channels of one group, a thread 8 x 8 of them. Operands lie in
// shared memory reduction-major, so cp.async transposes them element by element.
#include "cuda/masked/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128;  // 16 x 8 threads; also one per pixel of the tile
constexpr int kTileM = 128, kTileN = 64;
constexpr int kDepth = 16;  // reduction elements per stage
constexpr int kStages = 3;
// Sums are gathered in runs of this many stages (128 elements) and then added up: over a long reduction, one running
// sum loses several times as much as PyTorch does.
constexpr int kRun = 8;
// Rows of 4 words more than a multiple of 32: two-way bank conflicts at most for cp.async, none for the 16-byte reads.
constexpr int kPitchM = kTileM + 4, kPitchN = kTileN + 4;

struct Stage {
  float x[kDepth][kPitchM];
  float weight[kDepth][kPitchN];
};

// kChannelsLast: neighbouring threads fetch neighbouring reduction elements of one pixel; otherwise neighbouring pixels
// of one reduction element, which is how NCHW memory runs.
template <bool kChannelsLast>
__device__ __forceinline__ void fetch(const Conv2dParams& p, const Reduction& reduction, const Source* sources,
                                      const float* x, const float* weight, int channels, int step, Stage* stage) {
  const int first = step * kDepth;
  if constexpr (kChannelsLast) {
    const int d = threadIdx.x % kDepth, row0 = threadIdx.x / kDepth;
    const Tap tap = tap_of(p, reduction, first + d);
#pragma unroll
    for (int row = row0; row < kTileM; row += kThreads / kDepth) {
      const Source source = load_source(sources + row);
      cp_async_4(shared_address(&stage->x[d][row]), reinterpret_cast<const char*>(x + tap.x_offset) + source.offset,
                 reads_plane(p, source, tap));
    }
  } else {
    const Source source = sources[threadIdx.x];
#pragma unroll 2
    for (int d = 0; d < kDepth; ++d) {
      const Tap tap = tap_of(p, reduction, first + d);
      cp_async_4(shared_address(&stage->x[d][threadIdx.x]),
                 reinterpret_cast<const char*>(x + tap.x_offset) + source.offset, reads_plane(p, source, tap));
    }
  }
  const int d = threadIdx.x % kDepth, row0 = threadIdx.x / kDepth;
  const Tap tap = tap_of(p, reduction, first + d);
#pragma unroll
  for (int n = row0; n < kTileN; n += kThreads / kDepth)
    cp_async_4(shared_address(&stage->weight[d][n]), weight + n * p.weight.stride[0] + tap.weight_offset,
               tap.in && n < channels);
}

template <bool kChannelsLast>
__global__ void __launch_bounds__(kThreads, 3)
    conv_simt_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ GemmPlan plan) {
  __shared__ __align__(16) Stage stages[kStages];
  __shared__ Source sources[kTileM];
  __shared__ Output outputs[kTileM];

  grid_dependency_wait();
  clear_fringe<float>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = static_cast<int>(plan.list.tiles(count, kTileM)) * static_cast<int>(plan.column_tiles.divisor);
  const int steps = (plan.reduction.units + kDepth - 1) / kDepth;
  const int m0 = threadIdx.x / 8 * 4, n0 = threadIdx.x % 8 * 4;  // rows m0..+4 and 64 + m0..+4, channels likewise by 32

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const GemmTile at(plan, tile, kTileN);
    const Pixel pixel = locate_pixel(p, plan.list, int64_t{at.row} * kTileM + threadIdx.x, count);
    __syncthreads();  // the tile before is done with the tables and the stages
    sources[threadIdx.x] = source_of<float>(p, pixel);
    outputs[threadIdx.x] = output_of(p, pixel);
    __syncthreads();

    const float* x = static_cast<const float*>(p.x.data) + int64_t{at.group} * plan.group_inputs * p.x.stride[1];
    const float* weight = static_cast<const float*>(p.weight.data) + at.k * p.weight.stride[0];
    const int channels = static_cast<int>(min(at.k_end - at.k, int64_t{kTileN}));
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps) fetch<kChannelsLast>(p, plan.reduction, sources, x, weight, channels, s, &stages[s]);
      cp_async_commit();
    }
    float sums[8][8] = {}, run[8][8] = {};
    int read = 0, write = kStages - 1;
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < steps)
        fetch<kChannelsLast>(p, plan.reduction, sources, x, weight, channels, step + kStages - 1, &stages[write]);
      cp_async_commit();
      const Stage& stage = stages[read];
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        float a[8], b[8];
        *reinterpret_cast<float4*>(a) = *reinterpret_cast<const float4*>(&stage.x[d][m0]);
        *reinterpret_cast<float4*>(a + 4) = *reinterpret_cast<const float4*>(&stage.x[d][m0 + 64]);
        *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(&stage.weight[d][n0]);
        *reinterpret_cast<float4*>(b + 4) = *reinterpret_cast<const float4*>(&stage.weight[d][n0 + 32]);
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) run[i][j] = fmaf(a[i], b[j], run[i][j]);
      }
      if (step % kRun == kRun - 1 || step == steps - 1) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sums[i][j] += run[i][j];
            run[i][j] = 0.f;
          }
      }
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    if (tile + gridDim.x >= tiles) grid_dependency_release();

#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const int64_t channel = at.k + n0 + j * 8;
      if (channel >= at.k_end) continue;
      float bias[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) bias[e] = channel + e < at.k_end ? bias_at<float>(p, channel + e) : 0.f;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        float v[4][4];
        Output to[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          to[r] = outputs[m0 + r + i * 16];
#pragma unroll
          for (int e = 0; e < 4; ++e) v[r][e] = sums[i + r][j + e] + bias[e];
        }
        finish_outputs<float>(p, plan.vector_y, plan.vector_residual, v, to, channel, at.k_end);
      }
    }
  }
}

template <bool kChannelsLast>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  constexpr auto kernel = conv_simt_kernel<kChannelsLast>;
  const GemmPlan plan(p, 1, kTileN);
  const int64_t tiles = plan.most_tiles(p, kTileM);
  SBNET_CHECK(tiles <= INT32_MAX / 2, "%s: active: expected at most 2^30 tiles, got %lld", kConvOp,
              static_cast<long long>(tiles));
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kThreads, 0, &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, tiles, plan.fringe.threads(p), kThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kThreads), 0, stream, p, plan));
  return ok_status();
}

}  // namespace

Status launch_simt(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.x.stride[1] <= p.x.stride[3] ? launch<true>(p, device, stream) : launch<false>(p, device, stream);
}

}  // namespace sbnet::portable

// float32 convolution in float32 where x and weight come in 16-byte words of channels (conv_simt.cu takes the rest).
//
// A CTA owns 64 entries of the pixel list and 32 output channels of one group: small tiles, so that a short list
// reaches all multiprocessors. Each of its four warps multiplies the whole tile, a thread 8 x 8 of it, but takes every
// fourth stage of the reduction alone: no warp waits for another until their sums are added, in the order of the warps.
// Four sums of a quarter of the products each also lose half as much as PyTorch's one. Operands lie in shared memory a
// pixel (or output channel) a row, as they come.
#include "cuda/masked/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128, kWarps = 4;
constexpr int kTileM = 64, kTileN = 32;
constexpr int kDepth = 16;  // reduction elements per stage
constexpr int kStages = 3;
constexpr int kPitch = kDepth + 4;  // 16-byte reads of 8 neighbouring rows meet no bank twice

struct Stage {
  float x[kTileM][kPitch];
  float weight[kTileN][kPitch];
};
using Sums = float[kTileM][kTileN + 4];
struct Shared {
  union {
    Stage stages[kStages];
    Sums sums;
  } warps[kWarps];
  Source sources[kTileM];
  Output outputs[kTileM];
};

// The row of output channel n: a thread owns n0 ... n0+3 and 16 channels on, neighbouring threads read neighbouring
// rows.
__device__ __forceinline__ int weight_row(int n) { return n % 4 * 8 + n / 4; }

__device__ __forceinline__ void fetch(const Conv2dParams& p, const Reduction& reduction, const Source* sources,
                                      const float* x, const float* weight, int channels, int step, Stage* stage) {
  constexpr int kWords = kDepth / 4;
  const int lane = threadIdx.x % 32, d = lane % kWords, row0 = lane / kWords;
  const Tap tap = tap_of(p, reduction, step * kWords + d);
#pragma unroll
  for (int row = row0; row < kTileM; row += 32 / kWords) {
    const Source source = load_source(sources + row);
    cp_async_16(shared_address(&stage->x[row][d * 4]), reinterpret_cast<const char*>(x + tap.x_offset) + source.offset,
                reads_plane(p, source, tap));
  }
#pragma unroll
  for (int n = row0; n < kTileN; n += 32 / kWords)
    cp_async_16(shared_address(&stage->weight[weight_row(n)][d * 4]),
                weight + n * p.weight.stride[0] + tap.weight_offset, tap.in & (n < channels));
}

__global__ void __launch_bounds__(kThreads, 2)
    conv_simt_words_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ GemmPlan plan) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  grid_dependency_wait();
  clear_fringe<float>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = static_cast<int>(plan.list.tiles(count, kTileM)) * static_cast<int>(plan.column_tiles.divisor);
  const int steps = (plan.reduction.units * 4 + kDepth - 1) / kDepth;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int m0 = lane / 4, n0 = lane % 4 * 4;  // rows m0 + 8 i; channels n0 + e and n0 + 16 + e, e < 4
  Stage* const stages = shared.warps[warp].stages;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const GemmTile at(plan, tile, kTileN);
    __syncthreads();  // the tile before is done with the tables and the sums
    bool any = false;
    if (threadIdx.x < kTileM) {
      const Pixel pixel = locate_pixel(p, plan.list, int64_t{at.row} * kTileM + threadIdx.x, count);
      shared.sources[threadIdx.x] = source_of<float>(p, pixel);
      shared.outputs[threadIdx.x] = output_of(p, pixel);
      any = pixel.n >= 0;
    }
    if (!__syncthreads_or(any)) continue;  // rows of a block past the plane's end

    const float* x = static_cast<const float*>(p.x.data) + int64_t{at.group} * plan.group_inputs;
    const float* weight = static_cast<const float*>(p.weight.data) + at.k * p.weight.stride[0];
    const int channels = static_cast<int>(min(at.k_end - at.k, int64_t{kTileN}));
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      const int step = warp + s * kWarps;
      if (step < steps) fetch(p, plan.reduction, shared.sources, x, weight, channels, step, &stages[s]);
      cp_async_commit();
    }
    float sums[8][8] = {};
    int read = 0, write = kStages - 1;
    for (int step = warp; step < steps; step += kWarps) {
      cp_async_wait<kStages - 2>();
      __syncwarp();
      const int ahead = step + (kStages - 1) * kWarps;
      if (ahead < steps) fetch(p, plan.reduction, shared.sources, x, weight, channels, ahead, &stages[write]);
      cp_async_commit();
      const Stage& stage = stages[read];
#pragma unroll
      for (int d = 0; d < kDepth; d += 4) {
        float4 a[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] = *reinterpret_cast<const float4*>(&stage.x[m0 + i * 8][d]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float4 b = *reinterpret_cast<const float4*>(&stage.weight[weight_row(n0 + j % 4 + j / 4 * 16)][d]);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            sums[i][j] = fmaf(a[i].x, b.x, sums[i][j]);
            sums[i][j] = fmaf(a[i].y, b.y, sums[i][j]);
            sums[i][j] = fmaf(a[i].z, b.z, sums[i][j]);
            sums[i][j] = fmaf(a[i].w, b.w, sums[i][j]);
          }
        }
      }
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    if (tile + gridDim.x >= tiles) grid_dependency_release();

    __syncwarp();  // the warp is done with its stages, where its sums go
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; j += 4)
        *reinterpret_cast<float4*>(&shared.warps[warp].sums[m0 + i * 8][n0 + j * 4]) =
            make_float4(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]);
    __syncthreads();
    const int m = threadIdx.x / 8, n = threadIdx.x % 8 * 4;
    if (at.k + n >= at.k_end) continue;
    float v[4][4], bias[4];
    Output to[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bias[e] = at.k + n + e < at.k_end ? bias_at<float>(p, at.k + n + e) : 0.f;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      to[r] = shared.outputs[m + r * 16];
      float4 sum = *reinterpret_cast<const float4*>(&shared.warps[0].sums[m + r * 16][n]);
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float4 more = *reinterpret_cast<const float4*>(&shared.warps[w].sums[m + r * 16][n]);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      v[r][0] = sum.x + bias[0], v[r][1] = sum.y + bias[1], v[r][2] = sum.z + bias[2], v[r][3] = sum.w + bias[3];
    }
    finish_outputs<float>(p, plan.vector_y, plan.vector_residual, v, to, at.k + n, at.k_end);
  }
}

}  // namespace

Status launch_simt_words(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  const GemmPlan plan(p, kLanes<float>, kTileN);
  const int64_t tiles = plan.most_tiles(p, kTileM);
  SBNET_CHECK(tiles <= INT32_MAX / 2, "%s: active: expected at most 2^30 tiles, got %lld", kConvOp,
              static_cast<long long>(tiles));
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, conv_simt_words_kernel, kThreads, sizeof(Shared), &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, tiles, plan.fringe.threads(p), kThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, conv_simt_words_kernel, dim3(grid), dim3(kThreads), sizeof(Shared),
                                           stream, p, plan));
  return ok_status();
}

}  // namespace sbnet::portable

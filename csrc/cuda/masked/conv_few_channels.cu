// Convolution of up to four input channels and sixteen taps, as a network's first one: y[pixels, K] = x[pixels, R*S*C]
// w[K, R*S*C]^T on the tensor cores of every device since sm_80, float16 and bfloat16, x of any strides.
//
// The order of a reduction is free: the four elements of a pixel that a lane holds in a step of mma.sync are the
// channels of one tap, padded with zeros. So x goes from global memory straight into the lanes' operands, no warp
// waits for another, and a step reduces over four taps. Output channels are assigned to the columns of the products so
// that those of a lane are neighbours.
#include "core/through.h"
#include "cuda/masked/conv_few_channels.cuh"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTilePixels = 16;  // of a warp

struct FewChannelsPlan {
  PixelList list;
  FringePlan fringe;
  bool vector_y;
  const void* const* x_at;  // where x's address stands, or null
};

// A lane's tap of a step, relative to a pixel's first one. There is none past the last: its row is outside any plane.
struct LaneTap {
  int offset, row, column;
};
__device__ __forceinline__ LaneTap lane_tap(const Conv2dParams& p, int tap) {
  const int width = static_cast<int>(p.weight.size[3]), r = tap / width, s = tap % width;
  if (r >= p.weight.size[2]) return {0, -(1 << 30), 0};
  const int row = r * p.dilation[0], column = s * p.dilation[1];
  return {static_cast<int>(row * p.x.stride[2] + column * p.x.stride[3]), row, column};
}

// A lane's part of a tile: two pixels, and one of their taps in each step.
template <int kSteps>
struct Operand {
  Pixel pixels[2];
  Quad taps[2][kSteps];
};

// kColumns: the output channels in eights; kMost: input channels at most; kSteps: of four taps. Weights stay in shared
// memory: registers hold those of 64 channels only by spilling.
template <class T, int kColumns, int kMost, int kSteps>
__global__ void __launch_bounds__(kThreads, kColumns >= 8   ? 2
                                            : kColumns == 4 ? 3
                                                            : 4)
    conv_few_channels_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ FewChannelsPlan plan) {
  constexpr int kGroup = kColumns < 4 ? kColumns : 4;  // products in which a lane's columns are neighbouring channels
  constexpr int kRun = 2 * kGroup, kWords = kSteps * kColumns * 32;
  __shared__ uint2 weights[kWords];
  __shared__ float4 bias[kColumns * 2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, K = static_cast<int>(p.weight.size[0]);
  const int channels = static_cast<int>(p.x.size[1]);

  grid_dependency_wait();
  grid_dependency_release();
  // The weights, the bias and a first tile are all loaded before any of them is used.
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  Quad staged[(kWords + kThreads - 1) / kThreads];
#pragma unroll
  for (int i = 0; i < (kWords + kThreads - 1) / kThreads; ++i) {
    const int word = threadIdx.x + i * kThreads, column = word / 32 % kColumns, row = word % 32 / 4;
    const int k = column / kGroup * (kGroup * 8) + row / 2 * kRun + column % kGroup * 2 + row % 2;
    const int tap = word / (32 * kColumns) * kStepTaps + word % kStepTaps, width = static_cast<int>(p.weight.size[3]);
    staged[i] = read_quad<kMost>(static_cast<const uint16_t*>(p.weight.data) + k * p.weight.stride[0] +
                                     tap / width * p.weight.stride[2] + tap % width * p.weight.stride[3],
                                 p.weight.stride[1], channels, (k < K) & (tap < width * p.weight.size[2]));
  }
  const float own_bias = threadIdx.x < K ? bias_at<T>(p, threadIdx.x) : 0.f;
  LaneTap taps[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) taps[s] = lane_tap(p, s * kStepTaps + lane % 4);
  const int tiles = static_cast<int>(plan.list.tiles(count, kTilePixels)), step = static_cast<int>(gridDim.x) * kWarps;
  const char* x_data = static_cast<const char*>(plan.x_at ? *plan.x_at : p.x.data);
  auto fetch = [&](int tile) {
    Operand<kSteps> x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x.pixels[i] = {-1, 0, 0};
      if (tile < tiles) x.pixels[i] = locate_pixel(p, plan.list, int64_t{tile} * kTilePixels + i * 8 + lane / 4, count);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Source source = source_of<T>(p, x.pixels[i]);
      const auto* from = reinterpret_cast<const uint16_t*>(x_data + source.offset);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int row = source.row + taps[s].row, column = source.column + taps[s].column;
        const bool in = (static_cast<unsigned>(row) < static_cast<unsigned>(p.x.size[2])) &
                        (static_cast<unsigned>(column) < static_cast<unsigned>(p.x.size[3]));
        x.taps[i][s] = read_quad<kMost>(from + taps[s].offset, p.x.stride[1], channels, in);
      }
    }
    return x;
  };
  int tile = static_cast<int>(blockIdx.x) * kWarps + warp;
  Operand<kSteps> x = fetch(tile);

#pragma unroll
  for (int i = 0; i < (kWords + kThreads - 1) / kThreads; ++i) {
    const int word = threadIdx.x + i * kThreads;
    if (word < kWords) weights[word] = make_uint2(staged[i].low(), staged[i].high());
  }
  if (threadIdx.x < kColumns * 8) reinterpret_cast<float*>(bias)[threadIdx.x] = own_bias;
  __syncthreads();
  for (; tile < tiles; tile += step) {
    uint32_t a[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i) a[s][i] = x.taps[i][s].low(), a[s][2 + i] = x.taps[i][s].high();
    const Output to[2] = {{x.pixels[0].n < 0 ? -1 : pixel_offset(p.y, x.pixels[0]), 0},
                          {x.pixels[1].n < 0 ? -1 : pixel_offset(p.y, x.pixels[1]), 0}};
#pragma unroll
    for (int group = 0; group < kColumns / kGroup; ++group) {
      const int k = group * kGroup * 8 + lane % 4 * kRun;
      float v[2][kRun];
#pragma unroll
      for (int e = 0; e < kRun; e += 4) {
        const float4 b = bias[(k + e) / 4];
#pragma unroll
        for (int i = 0; i < 2; ++i) v[i][e] = b.x, v[i][e + 1] = b.y, v[i][e + 2] = b.z, v[i][e + 3] = b.w;
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        float sums[4] = {v[0][2 * j], v[0][2 * j + 1], v[1][2 * j], v[1][2 * j + 1]};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          const uint2 w = weights[(s * kColumns + group * kGroup + j) * 32 + lane];
          mma_16x8<T>(sums, a[s], w.x, w.y);
        }
        v[0][2 * j] = sums[0], v[0][2 * j + 1] = sums[1], v[1][2 * j] = sums[2], v[1][2 * j + 1] = sums[3];
      }
      if (k < K) finish_outputs<T>(p, plan.vector_y, false, v, to, k, K);
    }
    x = fetch(tile + step);
  }
  // Last, and first by CTAs that had no tile.
  clear_fringe<T>(p, plan.fringe, int64_t{gridDim.x - 1 - blockIdx.x} * kThreads + threadIdx.x,
                  int64_t{gridDim.x} * kThreads);
}

template <class T, int kMost, int kSteps, int kColumns>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  constexpr auto kernel = conv_few_channels_kernel<T, kColumns, kMost, kSteps>;
  const FewChannelsPlan plan = {PixelList(p), FringePlan(p), channels_vectorize(p.y), lies_at(p.x.data)};
  const int64_t tiles = plan.list.tiles(p.active.capacity, kTilePixels);
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kThreads, 0, &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, (tiles + kWarps - 1) / kWarps, plan.fringe.threads(p), kThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kThreads), 0, stream, p, plan));
  return ok_status();
}

template <class T, int kMost, int kSteps>
Status launch_columns(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t K = p.weight.size[0];
  if (K <= 16) return launch<T, kMost, kSteps, 2>(p, device, stream);
  if (K <= 32) return launch<T, kMost, kSteps, 4>(p, device, stream);
  if (K <= 64) return launch<T, kMost, kSteps, 8>(p, device, stream);
  return K <= 96 ? launch<T, kMost, kSteps, 12>(p, device, stream) : launch<T, kMost, kSteps, 16>(p, device, stream);
}
template <class T, int kMost>
Status launch_steps(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.weight.size[2] * p.weight.size[3] <= 3 * kStepTaps ? launch_columns<T, kMost, 3>(p, device, stream)
                                                              : launch_columns<T, kMost, 4>(p, device, stream);
}
template <class T>
Status launch_half(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.x.size[1] < kChannels ? launch_steps<T, kChannels - 1>(p, device, stream)
                                 : launch_steps<T, kChannels>(p, device, stream);
}

}  // namespace

Status launch_few_channels(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return p.x.dtype == DType::kBF16 ? launch_half<__nv_bfloat16>(p, device, stream)
                                   : launch_half<__half>(p, device, stream);
}

}  // namespace sbnet::portable

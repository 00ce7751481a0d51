// Convolution as a GEMM on the tensor cores of every device since sm_80: y[pixels, K] = x[pixels, R*S*C] w[K, R*S*C]^T,
// whose left operand is gathered from x by the tile loader and never stored.
//
// It serves what no other kernel takes, as channels that are no multiple of 8, merged groups and kernels of many taps:
// wide tiles would pay for few of those. A CTA owns 128 entries of the pixel list and 64 output channels of one group.
// A pipeline stage holds 128 bytes of the reduction per pixel and per output channel: eight 16-byte words, each from
// one kernel tap, stored at word position w ^ (row % 8), which keeps both cp.async and ldmatrix free of bank conflicts.
#include "cuda/masked/conv_implicit_gemm_tile.cuh"

namespace sbnet::portable {
namespace {

constexpr int kTileN = 64;

// Merged groups multiply the inputs of each other's channels by zero, which is not zero for an infinity or NaN: an
// output that is not finite is summed again over its own group alone.
template <class T>
__device__ __noinline__ float own_group_sum(const Conv2dParams& p, const GemmPlan& plan, const Source& source,
                                            int64_t k) {
  const int64_t group = plan.single_outputs.quotient(static_cast<uint32_t>(k));
  const char* x = static_cast<const char*>(p.x.data) + source.offset;
  const T* weight = static_cast<const T*>(p.weight.data) + k * p.weight.stride[0];
  float sum = 0.f;
  for (int r = 0; r < p.weight.size[2]; ++r) {
    for (int s = 0; s < p.weight.size[3]; ++s) {
      const int row = r * p.dilation[0], column = s * p.dilation[1];
      if (static_cast<unsigned>(source.row + row) >= static_cast<unsigned>(p.x.size[2]) ||
          static_cast<unsigned>(source.column + column) >= static_cast<unsigned>(p.x.size[3]))
        continue;
      const T* pixel = reinterpret_cast<const T*>(x) + row * p.x.stride[2] + column * p.x.stride[3];
      for (int64_t c = 0; c < p.weight.size[1]; ++c)
        sum += to_float(pixel[(group * p.weight.size[1] + c) * p.x.stride[1]]) *
               to_float(weight[c * p.weight.stride[1] + r * p.weight.stride[2] + s * p.weight.stride[3]]);
    }
  }
  return sum;
}

template <class T, Fetch kFetch>
__global__ void __launch_bounds__(kThreads, kFetch != Fetch::kWords || sizeof(T) == 4 ? 2 : 3)
    conv_implicit_gemm_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ GemmPlan plan) {
  using Smem = Shared<kTileN>;
  extern __shared__ __align__(128) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  grid_dependency_wait();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int tiles = static_cast<int>(plan.list.tiles(count, kTileM)) * static_cast<int>(plan.column_tiles.divisor);
  const int steps =
      (plan.reduction.units * plan.reduction.unit_channels + kRowBytes / static_cast<int>(sizeof(T)) - 1) /
      (kRowBytes / static_cast<int>(sizeof(T)));
  Loader<T, kTileN, kFetch> loader(p, plan, Smem::sources(smem), reinterpret_cast<TapTable*>(smem + Smem::kTaps));
  WarpTile<T, kTileN> work(warp, lane);

  // A short reduction over the only columns: every step has its own stage, and all tiles the same weights.
  const bool keep_weights = Smem::kKeepsWeights && steps <= kStages && plan.column_tiles.divisor == 1;
  bool fresh = true;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const GemmTile at(plan, tile, kTileN);
    const Pixel pixel = locate_pixel(p, plan.list, int64_t{at.row} * kTileM + threadIdx.x, count);
    const Source source = source_of<T>(p, pixel);
    Smem::sources(smem)[threadIdx.x] = source;
    for (int s = 0; s < kStages; ++s) loader.tabulate(s, s);
    __syncthreads();

    loader.begin_tile(at.group, at.k, static_cast<int>(min(at.k_end - at.k, int64_t{kTileN})), source);
    sum_tile(loader, work, smem, steps, fresh);
    fresh = !keep_weights;
    if (tile + gridDim.x >= tiles) grid_dependency_release();

    __syncthreads();  // the stages are free: the sums take their place, so that stores go out in 16-byte words
    float* const staged = reinterpret_cast<float*>(smem);
    work.stage_sums(staged, Smem::kPitch, warp, lane);
    Smem::outputs(smem)[threadIdx.x] = output_of(p, pixel);
    __syncthreads();
    constexpr int kWords = kTileN / 8;  // eight channels per thread and pass
    const int channel = threadIdx.x % kWords * 8;
    if (at.k + channel < at.k_end) {
      float bias[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) bias[e] = at.k + channel + e < at.k_end ? bias_at<T>(p, at.k + channel + e) : 0.f;
      constexpr int kRows = 4, kRowStep = kThreads / kWords;
#pragma unroll 1
      for (int row = threadIdx.x / kWords; row < kTileM; row += kRows * kRowStep) {
        float v[kRows][8];
        Output to[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          to[i] = Smem::outputs(smem)[row + i * kRowStep];
          const float* from = staged + (row + i * kRowStep) * Smem::kPitch + channel;
#pragma unroll
          for (int e = 0; e < 8; ++e) v[i][e] = from[e] + bias[e];
          if constexpr (kFetch == Fetch::kWordsOfX) {
            if (plan.group_outputs != static_cast<int>(plan.single_outputs.divisor) && to[i].y >= 0) {
#pragma unroll 1
              for (int e = 0; e < 8; ++e)
                if (!isfinite(from[e]) && at.k + channel + e < at.k_end)
                  staged[(row + i * kRowStep) * Smem::kPitch + channel + e] =
                      own_group_sum<T>(p, plan, Smem::sources(smem)[row + i * kRowStep], at.k + channel + e);
#pragma unroll
              for (int e = 0; e < 8; ++e) v[i][e] = from[e] + bias[e];
            }
          }
        }
        finish_outputs<T>(p, plan.vector_y, plan.vector_residual, v, to, at.k + channel, at.k_end);
      }
    }
    __syncthreads();
  }
}

template <class T, Fetch kFetch>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream, int merged = 1) {
  const GemmPlan plan(p, kFetch == Fetch::kElements ? 1 : kLanes<T>, kTileN, merged);
  constexpr int kTables = kFetch == Fetch::kElements ? kStages * static_cast<int>(sizeof(TapTable)) : 0;
  return launch_tiles<conv_implicit_gemm_kernel<T, kFetch>, kTileN>(kConvOp, p, plan, kTables, device, stream);
}

// Are 16-byte words of x's channels whole, and within one group of `channels` input channels?
bool words_of_x(const Conv2dParams& p, int64_t channels) {
  return channels_vectorize(p.x) && channels % (16 / dtype_size(p.x.dtype)) == 0;
}

// How many small groups to compute as one, so that they fill a narrow tile: most of its products are with zeros, but
// single groups would leave most of the tile empty. 1 where that does not help.
int groups_to_merge(const Conv2dParams& p) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  int merged = 1;
  if (outputs <= 16 && p.weight.size[1] <= 64)
    for (int m = 2; m <= p.groups && m * outputs <= 64; ++m)
      if (p.groups % m == 0 && words_of_x(p, m * p.weight.size[1])) merged = m;
  return merged;
}

template <class T>
Status launch_half(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int merged = groups_to_merge(p);
  if (merged > 1) return launch<T, Fetch::kWordsOfX>(p, device, stream, merged);
  if (!words_of_x(p, p.weight.size[1])) return launch<T, Fetch::kElements>(p, device, stream);
  if (!channels_vectorize(p.weight)) return launch<T, Fetch::kWordsOfX>(p, device, stream);
  return launch<T, Fetch::kWords>(p, device, stream);
}

}  // namespace

Status launch_implicit_gemm(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype(p.x.dtype, [&](auto t) {
    if constexpr (sizeof(t) == 4)
      return launch<float, Fetch::kWords>(p, device, stream);
    else
      return launch_half<decltype(t)>(p, device, stream);
  });
}

}  // namespace sbnet::portable

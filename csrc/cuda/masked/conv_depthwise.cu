// Depthwise convolution: one input channel per group, K/C output channels each. Bound by memory, so no tensor cores.
//
// A thread computes a strip of neighbouring pixels in one row of a block, of one 16-byte word of output channels; the
// usual square kernels have kernels of their own. A CTA keeps to one slice of channels, whose weights wait in shared
// memory as float32.
#include "core/settled.h"
#include "cuda/by_dtype.cuh"
#include "cuda/masked/conv_depthwise_square.cuh"
#include "cuda/masked/conv_depthwise_tile.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kSliceThreads = 8;  // threads side by side along the channels
constexpr int kMaxTaps = 128;

template <int kN>
using Constant = std::integral_constant<int, kN>;

struct DepthwisePlan {
  FastDiv slices;        // of channels, neighbouring CTAs
  FastDiv multiplier;    // output channel -> input channel
  FastDiv block_strips;  // strip index -> slot, strip of the block
  FastDiv strips_per_row;
  FastDiv kernel_width;
  FringePlan fringe;
  int32_t strips_per_block;
  int32_t log2_slice_threads;
  bool vector_y, vector_residual;
  bool settled;  // weights and lists may be read before the launch ahead has ended
};

// The input word at (row, column) of the plane, zeros outside.
template <class T, bool kWords>
__device__ __forceinline__ uint4 read_word(const Conv2dParams& p, const T* x, int row, int column,
                                           const int (&channel)[kLanes<T>]) {
  const bool in = (static_cast<unsigned>(row) < static_cast<unsigned>(p.x.size[2])) &
                  (static_cast<unsigned>(column) < static_cast<unsigned>(p.x.size[3]));
  const T* from = x + row * p.x.stride[2] + column * p.x.stride[3];
  uint4 word{0, 0, 0, 0};
  if constexpr (kWords) {
    if (in) word = *reinterpret_cast<const uint4*>(from + channel[0]);
  } else {
    T* part = reinterpret_cast<T*>(&word);
#pragma unroll
    for (int e = 0; e < kLanes<T>; ++e)
      if (in) part[e] = from[channel[e] * p.x.stride[1]];
  }
  return word;
}
template <class T>
__device__ __forceinline__ void unpack(const uint4& word, float (&v)[kLanes<T>]) {
  const T* part = reinterpret_cast<const T*>(&word);
#pragma unroll
  for (int e = 0; e < kLanes<T>; ++e) v[e] = to_float(part[e]);
}

template <int kN>
__device__ __forceinline__ void add_products(const float* weight, const float (&v)[kN], float (&sums)[kN]) {
#pragma unroll
  for (int e = 0; e < kN; e += 4) {
    const float4 w = *reinterpret_cast<const float4*>(weight + e);
    sums[e] = fmaf(v[e], w.x, sums[e]);
    sums[e + 1] = fmaf(v[e + 1], w.y, sums[e + 1]);
    sums[e + 2] = fmaf(v[e + 2], w.z, sums[e + 2]);
    sums[e + 3] = fmaf(v[e + 3], w.w, sums[e + 3]);
  }
}

// kWords: x is channels_last and has as many channels as y, so that its channels come in 16-byte words too.
template <class T, bool kWords>
__global__ void __launch_bounds__(kThreads, 2)
    conv_depthwise_kernel(const __grid_constant__ Conv2dParams p, const __grid_constant__ DepthwisePlan plan) {
  constexpr int kL = kLanes<T>, kSlice = kSliceThreads * kL;
  extern __shared__ __align__(16) float smem[];  // weights [taps][slice]
  const int R = static_cast<int>(p.weight.size[2]), S = static_cast<int>(p.weight.size[3]);
  const int K = static_cast<int>(p.weight.size[0]), slices = static_cast<int>(plan.slices.divisor);
  const int cta = static_cast<int>(plan.slices.quotient(blockIdx.x)), ctas = static_cast<int>(gridDim.x) / slices;
  const int slice = (static_cast<int>(blockIdx.x) - cta * slices) * kSlice;

  if (!plan.settled) grid_dependency_wait();
  for (int i = threadIdx.x; i < R * S * kSlice; i += kThreads) {
    const int k = slice + i % kSlice;
    uint32_t r, s;
    plan.kernel_width.divmod(i / kSlice, &r, &s);
    smem[i] = k < K ? to_float(static_cast<const T*>(
                          p.weight.data)[k * p.weight.stride[0] + r * p.weight.stride[2] + s * p.weight.stride[3]])
                    : 0.f;
  }
  __syncthreads();

  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int lane = threadIdx.x & ((1 << plan.log2_slice_threads) - 1);
  const int k = slice + lane * kL;
  const float* weight = smem + lane * kL;
  float bias[kL];
  int channel[kL];  // input channels of the output channels
#pragma unroll
  for (int e = 0; e < kL; ++e) {
    const int output = min(k + e, K - 1);
    bias[e] = bias_at<T>(p, output);
    channel[e] = plan.multiplier.quotient(output);
  }
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
  if (k >= K) return;

  const BlockGrid& grid = p.active.grid;
  const int strips = count * plan.strips_per_block;
  const int stride = (ctas * kThreads) >> plan.log2_slice_threads;
  for (int strip = (cta * kThreads + static_cast<int>(threadIdx.x)) >> plan.log2_slice_threads; strip < strips;
       strip += stride) {
    uint32_t slot, rest, row, column;
    plan.block_strips.divmod(strip, &slot, &rest);
    plan.strips_per_row.divmod(rest, &row, &column);
    BlockIndex b;
    if (!load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b)) continue;
    const int column_in_block = column * kStrip;
    const Pixel pixel{b.n, b.i * grid.size[0] + static_cast<int>(row), b.j * grid.size[1] + column_in_block};
    const int pixels = min(min(kStrip, grid.size[1] - column_in_block), static_cast<int>(p.y.size[3]) - pixel.column);
    if (pixel.row >= p.y.size[2] || pixels <= 0) continue;

    const T* x = static_cast<const T*>(p.x.data) + pixel.n * p.x.stride[0];
    const int row0 = pixel.row * p.stride[0] - p.padding[0], column0 = pixel.column * p.stride[1] - p.padding[1];
    float sums[kStrip][kL];
#pragma unroll
    for (int i = 0; i < kStrip; ++i)
#pragma unroll
      for (int e = 0; e < kL; ++e) sums[i][e] = 0.f;

    if (p.stride[1] == 1 && p.dilation[1] == 1) {
      for (int r = 0; r < R; ++r) {
#pragma unroll 4
        for (int j = 0; j < kStrip + S - 1; ++j) {
          float v[kL];
          unpack<T>(read_word<T, kWords>(p, x, row0 + r * p.dilation[0], column0 + j, channel), v);
#pragma unroll
          for (int i = 0; i < kStrip; ++i)
            if (static_cast<unsigned>(j - i) < static_cast<unsigned>(S))
              add_products(weight + (r * S + j - i) * kSlice, v, sums[i]);
        }
      }
    } else {
      for (int r = 0; r < R; ++r) {
#pragma unroll 2
        for (int s = 0; s < S; ++s) {
#pragma unroll
          for (int i = 0; i < kStrip; ++i) {
            if (i >= pixels) continue;  // coordinates past the plane's edge might overflow
            float v[kL];
            unpack<T>(read_word<T, kWords>(p, x, row0 + r * p.dilation[0],
                                           column0 + i * p.stride[1] + s * p.dilation[1], channel),
                      v);
            add_products(weight + (r * S + s) * kSlice, v, sums[i]);
          }
        }
      }
    }

    const Output first = output_of(p, pixel);
    Output to[kStrip];
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      to[i] =
          i < pixels ? Output{first.y + i * p.y.stride[3], first.residual + i * p.residual.stride[3]} : Output{-1, 0};
#pragma unroll
      for (int e = 0; e < kL; ++e) sums[i][e] += bias[e];
    }
    finish_outputs<T>(p, plan.vector_y, plan.vector_residual, sums, to, k, K);
  }
}

template <class T, bool kWords>
Status launch_any(const Conv2dParams& p, const StripCounts& strips, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  constexpr auto kernel = conv_depthwise_kernel<T, kWords>;
  constexpr int kSlice = kSliceThreads * kLanes<T>;
  const int64_t K = p.weight.size[0], taps = p.weight.size[2] * p.weight.size[3];

  DepthwisePlan plan;
  plan.multiplier = FastDiv(K / p.groups);
  plan.strips_per_row = FastDiv(strips.in_row);
  plan.block_strips = FastDiv(strips.rows * strips.in_row);
  plan.kernel_width = FastDiv(p.weight.size[3]);
  plan.fringe = FringePlan(p);
  plan.settled = inputs_settled();
  plan.strips_per_block = static_cast<int32_t>(strips.rows * strips.in_row);
  plan.log2_slice_threads = 0;
  while ((1 << plan.log2_slice_threads) < kSliceThreads && (int64_t{kLanes<T>} << plan.log2_slice_threads) < K)
    ++plan.log2_slice_threads;
  plan.vector_y = channels_vectorize(p.y);
  plan.vector_residual = p.residual.data && channels_vectorize(p.residual);

  const size_t smem = taps * kSlice * sizeof(float);
  const unsigned slices = static_cast<unsigned>((K + kSlice - 1) / kSlice);
  plan.slices = FastDiv(slices);
  int ctas = 0;
  // The most shared memory that any kernel size asks for, so that the count of CTAs does not depend on the call.
  SBNET_TRY(prepare_kernel(device, kernel, kThreads, kMaxTaps * kSlice * sizeof(float), &cache, &ctas));
  const int64_t strips_per_cta = kThreads >> plan.log2_slice_threads;
  const unsigned most = persistent_grid(device, ctas, (strips.all + strips_per_cta - 1) / strips_per_cta * slices,
                                        plan.fringe.threads(p), kThreads);
  const dim3 grid((most + slices - 1) / slices * slices);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, grid, dim3(kThreads), smem, stream, p, plan));
  return ok_status();
}

template <class T>
Status launch_type(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool words = p.weight.size[0] == p.groups && p.groups % kLanes<T> == 0 && channels_vectorize(p.x);
  const StripCounts strips(p);
  SBNET_CHECK(strips.all <= INT32_MAX / 2, "%s: active: expected at most 2^30 strips of pixels, got %lld", kConvOp,
              static_cast<long long>(strips.all));
  if (!words) return launch_any<T, false>(p, strips, device, stream);
  // Two digits, size and stride, name a kernel below.
  const bool square = p.weight.size[2] == p.weight.size[3] && p.stride[0] == p.stride[1] && p.stride[0] < 10 &&
                      p.dilation[0] == 1 && p.dilation[1] == 1;
  const auto run = [&](auto size, auto stride) {
    if constexpr (sizeof(T) == 2) {
      if (!distances_fit(p.x)) return launch_any<T, true>(p, strips, device, stream);
      return launch_depthwise_tiles<T, size, stride>(p, device, stream);
    } else {
      return launch_square<size, stride>(p, device, stream);
    }
  };
  switch (square ? p.weight.size[2] * 10 + p.stride[0] : 0) {
    case 31:
      return run(Constant<3>{}, Constant<1>{});
    case 32:
      return run(Constant<3>{}, Constant<2>{});
    case 51:
      return run(Constant<5>{}, Constant<1>{});
    case 52:
      return run(Constant<5>{}, Constant<2>{});
    case 71:
      return run(Constant<7>{}, Constant<1>{});
    default:
      return launch_any<T, true>(p, strips, device, stream);
  }
}

}  // namespace

Status launch_depthwise(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype(p.x.dtype, [&](auto t) { return launch_type<decltype(t)>(p, device, stream); });
}

}  // namespace sbnet::portable

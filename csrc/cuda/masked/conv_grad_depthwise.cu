// The weight gradient of depthwise convolutions: a warp takes 32 words of channels and every eighth pixel of its part,
// a CTA a row of taps, kTaps of which a thread sums at once.
#include "cuda/masked/conv_grad.cuh"
#include "cuda/masked/layer.cuh"

namespace sbnet::portable {
namespace {

constexpr int kWarps = 8, kLeastPixels = 128, kMostTaps = 8;

template <class T, int N>
struct alignas(sizeof(T) * N) Channels {
  T channel[N];
};

struct DepthwisePlan {
  GradParts parts;
  PixelList list;
  FastDiv multiplier;     // output channels of an input channel
  FastDiv column_groups;  // groups of kTaps taps of a row
  int32_t words;          // of the output channels
};

template <class T, int kN, int kTaps>
__global__ void __launch_bounds__(kWarps * 32)
    grad_depthwise_kernel(const __grid_constant__ ConvWeightGradParams params,
                          const __grid_constant__ DepthwisePlan plan, float* workspace) {
  __shared__ float found[kWarps][32][kN];
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int word = static_cast<int>(blockIdx.x) * 32 + lane;
  const bool in = word < plan.words;
  const int64_t k = in ? int64_t{word} * kN : 0;
  uint32_t r, column_group;
  plan.column_groups.divmod(blockIdx.z, &r, &column_group);
  const int s0 = static_cast<int>(column_group) * kTaps, S = static_cast<int>(p.weight.size[3]);
  const bool with_bias = params.bias && blockIdx.z == 0;
  const T* const x =
      static_cast<const T*>(p.x.data) + plan.multiplier.quotient(static_cast<uint32_t>(k)) * p.x.stride[1];
  const T* const grad = static_cast<const T*>(p.y.data) + k * p.y.stride[1];

  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, static_cast<int>(blockIdx.y));
  if (range.begin >= range.end) return;

  float sums[kTaps][kN] = {}, bias[kN] = {};
  for (int64_t entry = range.begin * plan.parts.chunk + warp; entry < range.end * plan.parts.chunk; entry += kWarps) {
    const Pixel pixel = locate_pixel(p, plan.list, entry, count);
    if (pixel.n < 0) continue;
    const Channels<T, kN> dy = *reinterpret_cast<const Channels<T, kN>*>(grad + pixel_offset(p.y, pixel));
#pragma unroll
    for (int e = 0; e < kN; ++e) bias[e] += to_float(dy.channel[e]);
    const int row = pixel.row * p.stride[0] - p.padding[0] + static_cast<int>(r) * p.dilation[0];
    if (static_cast<unsigned>(row) >= static_cast<unsigned>(p.x.size[2])) continue;
    const int column = pixel.column * p.stride[1] - p.padding[1];
    const T* const from = x + pixel.n * p.x.stride[0] + row * p.x.stride[2];
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      const int at = column + (s0 + t) * p.dilation[1];
      if (static_cast<unsigned>(at) >= static_cast<unsigned>(p.x.size[3]) || s0 + t >= S) continue;
      const Channels<T, kN> v = *reinterpret_cast<const Channels<T, kN>*>(from + at * p.x.stride[3]);
#pragma unroll
      for (int e = 0; e < kN; ++e) sums[t][e] += to_float(v.channel[e]) * to_float(dy.channel[e]);
    }
  }

  const int part = static_cast<int>(blockIdx.y);
  // The first warp adds what all found, in order.
  const auto gather = [&](const float (&own)[kN], const auto& visit) {
#pragma unroll
    for (int e = 0; e < kN; ++e) found[warp][lane][e] = own[e];
    __syncthreads();
    if (warp == 0 && in)
      for (int e = 0; e < kN; ++e) {
        float sum = found[0][lane][e];
        for (int w = 1; w < kWarps; ++w) sum += found[w][lane][e];
        visit(k + e, sum);
      }
    __syncthreads();
  };
  float* const to = plan.parts.sums(workspace, part);
#pragma unroll
  for (int t = 0; t < kTaps; ++t)
    gather(sums[t], [&](int64_t channel, float sum) {
      if (s0 + t < S) to[channel * plan.parts.columns + r * S + s0 + t] = sum;
    });
  if (with_bias)
    gather(bias,
           [&](int64_t channel, float sum) { plan.parts.biases(workspace, part, p.weight.size[0])[channel] = sum; });
}

// Are pairs of channels neighbours of both?
bool in_pairs(const Conv2dParams& p) {
  return p.weight.size[0] == p.x.size[1] && p.weight.size[0] % 2 == 0 && channels_vectorize(p.x) &&
         channels_vectorize(p.y);
}
int lanes_of(const Conv2dParams& p) { return in_pairs(p) ? 2 : 1; }
int taps_of(const Conv2dParams& p) {
  const int64_t S = p.weight.size[3];
  return S <= 1 ? 1 : S <= 3 ? 3 : S <= 5 ? 5 : S <= 7 ? 7 : kMostTaps;
}

template <class T, int kN, int kTaps>
Status launch(const ConvWeightGradParams& p, const GradParts& parts, float* workspace, const DeviceInfo& device,
              cudaStream_t stream) {
  const Conv2dParams& c = p.conv;
  const int64_t groups = (c.weight.size[3] + kTaps - 1) / kTaps, rows = c.weight.size[2] * groups;
  const int64_t words = c.weight.size[0] / kN;
  SBNET_CHECK(rows < 65536 && words <= INT32_MAX / 2, "%s: weight: expected fewer than 65536 rows of taps, got %lld",
              kGradOp, static_cast<long long>(rows));
  const DepthwisePlan plan = {parts, PixelList(c), FastDiv(c.weight.size[0] / c.groups), FastDiv(groups),
                              static_cast<int32_t>(words)};
  const dim3 grid(static_cast<unsigned>((words + 31) / 32), static_cast<unsigned>(parts.most),
                  static_cast<unsigned>(rows));
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device, grad_depthwise_kernel<T, kN, kTaps>, grid, dim3(kWarps * 32), 0,
                                           stream, p, plan, workspace));
  return ok_status();
}

int64_t depthwise_tiles(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  const int64_t taps = taps_of(c), words = c.weight.size[0] / lanes_of(c);
  return (words + 31) / 32 * c.weight.size[2] * ((c.weight.size[3] + taps - 1) / taps);
}
GradParts depthwise_parts(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t) {
  const int64_t tiles = depthwise_tiles(p), ctas = int64_t{device.sm_count} * 16;
  return GradParts(p, PixelList(p.conv).pixels_per_block, (ctas + tiles - 1) / tiles, kWarps, kLeastPixels / kWarps);
}

Status launch_depthwise_grad(const GradWork* layers, int, const DeviceInfo& device, cudaStream_t stream) {
  const ConvWeightGradParams& p = layers[0].params;
  const GradParts& parts = layers[0].parts;
  float* const workspace = layers[0].workspace;
  return by_dtype(p.conv.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    const auto run = [&](auto n) -> Status {
      constexpr int kN = decltype(n)::value;
      switch (taps_of(p.conv)) {
        case 1:
          return launch<T, kN, 1>(p, parts, workspace, device, stream);
        case 3:
          return launch<T, kN, 3>(p, parts, workspace, device, stream);
        case 5:
          return launch<T, kN, 5>(p, parts, workspace, device, stream);
        case 7:
          return launch<T, kN, 7>(p, parts, workspace, device, stream);
        default:
          return launch<T, kN, kMostTaps>(p, parts, workspace, device, stream);
      }
    };
    return in_pairs(p.conv) ? run(std::integral_constant<int, 2>()) : run(std::integral_constant<int, 1>());
  });
}

}  // namespace

const GradKernel kGradDepthwise = {nullptr, depthwise_tiles, depthwise_parts, launch_depthwise_grad};

}  // namespace sbnet::portable

// The weight gradient of depthwise convolutions: a warp takes 32 words of channels and every eighth strip of its part,
// up to kRun pixels of a block's row; a CTA a row of taps, kTaps of which a thread sums at once. Where taps and pixels
// are neighbours, a thread reads a strip's window once: kRun + kTaps - 1 words of x instead of their product.
#include "cuda/masked/conv_grad.cuh"
#include "cuda/masked/layer.cuh"

namespace sbnet::portable {
namespace {

constexpr int kWarps = 8, kRun = 8, kLeastPixels = 128, kMostTaps = 8;

template <class T, int N>
struct alignas(sizeof(T) * N) Channels {
  T channel[N];
};

// Blocks cut into strips: `width` of them a row.
PixelList strips_of(const Conv2dParams& p) {
  PixelList list(p);
  const int64_t height = list.pixels_per_block / list.width;
  list.width = (list.width + kRun - 1) / kRun;
  list.pixels_per_block = height * list.width;
  if (!list.wide) list.block_pixels = FastDiv(list.pixels_per_block);
  list.block_width = FastDiv(list.width);
  return list;
}

struct Strip {
  int n, row, column, pixels;  // n < 0: an empty entry
};
__device__ __forceinline__ Strip locate_strip(const Conv2dParams& p, const PixelList& list, int64_t entry, int count) {
  const BlockGrid& g = p.active.grid;
  int64_t slot;
  int row, strip;
  if (list.wide) {
    slot = entry / list.pixels_per_block;
    const int64_t rest = entry % list.pixels_per_block;
    row = static_cast<int>(rest / list.width), strip = static_cast<int>(rest % list.width);
  } else {
    uint32_t s, rest, r, c;
    list.block_pixels.divmod(static_cast<uint32_t>(entry), &s, &rest);
    list.block_width.divmod(rest, &r, &c);
    slot = s, row = static_cast<int>(r), strip = static_cast<int>(c);
  }
  BlockIndex b;
  if (slot >= count || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), g, &b)) return {-1, 0, 0, 0};
  row += b.i * g.size[0];
  const int column = b.j * g.size[1] + strip * kRun;
  const int pixels = min(min(kRun, g.size[1] - strip * kRun), static_cast<int>(p.y.size[3]) - column);
  return {row < p.y.size[2] && pixels > 0 ? b.n : -1, row, column, pixels};
}

struct DepthwisePlan {
  GradParts parts;
  PixelList list;         // of strips
  FastDiv multiplier;     // output channels of an input channel
  FastDiv slices;         // of 32 words
  FastDiv column_groups;  // groups of kTaps taps of a row
  int32_t words;          // of the output channels
};

// kSlides: stride and dilation are 1 along a row.
template <class T, int kN, int kTaps, bool kSlides>
__global__ void __launch_bounds__(kWarps * 32, kSlides ? 3 : 1)
    grad_depthwise_kernel(const __grid_constant__ ConvWeightGradParams params,
                          const __grid_constant__ DepthwisePlan plan, float* workspace) {
  __shared__ float found[kWarps][32][kN];
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t slice, taps, r, column_group;
  plan.slices.divmod(blockIdx.x, &taps, &slice);
  plan.column_groups.divmod(taps, &r, &column_group);
  const int word = static_cast<int>(slice) * 32 + lane;
  const bool in = word < plan.words;
  const int64_t k = in ? int64_t{word} * kN : 0;
  const int s0 = static_cast<int>(column_group) * kTaps, S = static_cast<int>(p.weight.size[3]);
  const bool with_bias = params.bias && taps == 0;
  const T* const x =
      static_cast<const T*>(p.x.data) + plan.multiplier.quotient(static_cast<uint32_t>(k)) * p.x.stride[1];
  const T* const grad = static_cast<const T*>(p.y.data) + k * p.y.stride[1];

  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, static_cast<int>(blockIdx.y));
  if (range.begin >= range.end) return;

  float sums[kTaps][kN] = {}, bias[kN] = {};
  // Of a pixel: 64 bits of them would take most of the instructions.
  const int x_step = static_cast<int>(p.x.stride[3]), y_step = static_cast<int>(p.y.stride[3]);
  const auto load = [](const T* from, bool inside, float (&to)[kN]) {
    Channels<T, kN> word;
    if (inside) word = *reinterpret_cast<const Channels<T, kN>*>(from);
#pragma unroll
    for (int e = 0; e < kN; ++e) to[e] = inside ? to_float(word.channel[e]) : 0.f;
  };
  const int64_t last = range.end * plan.parts.chunk;
  const auto locate = [&](int64_t entry) {
    return entry < last ? locate_strip(p, plan.list, entry, count) : Strip{-1, 0, 0, 0};
  };
  int64_t entry = range.begin * plan.parts.chunk + warp;
  Strip next = locate(entry);
  while (entry < last) {
    const Strip strip = next;
    next = locate(entry += kWarps);  // the list's entry is on its way while pixels are
    if (strip.n < 0) continue;
    const T* const of_strip = grad + strip.n * p.y.stride[0] + strip.row * p.y.stride[2] + strip.column * p.y.stride[3];
    float dy[kRun][kN];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      load(of_strip + i * y_step, i < strip.pixels, dy[i]);
#pragma unroll
      for (int e = 0; e < kN; ++e) bias[e] += dy[i][e];
    }
    const int row = strip.row * p.stride[0] - p.padding[0] + static_cast<int>(r) * p.dilation[0];
    if (static_cast<unsigned>(row) >= static_cast<unsigned>(p.x.size[2])) continue;
    const int column = strip.column * p.stride[1] - p.padding[1] + s0 * p.dilation[1];
    const T* const from = x + strip.n * p.x.stride[0] + row * p.x.stride[2] + column * p.x.stride[3];
    const int width = static_cast<int>(p.x.size[3]);
    const auto load_x = [&](int i, bool read, float (&to)[kN]) {
      load(from + i * x_step, read && static_cast<unsigned>(column + i) < static_cast<unsigned>(width), to);
    };
    if constexpr (kSlides) {
      float window[kRun + kTaps - 1][kN];
#pragma unroll
      for (int i = 0; i < kRun + kTaps - 1; ++i) load_x(i, i < strip.pixels + kTaps - 1, window[i]);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (i >= strip.pixels) break;
#pragma unroll
        for (int t = 0; t < kTaps; ++t)
#pragma unroll
          for (int e = 0; e < kN; ++e) sums[t][e] += window[i + t][e] * dy[i][e];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          float v[kN];
          load_x(i * p.stride[1] + t * p.dilation[1], i < strip.pixels && s0 + t < S, v);
#pragma unroll
          for (int e = 0; e < kN; ++e) sums[t][e] += v[e] * dy[i][e];
        }
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
  const int64_t words = c.weight.size[0] / kN, slices = (words + 31) / 32;
  SBNET_CHECK(rows * slices < INT32_MAX, "%s: weight: expected fewer than 2^31 rows of taps and words, got %lld",
              kGradOp, static_cast<long long>(rows * slices));
  const DepthwisePlan plan = {parts,           strips_of(c),    FastDiv(c.weight.size[0] / c.groups),
                              FastDiv(slices), FastDiv(groups), static_cast<int32_t>(words)};
  const dim3 grid(static_cast<unsigned>(rows * slices), static_cast<unsigned>(parts.most));
  constexpr int64_t kFar = 1 << 24;
  SBNET_CHECK(std::abs(c.x.stride[3]) < kFar && std::abs(c.y.stride[3]) < kFar,
              "%s: x, grad: expected pixels that lie fewer than 2^24 elements apart, got %lld and %lld", kGradOp,
              static_cast<long long>(c.x.stride[3]), static_cast<long long>(c.y.stride[3]));
  const bool slides = c.stride[1] == 1 && c.dilation[1] == 1;
  const auto kernel = slides ? grad_depthwise_kernel<T, kN, kTaps, true> : grad_depthwise_kernel<T, kN, kTaps, false>;
  SBNET_CUDA_TRY(kGradOp, launch_dependent(device, kernel, grid, dim3(kWarps * 32), 0, stream, p, plan, workspace));
  return ok_status();
}

int64_t depthwise_tiles(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  const int64_t taps = taps_of(c), words = c.weight.size[0] / lanes_of(c);
  return (words + 31) / 32 * c.weight.size[2] * ((c.weight.size[3] + taps - 1) / taps);
}
GradParts depthwise_parts(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t) {
  const int64_t tiles = depthwise_tiles(p), ctas = int64_t{device.sm_count} * 8;
  return GradParts(p, strips_of(p.conv).pixels_per_block, (ctas + tiles - 1) / tiles, kWarps,
                   kLeastPixels / (kWarps * kRun));
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

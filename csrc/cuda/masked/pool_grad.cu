// sparse_pool2d_grad on CUDA: a thread takes a pixel of dx and a word of channels, and gathers what the windows over it
// give it. No atomics: the sums have an order.
#include "core/masked/pool_grad.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_pool2d_grad";

struct PoolGradPlan {
  FastDiv words, width, height, stride[2], dilation[2], block[2], own[2];
  int64_t items;
  bool channels_inner, wide;  // wide: 31 bits do not number the items
};

// The larger of each channel, or NaN.
template <class T, int kN>
__device__ __forceinline__ Word<T, kN> larger(const Word<T, kN>& a, const Word<T, kN>& b) {
  Word<T, kN> out;
  if constexpr (std::is_same_v<T, float> || kN == 1) {
#pragma unroll
    for (int e = 0; e < kN; ++e)
      out.channel[e] = from_float<T>(max_nan(to_float(a.channel[e]), to_float(b.channel[e])));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
#pragma unroll
    for (int e = 0; e < kN; e += 2)
      *reinterpret_cast<Pair*>(out.channel + e) =
          __hmax2_nan(*reinterpret_cast<const Pair*>(a.channel + e), *reinterpret_cast<const Pair*>(b.channel + e));
  }
  return out;
}

template <class T, int kN>
__device__ __forceinline__ void add_window(const PoolParams& p, const T* x, const Word<T, kN>& dy, int o, int q, int i,
                                           int j, float (&sums)[kN]) {
  const int top = o * p.stride[0] - p.padding[0], left = q * p.stride[1] - p.padding[1];
  if (p.kind == PoolKind::kAverage) {
    const float share = 1.f / pool_divisor(p, top, left);
#pragma unroll
    for (int e = 0; e < kN; ++e) sums[e] += to_float(dy.channel[e]) * share;
    return;
  }
  // Is (i, j) the maximum? The first of equals is, and the last NaN.
  const auto at = [&](int row, int column) {
    return *reinterpret_cast<const Word<T, kN>*>(x + row * p.x.stride[2] + column * p.x.stride[3]);
  };
  // What lies before it and after it is merged first: their maxima say as much, NaN among them too.
  const Word<T, kN> own = at(i, j);
  Word<T, kN> before, after;
#pragma unroll
  for (int e = 0; e < kN; ++e) before.channel[e] = after.channel[e] = from_float<T>(-INFINITY);
  bool any_before = false;
  for (int r = 0; r < p.kernel[0]; ++r) {
    const int row = top + r * p.dilation[0];
    if (static_cast<unsigned>(row) >= static_cast<unsigned>(p.x.size[2])) continue;
    for (int s = 0; s < p.kernel[1]; ++s) {
      const int column = left + s * p.dilation[1];
      if (static_cast<unsigned>(column) >= static_cast<unsigned>(p.x.size[3]) || (row == i && column == j)) continue;
      if (row < i || (row == i && column < j))
        before = larger(before, at(row, column)), any_before = true;
      else
        after = larger(after, at(row, column));
    }
  }
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const float mine = to_float(own.channel[e]), b = to_float(before.channel[e]), a = to_float(after.channel[e]);
    const bool earlier = any_before && !(b < mine) && mine == mine, later = !(a <= mine) && (a != a || mine == mine);
    if (!earlier && !later) sums[e] += to_float(dy.channel[e]);
  }
}

template <class T, int kN>
__global__ void __launch_bounds__(kPixelThreads)
    pool_grad_kernel(const __grid_constant__ PoolGradParams params, const __grid_constant__ PoolGradPlan plan) {
  grid_dependency_wait();
  grid_dependency_release();
  const PoolParams& p = params.pool;
  const BlockGrid& grid = p.active.grid;
  for (int64_t item = int64_t{blockIdx.x} * kPixelThreads + threadIdx.x; item < plan.items;
       item += int64_t{gridDim.x} * kPixelThreads) {
    int64_t image, pixel, word;
    uint32_t i, j;
    if (plan.channels_inner && !plan.wide) {
      uint32_t rest, of_word, row, n;
      plan.words.divmod(static_cast<uint32_t>(item), &rest, &of_word);
      plan.width.divmod(rest, &row, &j);
      plan.height.divmod(row, &n, &i);
      image = n, word = of_word;
    } else {
      const int64_t words = plan.words.divisor, plane = int64_t{plan.width.divisor} * plan.height.divisor;
      image = item / (plane * words);
      const int64_t rest = item - image * plane * words;
      if (plan.channels_inner)
        pixel = rest / words, word = rest - pixel * words;
      else
        word = rest / plane, pixel = rest - word * plane;
      plan.width.divmod(static_cast<uint32_t>(pixel), &i, &j);
    }
    if (params.dx_map) {
      const int32_t* const row =
          params.dx_map + (image * params.dx_grid.count[0] + plan.own[0].quotient(i)) * params.dx_grid.count[1];
      if (row[plan.own[1].quotient(j)] < 0) continue;
    }
    const uint32_t in[2] = {i, j};
    int first[2], last[2];
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const int at = static_cast<int>(in[d]) + p.padding[d], from = at - p.dilation[d] * (p.kernel[d] - 1);
      first[d] = from <= 0 ? 0 : static_cast<int>(plan.stride[d].quotient(from + p.stride[d] - 1));
      last[d] = min(static_cast<int>(plan.stride[d].quotient(at)), static_cast<int>(p.y.size[2 + d]) - 1);
    }
    const int64_t channel = word * kN;
    const T* const x = static_cast<const T*>(p.x.data) + image * p.x.stride[0] + channel * p.x.stride[1];
    const T* const y = static_cast<const T*>(p.y.data) + image * p.y.stride[0] + channel * p.y.stride[1];
    const int32_t* const map = p.active.block_map + image * grid.count[0] * grid.count[1];
    float sums[kN] = {};
    for (int o = first[0]; o <= last[0]; ++o) {
      const uint32_t row_tap = i + p.padding[0] - o * p.stride[0];
      if (plan.dilation[0].quotient(row_tap) * plan.dilation[0].divisor != row_tap) continue;
      const int32_t* const blocks = map + plan.block[0].quotient(o) * grid.count[1];
      for (int q = first[1]; q <= last[1]; ++q) {
        const uint32_t column_tap = j + p.padding[1] - q * p.stride[1];
        if (plan.dilation[1].quotient(column_tap) * plan.dilation[1].divisor != column_tap) continue;
        if (blocks[plan.block[1].quotient(q)] < 0) continue;
        const Word<T, kN> dy = *reinterpret_cast<const Word<T, kN>*>(y + o * p.y.stride[2] + q * p.y.stride[3]);
        add_window<T, kN>(p, x, dy, o, q, static_cast<int>(i), static_cast<int>(j), sums);
      }
    }
    Word<T, kN> out;
#pragma unroll
    for (int e = 0; e < kN; ++e) out.channel[e] = from_float<T>(sums[e]);
    *reinterpret_cast<Word<T, kN>*>(static_cast<T*>(params.dx.data) + image * params.dx.stride[0] +
                                    channel * params.dx.stride[1] + i * params.dx.stride[2] + j * params.dx.stride[3]) =
        out;
  }
}

template <class T, int kN>
Status launch(const PoolGradParams& params, const DeviceInfo& device, cudaStream_t stream) {
  const PoolParams& p = params.pool;
  const int64_t words = p.x.size[1] / kN, plane = p.x.size[2] * p.x.size[3];
  SBNET_CHECK(plane < INT32_MAX, "%s: x: expected fewer than 2^31 pixels, got %lld", kOp,
              static_cast<long long>(plane));
  PoolGradPlan plan;
  plan.words = FastDiv(words), plan.width = FastDiv(p.x.size[3]), plan.height = FastDiv(p.x.size[2]);
  for (int d = 0; d < 2; ++d) {
    plan.stride[d] = FastDiv(p.stride[d]), plan.dilation[d] = FastDiv(p.dilation[d]);
    plan.block[d] = FastDiv(p.active.grid.size[d]);
    plan.own[d] = FastDiv(params.dx_map ? params.dx_grid.size[d] : 1);
  }
  plan.items = p.x.size[0] * words * plane;
  plan.wide = plan.items >= INT32_MAX;
  plan.channels_inner = params.dx.stride[1] <= params.dx.stride[3];
  const int64_t ctas =
      std::min<int64_t>((plan.items + kPixelThreads - 1) / kPixelThreads, int64_t{device.sm_count} * 8);
  if (!ctas) return ok_status();
  SBNET_CUDA_TRY(kOp, launch_dependent(device, pool_grad_kernel<T, kN>, dim3(static_cast<unsigned>(ctas)),
                                       dim3(kPixelThreads), 0, stream, params, plan));
  return ok_status();
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pool2d_grad_cuda(const sbnet::PoolGradParams* params, void* stream) {
  using namespace sbnet;
  const PoolGradParams& p = *params;
  SBNET_TRY(validate(p));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_dtype(p.pool.x.dtype, [&](auto t) {
    using T = decltype(t);
    const bool words = channels_vectorize(p.pool.x) && channels_vectorize(p.pool.y) && channels_vectorize(p.dx) &&
                       p.pool.x.size[1] % kLanes<T> == 0;
    return words ? launch<T, kLanes<T>>(p, device, static_cast<cudaStream_t>(stream))
                 : launch<T, 1>(p, device, static_cast<cudaStream_t>(stream));
  });
}

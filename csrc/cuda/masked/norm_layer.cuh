// LayerNorm over the channels of each pixel, channels_last, in words of 16 bytes: some lanes of a warp hold a pixel's
// words in registers, sum them, sum the squares about their mean, and write. Bound by memory: a pixel is read once.
#pragma once
#include "core/masked/norm.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {

constexpr int kLayerThreads = 256, kMostHeld = 8;  // words of a pixel that a lane holds
constexpr int kMostLayerChannels = 2048;           // whose weight and bias lie in shared memory

struct LayerPlan {
  FastDiv pixels, width;  // of a block
  int log2_lanes;         // of a warp, that share a pixel
  int held;               // words that a lane holds
  int words;              // of a pixel
  FringePlan fringe;
  bool settled;  // the list and the numbers of channels may be read before the launch ahead has ended
};

template <class T, int kHeld>
__global__ void __launch_bounds__(kLayerThreads)
    layer_kernel(const __grid_constant__ NormParams p, const __grid_constant__ LayerPlan plan) {
  constexpr int kN = kLanes<T>;
  extern __shared__ __align__(16) float smem[];  // [C] weights, [C] biases
  float* const numbers = smem;
  const int C = static_cast<int>(p.x.size[1]), lanes = 1 << plan.log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int thread = static_cast<int>(blockIdx.x) * kLayerThreads + static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(gridDim.x) * kLayerThreads;
  const BlockGrid& grid = p.active.grid;
  struct Found {
    int n, row, column;
    bool inside;
  };
  const auto find = [&](int pixel) -> Found {
    uint32_t slot, row, column;
    plan.pixels.divmod(pixel, &slot, &row);
    plan.width.divmod(row, &row, &column);
    BlockIndex b = {0, 0, 0};
    const bool block =
        slot < p.active.capacity && load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), grid, &b);
    row += b.i * grid.size[0], column += b.j * grid.size[1];
    return {b.n, static_cast<int>(row), static_cast<int>(column), block && row < p.y.size[2] && column < p.y.size[3]};
  };
  // What does not depend on the launch ahead is asked for together, and early where it may be.
  if (!plan.settled) grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int own = (threadIdx.x & 31) >> plan.log2_lanes;  // of a warp's pixels
  int first = (thread & ~31) >> plan.log2_lanes;
  Found at = find(first + own);
  for (int c = threadIdx.x; c < C; c += kLayerThreads) {
    const auto number = [&](const void* data, float otherwise) {
      if (!data) return otherwise;
      return p.param_dtype == DType::kF32 ? static_cast<const float*>(data)[c]
                                          : to_float(static_cast<const T*>(data)[c]);
    };
    numbers[c] = number(p.weight, 1.f), numbers[C + c] = number(p.bias, 0.f);
  }
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();
  __syncthreads();

  const int pixels = count * static_cast<int>(plan.pixels.divisor), step = threads >> plan.log2_lanes;
  const float share = 1.f / static_cast<float>(C);
  // All lanes of a warp go round together: they exchange sums.
  for (; first < pixels; first += step, at = find(first + own)) {
    const bool inside = at.inside && first + own < pixels;
    const T* x =
        static_cast<const T*>(p.x.data) + at.n * p.x.stride[0] + at.row * p.x.stride[2] + at.column * p.x.stride[3];
    Word<T, kN> held[kHeld] = {};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = lane + (i << plan.log2_lanes);
      if (inside && word < plan.words) held[i] = *reinterpret_cast<const Word<T, kN>*>(x + word * kN);
    }
    // Of distances from the pixel's first number: where numbers lie far from zero, their sum would round more.
    const float about = __shfl_sync(0xffffffffu, to_float(held[0].channel[0]), threadIdx.x & 31 & -lanes);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!inside || lane + (i << plan.log2_lanes) >= plan.words) continue;
#pragma unroll
      for (int e = 0; e < kN; ++e) sum += to_float(held[i].channel[e]) - about;
    }
    for (int away = lanes / 2; away; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
    const float mean = fmaf(sum, share, about);
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!inside || lane + (i << plan.log2_lanes) >= plan.words) continue;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float apart = to_float(held[i].channel[e]) - mean;
        square = fmaf(apart, apart, square);
      }
    }
    for (int away = lanes / 2; away; away /= 2) square += __shfl_xor_sync(0xffffffffu, square, away);
    const float scale = rsqrtf(fmaf(square, share, p.eps));
    T* y = static_cast<T*>(p.y.data) + at.n * p.y.stride[0] + at.row * p.y.stride[2] + at.column * p.y.stride[3];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int word = lane + (i << plan.log2_lanes);
      if (!inside || word >= plan.words) continue;
      Word<T, kN> out;
#pragma unroll
      for (int e = 0; e < kN; e += 4) {
        const float4 w = *reinterpret_cast<const float4*>(numbers + word * kN + e);
        const float4 shift = *reinterpret_cast<const float4*>(numbers + C + word * kN + e);
        const auto v = [&](int at) { return (to_float(held[i].channel[e + at]) - mean) * scale; };
        out.channel[e] = from_float<T>(fmaf(v(0), w.x, shift.x));
        out.channel[e + 1] = from_float<T>(fmaf(v(1), w.y, shift.y));
        out.channel[e + 2] = from_float<T>(fmaf(v(2), w.z, shift.z));
        out.channel[e + 3] = from_float<T>(fmaf(v(3), w.w, shift.w));
      }
      *reinterpret_cast<Word<T, kN>*>(y + word * kN) = out;
    }
  }
  clear_fringe<T>(p, plan.fringe, thread, threads);
}

// How lanes share a pixel of so many words: as few of them idle as can be, then as many lanes as can be.
inline void share_words(int words, LayerPlan* plan) {
  plan->held = 0;
  for (int log2 = 5, least = 1 << 30; log2 >= 0; --log2) {
    const int held = (words + (1 << log2) - 1) >> log2;
    if (held <= kMostHeld && held << log2 < least) least = held << log2, plan->log2_lanes = log2, plan->held = held;
  }
}

// Does layer_kernel serve p, a LayerNorm?
template <class T>
bool plan_layer(const NormParams& p, LayerPlan* plan) {
  if (!words_of_channels<T>(p) || p.y.size[1] > kMostLayerChannels) return false;
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
  const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.y.size[3]);
  plan->words = static_cast<int>(p.y.size[1] / kLanes<T>);
  share_words(plan->words, plan);
  const double pixels = static_cast<double>(height) * width;
  if (!plan->held || pixels * p.active.capacity * 32 > INT32_MAX / 2) return false;
  plan->pixels = FastDiv(height * width);
  plan->width = FastDiv(width);
  plan->fringe = FringePlan(p);
  plan->settled = inputs_settled();
  return true;
}

template <class T, int kHeld>
Status launch_held(const char* op, const NormParams& p, const LayerPlan& plan, const DeviceInfo& device,
                   cudaStream_t stream) {
  constexpr auto kernel = layer_kernel<T, kHeld>;
  constexpr int kCtas = 4;  // on a multiprocessor
  const int64_t most = (p.active.capacity * plan.pixels.divisor) << plan.log2_lanes;
  const int64_t wanted = (std::max(most, plan.fringe.threads(p)) + kLayerThreads - 1) / kLayerThreads;
  const dim3 ctas(static_cast<unsigned>(std::min<int64_t>(wanted, int64_t{device.sm_count} * kCtas)));
  const size_t shared = static_cast<size_t>(p.y.size[1]) * 2 * sizeof(float);
  SBNET_CUDA_TRY(op, launch_dependent(device, kernel, ctas, dim3(kLayerThreads), shared, stream, p, plan));
  return ok_status();
}
template <class T>
Status launch_layer(const char* op, const NormParams& p, const LayerPlan& plan, const DeviceInfo& device,
                    cudaStream_t stream) {
  switch (plan.held) {
    case 1:
      return launch_held<T, 1>(op, p, plan, device, stream);
    case 2:
      return launch_held<T, 2>(op, p, plan, device, stream);
    case 3:
      return launch_held<T, 3>(op, p, plan, device, stream);
    case 4:
      return launch_held<T, 4>(op, p, plan, device, stream);
    case 5:
    case 6:
      return launch_held<T, 6>(op, p, plan, device, stream);
    default:
      return launch_held<T, 8>(op, p, plan, device, stream);
  }
}

}  // namespace sbnet

// sparse_layer_norm2d_backward on CUDA: a warp takes a pixel, its lanes words of the channels, which stay in registers;
// each lane sums its channels over all pixels of its warp, a CTA over its warps, one more launch over the CTAs.
#include "core/masked/layer_norm_grad.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_layer_norm2d_backward";
constexpr int kThreads = 256, kWarps = kThreads / 32;

struct LayerNormPlan {
  FastDiv width, height, block_width, block_height;
  int64_t pixels;
};

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int away = 16; away; away /= 2) v += __shfl_xor_sync(0xffffffffu, v, away);
  return v;
}

// kWords: words of kN channels of a lane, at most.
template <class T, int kN, int kWords>
__global__ void __launch_bounds__(kThreads)
    layer_norm_grad_kernel(const __grid_constant__ LayerNormGradParams p, const __grid_constant__ LayerNormPlan plan,
                           float* sums) {
  extern __shared__ float found[];  // [kWarps][C]
  grid_dependency_wait();
  grid_dependency_release();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int C = static_cast<int>(p.x.size[1]), words = C / kN;
  const BlockGrid& grid = p.active.grid;
  float weight[kWords][kN], of_weight[kWords][kN] = {}, of_bias[kWords][kN] = {};
#pragma unroll
  for (int k = 0; k < kWords; ++k)
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const int c = (k * 32 + lane) * kN + e;
      weight[k][e] = c >= C || !p.weight            ? 1.f
                     : p.param_dtype == DType::kF32 ? static_cast<const float*>(p.weight)[c]
                                                    : to_float(static_cast<const T*>(p.weight)[c]);
    }
  const float share = 1.f / static_cast<float>(C);
  for (int64_t at = int64_t{blockIdx.x} * kWarps + warp; at < plan.pixels; at += int64_t{gridDim.x} * kWarps) {
    uint32_t rest, row, column, n;
    plan.width.divmod(static_cast<uint32_t>(at), &rest, &column);
    plan.height.divmod(rest, &n, &row);
    const bool active =
        p.active.block_map[(int64_t{n} * grid.count[0] + plan.block_height.quotient(row)) * grid.count[1] +
                           plan.block_width.quotient(column)] >= 0;
    const auto place = [&](const TensorView& t) {
      return static_cast<T*>(t.data) + n * t.stride[0] + row * t.stride[2] + column * t.stride[3];
    };
    T* const to = place(p.y);
    if (!active) {
      for (int k = lane; k < words; k += 32) {
        Word<T, kN> zero;
#pragma unroll
        for (int e = 0; e < kN; ++e) zero.channel[e] = from_float<T>(0.f);
        *reinterpret_cast<Word<T, kN>*>(to + int64_t{k} * kN * p.y.stride[1]) = zero;
      }
      continue;
    }
    const T *const from = place(p.x), *const grad = place(p.grad);
    float x[kWords][kN], g[kWords][kN], sum = 0.f, square = 0.f, of_g = 0.f, of_both = 0.f;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const int word = k * 32 + lane;
      const bool in = word < words;
      Word<T, kN> a, b;
      if (in) {
        a = *reinterpret_cast<const Word<T, kN>*>(from + int64_t{word} * kN * p.x.stride[1]);
        b = *reinterpret_cast<const Word<T, kN>*>(grad + int64_t{word} * kN * p.grad.stride[1]);
      }
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        x[k][e] = in ? to_float(a.channel[e]) : 0.f;
        g[k][e] = in ? to_float(b.channel[e]) : 0.f;
        sum += x[k][e];
      }
    }
    const float mean = sum_of_warp(sum) * share;
#pragma unroll
    for (int k = 0; k < kWords; ++k)
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        x[k][e] = k * 32 + lane < words ? x[k][e] - mean : 0.f;
        square += x[k][e] * x[k][e];
      }
    const float scale = 1.f / sqrtf(sum_of_warp(square) * share + p.eps);
#pragma unroll
    for (int k = 0; k < kWords; ++k)
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        x[k][e] *= scale;
        of_bias[k][e] += g[k][e];
        of_weight[k][e] += g[k][e] * x[k][e];
        g[k][e] *= weight[k][e];
        of_g += g[k][e];
        of_both += g[k][e] * x[k][e];
      }
    of_g = sum_of_warp(of_g) * share, of_both = sum_of_warp(of_both) * share;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const int word = k * 32 + lane;
      if (word >= words) continue;
      Word<T, kN> out;
#pragma unroll
      for (int e = 0; e < kN; ++e) out.channel[e] = from_float<T>((g[k][e] - of_g - x[k][e] * of_both) * scale);
      *reinterpret_cast<Word<T, kN>*>(to + int64_t{word} * kN * p.y.stride[1]) = out;
    }
  }
  for (int what = 0; what < 2; ++what) {
#pragma unroll
    for (int k = 0; k < kWords; ++k)
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const int c = (k * 32 + lane) * kN + e;
        if (c < C) found[warp * C + c] = what ? of_bias[k][e] : of_weight[k][e];
      }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += kThreads) {
      float sum = 0.f;
      for (int w = 0; w < kWarps; ++w) sum += found[w * C + c];
      sums[(2 * int64_t{blockIdx.x} + what) * C + c] = sum;
    }
    __syncthreads();
  }
}

constexpr int kAddElements = 32, kAddLanes = 8;

__global__ void __launch_bounds__(kAddElements* kAddLanes)
    add_kernel(const float* sums, int parts, int numbers, float* to) {
  __shared__ float found[kAddLanes][kAddElements];
  grid_dependency_wait();
  grid_dependency_release();
  const int e = threadIdx.x % kAddElements, lane = threadIdx.x / kAddElements;
  const int k = static_cast<int>(blockIdx.x) * kAddElements + e;
  float sum = 0.f;
  if (k < numbers)
#pragma unroll 8
    for (int part = lane; part < parts; part += kAddLanes) sum += sums[int64_t{part} * numbers + k];
  found[lane][e] = sum;
  __syncthreads();
  if (lane || k >= numbers) return;
  for (int l = 1; l < kAddLanes; ++l) sum += found[l][e];
  to[k] = sum;
}

template <class T, int kN, int kWords>
Status launch(const LayerNormGradParams& p, float* sums, const DeviceInfo& device, cudaStream_t stream) {
  LayerNormPlan plan;
  plan.width = FastDiv(p.x.size[3]), plan.height = FastDiv(p.x.size[2]);
  plan.block_width = FastDiv(p.active.grid.size[1]), plan.block_height = FastDiv(p.active.grid.size[0]);
  plan.pixels = p.x.size[0] * p.x.size[2] * p.x.size[3];
  SBNET_CHECK(plan.pixels < INT32_MAX, "%s: x: expected fewer than 2^31 pixels, got %lld", kOp,
              static_cast<long long>(plan.pixels));
  const int C = static_cast<int>(p.x.size[1]);
  const int64_t wanted = (plan.pixels + kWarps - 1) / kWarps;
  const int parts =
      static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(wanted, 3 * device.sm_count), 1, kMostLayerNormParts));
  SBNET_TRY((allow_shared<layer_norm_grad_kernel<T, kN, kWords>>(kOp, device, kWarps * kMostNormChannels * 4)));
  SBNET_CUDA_TRY(kOp,
                 launch_dependent(device, layer_norm_grad_kernel<T, kN, kWords>, dim3(static_cast<unsigned>(parts)),
                                  dim3(kThreads), kWarps * C * sizeof(float), stream, p, plan, sums));
  const float* const read = sums;
  SBNET_CUDA_TRY(
      kOp, launch_dependent(device, add_kernel, dim3(static_cast<unsigned>((2 * C + kAddElements - 1) / kAddElements)),
                            dim3(kAddElements * kAddLanes), 0, stream, read, parts, 2 * C, p.grad_params));
  return ok_status();
}

template <class T>
Status launch_type(const LayerNormGradParams& p, float* sums, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t C = p.x.size[1];
  constexpr int kN = kLanes<T>;
  const bool words = channels_vectorize(p.x) && channels_vectorize(p.grad) && channels_vectorize(p.y) && C % kN == 0;
  if (words && C <= 32 * kN) return launch<T, kN, 1>(p, sums, device, stream);
  if (words && C <= 4 * 32 * kN) return launch<T, kN, 4>(p, sums, device, stream);
  if (C <= 8 * 32) return launch<T, 1, 8>(p, sums, device, stream);
  if (C <= 24 * 32) return launch<T, 1, 24>(p, sums, device, stream);
  return launch<T, 1, 64>(p, sums, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_layer_norm2d_backward_cuda(const sbnet::LayerNormGradParams* params, void* workspace,
                                                      void* stream_handle) {
  using namespace sbnet;
  const LayerNormGradParams& p = *params;
  SBNET_TRY(validate(p));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (!p.x.size[0]) {
    SBNET_CUDA_TRY(kOp,
                   cudaMemsetAsync(p.grad_params, 0, static_cast<size_t>(p.x.size[1]) * 2 * sizeof(float), stream));
    return ok_status();
  }
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_dtype(p.x.dtype,
                  [&](auto t) { return launch_type<decltype(t)>(p, static_cast<float*>(workspace), device, stream); });
}

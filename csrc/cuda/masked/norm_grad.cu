// sparse_norm2d_backward on CUDA. Of pixels: a warp takes a pixel, its lanes words of the channels, which stay in
// registers; each lane sums its channels over all pixels of its warp, a CTA over its warps, one more launch over the
// CTAs. Of images: norm_grad_image.cuh.
#include "core/masked/norm_grad.h"
#include "cuda/masked/norm_grad_image.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_norm2d_backward";
constexpr int kThreads = 256, kWarps = kThreads / 32;

struct LayerNormPlan {
  FastDiv pixels, width;  // of a block
  FringePlan fringe;
};

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int away = 16; away; away /= 2) v += __shfl_xor_sync(0xffffffffu, v, away);
  return v;
}

// kWords: words of kN channels of a lane, at most.
template <class T, int kN, int kWords>
__global__ void __launch_bounds__(kThreads)
    layer_norm_grad_kernel(const __grid_constant__ NormGradParams p, const __grid_constant__ LayerNormPlan plan,
                           float* sums) {
  extern __shared__ __align__(16) float smem[];  // [kWarps][C]
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
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const int pixels = count * static_cast<int>(plan.pixels.divisor);
  for (int at = static_cast<int>(blockIdx.x) * kWarps + warp; at < pixels; at += static_cast<int>(gridDim.x) * kWarps) {
    uint32_t slot, rest, row, column;
    plan.pixels.divmod(at, &slot, &rest);
    plan.width.divmod(rest, &row, &column);
    BlockIndex b;
    if (!load_block(p.active.indices, slot, static_cast<int>(p.x.size[0]), grid, &b)) continue;
    row += b.i * grid.size[0], column += b.j * grid.size[1];
    if (row >= p.x.size[2] || column >= p.x.size[3]) continue;
    const auto place = [&](const TensorView& t) {
      return static_cast<T*>(t.data) + b.n * t.stride[0] + row * t.stride[2] + column * t.stride[3];
    };
    T* const to = place(p.y);
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
  clear_fringe<T>(p, plan.fringe, int64_t{blockIdx.x} * kThreads + threadIdx.x, int64_t{gridDim.x} * kThreads);
  for (int what = 0; what < 2; ++what) {
#pragma unroll
    for (int k = 0; k < kWords; ++k)
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const int c = (k * 32 + lane) * kN + e;
        if (c < C) smem[warp * C + c] = what ? of_bias[k][e] : of_weight[k][e];
      }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += kThreads) {
      float sum = 0.f;
      for (int w = 0; w < kWarps; ++w) sum += smem[w * C + c];
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
Status launch(const NormGradParams& p, float* sums, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.x.size[2]);
  const int64_t width = std::min<int64_t>(p.active.grid.size[1], p.x.size[3]);
  const int64_t pixels = height * width * p.active.capacity;
  SBNET_CHECK(pixels < INT32_MAX / 2, "%s: active: expected fewer than 2^30 pixels of all blocks, got %lld", kOp,
              static_cast<long long>(pixels));
  const LayerNormPlan plan = {FastDiv(height * width), FastDiv(width), FringePlan(p)};
  const int C = static_cast<int>(p.x.size[1]);
  const int64_t wanted = (std::max(pixels * 32, plan.fringe.threads(p)) + kThreads - 1) / kThreads;
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
Status launch_type(const NormGradParams& p, float* sums, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t C = p.x.size[1];
  constexpr int kN = kLanes<T>;
  const bool words = channels_vectorize(p.x) && channels_vectorize(p.grad) && channels_vectorize(p.y) && C % kN == 0;
  if (of_images(p.kind))
    return words ? launch_image_grad<T, kN>(kOp, p, sums, device, stream)
                 : launch_image_grad<T, 1>(kOp, p, sums, device, stream);
  if (words && C <= 32 * kN) return launch<T, kN, 1>(p, sums, device, stream);
  if (words && C <= 4 * 32 * kN) return launch<T, kN, 4>(p, sums, device, stream);
  if (C <= 8 * 32) return launch<T, 1, 8>(p, sums, device, stream);
  if (C <= 24 * 32) return launch<T, 1, 24>(p, sums, device, stream);
  return launch<T, 1, 64>(p, sums, device, stream);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_norm2d_backward_cuda(const sbnet::NormGradParams* params, void* workspace,
                                                void* stream_handle) {
  using namespace sbnet;
  const NormGradParams& p = *params;
  SBNET_TRY(validate(p));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (writes_nothing(p)) {
    SBNET_CUDA_TRY(kOp,
                   cudaMemsetAsync(p.grad_params, 0, static_cast<size_t>(p.x.size[1]) * 2 * sizeof(float), stream));
    return ok_status();
  }
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  return by_dtype(p.x.dtype,
                  [&](auto t) { return launch_type<decltype(t)>(p, static_cast<float*>(workspace), device, stream); });
}

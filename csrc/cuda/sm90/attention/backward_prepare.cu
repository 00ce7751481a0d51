// Before and after the backward kernels: what the softmax of each query needs, and dQ from its sums.
#include "cuda/sm90/attention/backward_launch.cuh"

namespace sbnet::sm90::attention {
namespace {

constexpr int kThreads = 256;

struct PrepareArgs {
  AttentionTensor out, grad_out;
  const float *lse, *grad_lse;
  const int32_t* q_lengths;
  float *lse2, *delta, *sums;
  int32_t heads, phases, q_length, padded, planes;
};

// delta = rowsum(dO o O) - dlse; the logarithm of the sum to base 2, +inf where a query has no keys, which makes its
// weights 0; zeros for the sums of dQ. kDim / 8 lanes a query.
template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) attention_prepare_kernel(const PrepareArgs a) {
  grid_dependency_release();
  grid_dependency_wait();
  constexpr int kLanes = kDim / 8;
  const int64_t r = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes, plane = static_cast<int>(r / a.padded), i = static_cast<int>(r % a.padded);
  if (plane >= a.planes) return;
  const int bh = plane / a.phases, j = plane - bh * a.phases, b = bh / a.heads, h = bh - b * a.heads;
  const bool there = i < phase_length(a.q_lengths, b, a.q_length, a.phases, j);
  const int64_t t = int64_t{i} * a.phases + j;
  float sum = 0.f;
  if (there) {
    const auto words = [&](const AttentionTensor& of) {
      return *reinterpret_cast<const Pack<uint32_t, 4>*>(static_cast<const T*>(of.data) + b * of.batch_stride +
                                                         h * of.head_stride + t * of.stride + lane * 8);
    };
    const Pack<uint32_t, 4> out = words(a.out), grad = words(a.grad_out);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 x = unpack<T>(out.v[w]), y = unpack<T>(grad.v[w]);
      sum += x.x * y.x + x.y * y.y;
    }
  }
#pragma unroll
  for (int step = kLanes / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
  if (a.sums) {
    float4* zeros = reinterpret_cast<float4*>(a.sums + r * kDim + lane * 8);
    zeros[0] = zeros[1] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (lane > 0) return;
  const int64_t at = static_cast<int64_t>(bh) * a.q_length + t;
  const float lse = there ? a.lse[at] : -INFINITY;
  a.delta[r] = there ? sum - (a.grad_lse ? a.grad_lse[at] : 0.f) : 0.f;
  a.lse2[r] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;
}

struct FinishArgs {
  const float* sums;
  AttentionTensor grad_q;
  int32_t heads, phases, q_length, padded;
  float scale;
};

// A CTA of 128 threads: 64 queries x 64 of D, out of WGMMA's order.
template <class T, int kDim>
__global__ void __launch_bounds__(128) attention_finish_kernel(const FinishArgs a) {
  constexpr int kChunks = kDim / 64, kRow = 144;  // bytes of a row in shared memory
  extern __shared__ __align__(1024) uint8_t shared[];
  grid_dependency_wait();
  const int tiles = a.padded >> 6, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int chunk = blockIdx.x % kChunks, tile = blockIdx.x / kChunks % tiles;
  const int plane = static_cast<int>(blockIdx.x / kChunks / tiles), r = warp * 16 + (lane >> 2);
  const float4* from = reinterpret_cast<const float4*>(a.sums + int64_t{blockIdx.x} * 4096 + warp * 1024);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 v = from[i * 32 + lane];
    const int at = r * kRow + i * 16 + (lane & 3) * 4;
    *reinterpret_cast<uint32_t*>(shared + at) = pack<T>(v.x * a.scale, v.y * a.scale);
    *reinterpret_cast<uint32_t*>(shared + at + 8 * kRow) = pack<T>(v.z * a.scale, v.w * a.scale);
  }
  __syncthreads();
  const int bh = plane / a.phases, j = plane - bh * a.phases, b = bh / a.heads, h = bh - b * a.heads;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int word = i * 128 + threadIdx.x, row = word >> 3;
    const int64_t t = int64_t{tile * 64 + row} * a.phases + j;
    if (t < a.q_length)
      store_words(static_cast<T*>(a.grad_q.data) + b * a.grad_q.batch_stride + h * a.grad_q.head_stride +
                      t * a.grad_q.stride + chunk * 64 + (word & 7) * 8,
                  *reinterpret_cast<const uint4*>(shared + row * kRow + (word & 7) * 16));
  }
}

template <class F>
Status dispatch(const AttentionParams& p, F&& f) {
  const auto dims = [&](auto type) {
    return p.head_dim == 64 ? f(type, std::integral_constant<int, 64>()) : f(type, std::integral_constant<int, 128>());
  };
  return p.dtype == DType::kBF16 ? dims(__nv_bfloat16()) : dims(__half());
}

}  // namespace

Status prepare_backward(const AttentionBackwardParams& p, const BackwardSpace& space, const DeviceInfo& device,
                        cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const PrepareArgs args = {f.out,      p.grad_out,   f.lse,       p.grad_lse, f.q_lengths,
                            space.lse2, space.delta,  space.sums,  f.heads,    f.layout.rule.phases,
                            f.q_length, space.padded, space.planes};
  return dispatch(f, [&](auto type, auto dim) {
    const int64_t threads = int64_t{space.planes} * space.padded * (dim.value / 8);
    SBNET_CUDA_TRY(kBackwardOp,
                   launch_dependent(device, attention_prepare_kernel<decltype(type), decltype(dim)::value>,
                                    dim3((threads + kThreads - 1) / kThreads), dim3(kThreads), 0, stream, args));
    return ok_status();
  });
}

Status finish_backward(const AttentionBackwardParams& p, const BackwardSpace& space, const DeviceInfo& device,
                       cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  const FinishArgs args = {space.sums, p.grad_q, f.heads, f.layout.rule.phases, f.q_length, space.padded, f.scale};
  return dispatch(f, [&](auto type, auto dim) {
    const int64_t ctas = int64_t{space.planes} * (space.padded / 64) * (dim.value / 64);
    SBNET_CUDA_TRY(kBackwardOp, launch_dependent(device, attention_finish_kernel<decltype(type), decltype(dim)::value>,
                                                 dim3(ctas), dim3(128), 64 * 144, stream, args));
    return ok_status();
  });
}

}  // namespace sbnet::sm90::attention

// The CUDA entries of block-sparse attention: which kernels serve which problem.
#include <algorithm>

#include "cuda/attention/portable.cuh"
#include "cuda/capability.h"
#ifdef SBNET_SM90
#include "cuda/sm90/attention/attention.h"
#include "cuda/sm90/attention/listed.h"
#endif

namespace sbnet::portable {
namespace {

[[maybe_unused]] bool hopper(const DeviceInfo& device) { return select_capability(device) == 90; }

// Served by forward_mma.cu and backward_mma.cu.
bool narrow_halves(const AttentionParams& p) { return p.dtype != DType::kF32 && p.head_dim <= 128; }

constexpr int kThreads = 128;

// In the order of the products: a float32 query's only key gets a gradient of exactly 0.
template <class T>
__global__ void __launch_bounds__(kThreads) attention_delta_kernel(const AttentionBackwardParams b, float* deltas) {
  constexpr int kVec = 16 / sizeof(T), kChunk = 32;
  grid_dependency_wait();
  const AttentionParams& p = b.forward;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= p.batch * p.heads * p.q_length) return;
  const int64_t q = i % p.q_length, h = i / p.q_length % p.heads, n = i / p.q_length / p.heads;
  const auto at = [&](const AttentionTensor& t) {
    return static_cast<const T*>(t.data) + n * t.batch_stride + h * t.head_stride + q * t.stride;
  };
  const T *grad = at(b.grad_out), *out = at(p.out);
  float sum = 0.f, part = 0.f;
  for (int d = 0; d < p.head_dim; d += kVec) {
    const auto left = *reinterpret_cast<const Pack<T, kVec>*>(grad + d);
    const auto right = *reinterpret_cast<const Pack<T, kVec>*>(out + d);
    if (d % kChunk == 0) sum += part, part = 0.f;
#pragma unroll
    for (int e = 0; e < kVec; ++e) part = fmaf(to_float(left.v[e]), to_float(right.v[e]), part);
  }
  deltas[i] = sum + part - (b.grad_lse ? b.grad_lse[i] : 0.f);
}

template <class T>
Status launch_delta(const AttentionBackwardParams& b, float* deltas, const DeviceInfo& device, cudaStream_t stream) {
  const AttentionParams& p = b.forward;
  const int64_t ctas = (p.batch * p.heads * p.q_length + kThreads - 1) / kThreads;
  SBNET_CHECK(ctas <= INT32_MAX, "%s: q: expected fewer than 2^38 queries", kAttentionBackwardOp);
  if (!ctas) return ok_status();
  SBNET_CUDA_TRY(kAttentionBackwardOp,
                 launch_dependent(device, attention_delta_kernel<T>, dim3(static_cast<unsigned>(ctas)), dim3(kThreads),
                                  0, stream, b, deltas));
  return ok_status();
}

}  // namespace
}  // namespace sbnet::portable

extern "C" {

int64_t sbnet_block_attention_workspace_bytes_cuda([[maybe_unused]] const sbnet::AttentionParams* p) {
#ifdef SBNET_SM90
  sbnet::DeviceInfo device;
  if (sbnet::validate(*p).ok() && sbnet::current_device(sbnet::portable::kAttentionOp, &device).ok() &&
      sbnet::portable::hopper(device) && sbnet::sm90::block_attention_takes(*p))
    return sbnet::sm90::block_attention_workspace_bytes(*p);
#endif
  return 0;
}

sbnet::Status sbnet_block_attention_cuda(const sbnet::AttentionParams* p, [[maybe_unused]] void* workspace,
                                         void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  if (!p->batch || !p->q_length) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(portable::kAttentionOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
#ifdef SBNET_SM90
  if (portable::hopper(device) && sm90::listed_attention_takes(*p)) return sm90::listed_attention(*p, device, stream);
  if (portable::hopper(device) && sm90::block_attention_takes(*p))
    return sm90::block_attention(*p, workspace, device, stream);
#endif
  if (p->dtype == DType::kF32) return portable::launch_attention_simt(*p, device, stream);
  return portable::narrow_halves(*p) ? portable::launch_attention_mma(*p, device, stream)
                                     : portable::launch_attention_wide(*p, device, stream);
}

int64_t sbnet_block_attention_backward_workspace_bytes_cuda(const sbnet::AttentionBackwardParams* p) {
  using namespace sbnet;
  if (!validate(*p).ok()) return 0;
#ifdef SBNET_SM90
  DeviceInfo device;
  if (current_device(portable::kAttentionBackwardOp, &device).ok() && portable::hopper(device) &&
      sm90::block_attention_backward_takes(*p))
    return sm90::block_attention_backward_workspace_bytes(*p);
#endif
  const AttentionParams& f = p->forward;
  return portable::narrow_halves(f) ? portable::attention_backward_mma_bytes(f) : f.batch * f.heads * f.q_length * 4;
}

sbnet::Status sbnet_block_attention_backward_cuda(const sbnet::AttentionBackwardParams* p, void* workspace,
                                                  void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  if (!p->forward.batch) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(portable::kAttentionBackwardOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
#ifdef SBNET_SM90
  if (portable::hopper(device) && sm90::block_attention_backward_takes(*p))
    return sm90::block_attention_backward(*p, workspace, device, stream);
#endif
  if (portable::narrow_halves(p->forward))
    return portable::launch_attention_backward_mma(*p, workspace, device, stream);
  float* deltas = static_cast<float*>(workspace);
  const portable::AttentionBackwardArgs args = {*p, deltas};
  SBNET_TRY(by_dtype(p->forward.dtype,
                     [&](auto t) { return portable::launch_delta<decltype(t)>(*p, deltas, device, stream); }));
  return p->forward.dtype == DType::kF32 ? portable::launch_attention_backward_simt(args, device, stream)
                                         : portable::launch_attention_backward_wide(args, device, stream);
}
}

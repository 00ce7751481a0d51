// The CUDA entries of products with block-sparse weights: gates, and which kernel serves which product.
#include <algorithm>

#include "cuda/capability.h"
#include "cuda/masked/conv_portable.cuh"
#include "cuda/weights/matmul_portable.cuh"
#ifdef SBNET_SM90
#include "cuda/sm90/matmul/matmul.h"
#include "cuda/weights/fours.cuh"
#endif

namespace sbnet {
namespace portable {
namespace {

constexpr int kThreads = 256;

int64_t lines(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Gated weights, the entries whose gates are not 0, and where those of each output block end.
struct GateBuffers {
  int64_t entries_at, end_at, bytes;

  explicit GateBuffers(const BlocksparseMatmulParams& p) : entries_at(0), end_at(0), bytes(0) {
    if (!p.gate) return;
    const BlockLayoutShape& s = p.layout.shape;
    entries_at = lines(s.blocks * s.block_size * s.block_size * dtype_size(p.x.dtype));
    end_at = entries_at + lines(s.blocks * 8);
    bytes = end_at + lines(p.out_blocks() * 4);
  }
};

// weight * gate in the weights' own dtype, as PyTorch rounds it; zeros for gate 0, whatever the
// block holds: Hopper kernels, whose plans know no gates, read them.
template <class T>
__global__ void __launch_bounds__(kThreads)
    apply_gates_kernel(const BlocksparseMatmulParams p, T* weight, int2* entries, int32_t* end) {
  grid_dependency_wait();
  const BlockLayoutShape& s = p.layout.shape;
  const int64_t block_elements = int64_t{s.block_size} * s.block_size;
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  for (int64_t out = thread; out < p.out_blocks(); out += threads) {
    const int64_t first = min(max(int64_t{p.start()[out]}, int64_t{0}), s.blocks);
    const int64_t last = min(max(int64_t{p.start()[out + 1]}, first), s.blocks);
    int64_t kept = first;
    for (int64_t i = first; i < last; ++i) {
      const int2 e = reinterpret_cast<const int2*>(p.entries())[i];
      if (e.y >= 0 && e.y < s.blocks && p.gate[e.y] != 0.f) entries[kept++] = e;
    }
    end[out] = static_cast<int32_t>(kept);
  }
  const T* from = static_cast<const T*>(p.weight);
  for (int64_t i = thread; i < s.blocks * block_elements; i += threads) {
    const float gate = p.gate[i / block_elements];
    weight[i] = from_float<T>(gate != 0.f ? to_float(from[i]) * gate : 0.f);
  }
}

Status apply_gates(MatmulArgs& a, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  a.start = a.p.start(), a.end = a.start + 1, a.entries = a.p.entries();
  if (!a.p.gate) return ok_status();
  const GateBuffers buffers(a.p);
  char* at = static_cast<char*>(workspace);
  int2* entries = reinterpret_cast<int2*>(at + buffers.entries_at);
  int32_t* end = reinterpret_cast<int32_t*>(at + buffers.end_at);
  const BlockLayoutShape& s = a.p.layout.shape;
  const int64_t work = std::max(s.blocks * s.block_size * s.block_size, a.p.out_blocks());
  const int64_t grid = std::min<int64_t>((work + kThreads - 1) / kThreads, device.sm_count * 8);
  SBNET_TRY(by_dtype(a.p.x.dtype, [&](auto t) {
    using T = decltype(t);
    SBNET_CUDA_TRY(kMatmulOp,
                   launch_dependent(device, apply_gates_kernel<T>, dim3(static_cast<unsigned>(grid)), dim3(kThreads), 0,
                                    stream, a.p, static_cast<T*>(workspace), entries, end));
    return ok_status();
  }));
  a.p.weight = workspace;
  a.entries = reinterpret_cast<const int32_t*>(entries);
  a.end = end;
  return ok_status();
}

}  // namespace
}  // namespace portable
}  // namespace sbnet

extern "C" {

int64_t sbnet_blocksparse_matmul_workspace_bytes_cuda(const sbnet::BlocksparseMatmulParams* p) {
  if (!sbnet::validate(*p).ok()) return 0;
  const int64_t gates = sbnet::portable::GateBuffers(*p).bytes;
#ifdef SBNET_SM90
  return std::max(gates, sbnet::sm90::fours_bytes(p->layout.shape, p->plan_words, p->x.dtype));
#else
  return gates;
#endif
}

sbnet::Status sbnet_blocksparse_matmul_cuda(const sbnet::BlocksparseMatmulParams* p, void* workspace,
                                            void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  if (!row_capacity(p->x, p->active)) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(portable::kMatmulOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  portable::MatmulArgs a = {*p, nullptr, nullptr, nullptr};
#ifdef SBNET_SM90
  // Weights beyond the input features may be anything, NaN as well.
  const bool hopper = select_capability(device) == 90 && p->in_features() % p->layout.shape.block_size == 0;
  // For few rows packing would cost more than it gains.
  const bool worth =
      reinterpret_cast<uintptr_t>(p->weight) % 16 == 0 && row_capacity(p->x, p->active) > portable::kFewRows;
  if (hopper && worth && sm90::fours_bytes(p->layout.shape, p->plan_words, p->x.dtype)) {
    BlocksparseMatmulParams fours = *p;
    fours.layout.shape = planned_shape(p->layout.shape);
    fours.weight = workspace;
    if (sm90::blocksparse_matmul_takes(fours)) {
      SBNET_TRY(sm90::pack_fours(*p, workspace, device, stream));
      return sm90::blocksparse_matmul(fours, device, nullptr, stream);
    }
  }
#endif
  SBNET_TRY(portable::apply_gates(a, workspace, device, stream));
  const bool vectors = portable::features_vectorize(p->x) && reinterpret_cast<uintptr_t>(a.p.weight) % 16 == 0;
  if (vectors && portable::suits_few(*p)) return portable::launch_matmul_few(a, device, stream);
#ifdef SBNET_SM90
  if (hopper && p->layout.shape.block_size > 8 && sm90::blocksparse_matmul_takes(a.p))
    return sm90::blocksparse_matmul(a.p, device, workspace, stream);
#endif
  if (vectors && portable::suits_wide(*p, device)) return portable::launch_matmul_wide(a, device, stream);
  if (vectors && portable::suits_mma(p->x.dtype, p->allow_tf32)) return portable::launch_matmul_mma(a, device, stream);
  return portable::launch_matmul_simt(a, device, stream);
}

int64_t sbnet_blocksparse_weight_grad_workspace_bytes_cuda(const sbnet::BlocksparseWeightGradParams* p) {
#ifdef SBNET_SM90
  if (sbnet::validate(*p).ok()) {
    const int64_t fours = sbnet::sm90::fours_bytes(p->layout.shape, p->plan_words, p->x[0].dtype);
    return p->dw_dtype == sbnet::DType::kF32 ? 2 * fours : fours;
  }
#endif
  (void)p;
  return 0;
}

sbnet::Status sbnet_blocksparse_weight_grad_cuda(const sbnet::BlocksparseWeightGradParams* p, void* workspace,
                                                 void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  if (!p->layout.shape.blocks) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(portable::kWeightGradOp, &device));
  const auto stream = static_cast<cudaStream_t>(stream_handle);
#ifdef SBNET_SM90
  if (select_capability(device) == 90) {
    BlocksparseWeightGradParams planned = *p;
    const bool fours = sm90::fours_bytes(p->layout.shape, p->plan_words, p->x[0].dtype) > 0;
    planned.layout.shape = planned_shape(p->layout.shape);
    if (fours) planned.dw = workspace;
    if (reinterpret_cast<uintptr_t>(p->dw) % 16 == 0 && sm90::blocksparse_weight_grad_takes(planned)) {
      SBNET_TRY(sm90::blocksparse_weight_grad(planned, device, nullptr, stream));
      return fours ? sm90::unpack_fours(*p, workspace, device, stream) : ok_status();
    }
  }
#else
  (void)workspace;
#endif
  bool vectors = portable::suits_mma(p->x[0].dtype, p->allow_tf32);
  for (int i = 0; i < p->pairs; ++i)
    vectors = vectors && portable::features_vectorize(p->x[i]) && portable::features_vectorize(p->dy[i]);
  return vectors ? portable::launch_weight_grad_mma(*p, device, stream)
                 : portable::launch_weight_grad_simt(*p, device, stream);
}
}

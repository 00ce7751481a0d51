// Bitmaps of active blocks from bytes, their rows and their columns, in one launch: a warp takes 32 x 32 blocks.
#include "core/attention/layout.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr const char* kPackOp = "pack_attention_blocks";
constexpr int kThreads = 256, kSide = 32;

__global__ void __launch_bounds__(kThreads) pack_attention_blocks_kernel(const PackAttentionBlocksParams p) {
  grid_dependency_wait();
  const int64_t q_words = (p.q_blocks + kSide - 1) / kSide, k_words = (p.k_blocks + kSide - 1) / kSide;
  const int64_t squares = p.planes * q_words * k_words, warps = int64_t{gridDim.x} * (kThreads / 32);
  const int lane = threadIdx.x % 32;
  for (int64_t i = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < squares; i += warps) {
    const int64_t k_word = i % k_words, q_word = i / k_words % q_words, plane = i / k_words / q_words;
    const int64_t q0 = q_word * kSide, k = k_word * kSide + lane;
    const uint8_t* from = p.blocks + (plane * p.q_blocks + q0) * p.k_blocks + k;
    uint32_t row = 0, column = 0;  // row q0 + lane, column k
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      const bool set = q0 + r < p.q_blocks && k < p.k_blocks && from[r * int64_t{p.k_blocks}] != 0;
      const uint32_t word = __ballot_sync(~0u, set);
      row = lane == r ? word : row;
      column |= static_cast<uint32_t>(set) << r;
    }
    if (q0 + lane < p.q_blocks) p.rows[(plane * p.q_blocks + q0 + lane) * k_words + k_word] = row;
    if (k < p.k_blocks) p.columns[(plane * p.k_blocks + k) * q_words + q_word] = column;
  }
}

}  // namespace
}  // namespace sbnet

extern "C" sbnet::Status sbnet_pack_attention_blocks_cuda(const sbnet::PackAttentionBlocksParams* p,
                                                          void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  const int64_t squares = size_product({p->planes, (int64_t{p->q_blocks} + 31) / 32, (int64_t{p->k_blocks} + 31) / 32});
  if (!squares) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kPackOp, &device));
  const int64_t ctas = (squares + kThreads / 32 - 1) / (kThreads / 32);
  const int64_t grid = ctas < device.sm_count * 8 ? ctas : device.sm_count * 8;
  SBNET_CUDA_TRY(kPackOp, launch_dependent(device, pack_attention_blocks_kernel, dim3(static_cast<unsigned>(grid)),
                                           dim3(kThreads), 0, static_cast<cudaStream_t>(stream_handle), *p));
  return ok_status();
}

// Bitmaps of active blocks from bytes, their rows and their columns, in one launch. A CTA takes 256 x 256 blocks: a
// warp 32 rows of them, a lane 8 columns. A row's 32 bytes of bits and a column's leave as whole sectors.
#include "core/attention/layout.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr const char* kPackOp = "pack_attention_blocks";
constexpr int kThreads = 256, kWarps = kThreads / 32, kSide = 32 * kWarps, kTogether = 8;

// 1 for each byte that is not 0.
__device__ __forceinline__ uint32_t ones_of(uint32_t bytes) {
  bytes |= bytes >> 4, bytes |= bytes >> 2, bytes |= bytes >> 1;
  return bytes & 0x01010101u;
}
// Bit b for byte b.
__device__ __forceinline__ uint32_t bits_of(const uint2& bytes) {
  constexpr uint32_t kGather = 0x01020408u;
  return (ones_of(bytes.x) * kGather >> 24 & 15) | (ones_of(bytes.y) * kGather >> 24 & 15) << 4;
}

template <bool kAligned>
__device__ __forceinline__ uint2 load_blocks(const uint8_t* from, int count) {
  uint2 bytes = {0, 0};
  if constexpr (kAligned) {
    if (count > 0) bytes = *reinterpret_cast<const uint2*>(from);  // all 8 are there
  } else {
    for (int i = 0; i < count; ++i) (i < 4 ? bytes.x : bytes.y) |= static_cast<uint32_t>(from[i] != 0) << i % 4 * 8;
  }
  return bytes;
}

// kAligned: rows of bytes start at multiples of 8.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) pack_attention_blocks_kernel(const PackAttentionBlocksParams p) {
  __shared__ uint32_t columns[kSide][kWarps + 1];
  grid_dependency_wait();
  const int64_t q_words = (p.q_blocks + 31) / 32, k_words = (p.k_blocks + 31) / 32;
  const int64_t q_tiles = (p.q_blocks + kSide - 1) / kSide, k_tiles = (p.k_blocks + kSide - 1) / kSide;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t tile = blockIdx.x; tile < p.planes * q_tiles * k_tiles; tile += gridDim.x) {
    const int64_t k0 = tile % k_tiles * kSide, q0 = tile / k_tiles % q_tiles * kSide, plane = tile / k_tiles / q_tiles;
    const int64_t k = k0 + lane * 8, q = q0 + warp * 32;
    const int rows = static_cast<int>(p.q_blocks - q < 32 ? p.q_blocks - q : 32);
    const int count = static_cast<int>(p.k_blocks - k < 8 ? p.k_blocks - k : 8);
    const uint8_t* from = p.blocks + (plane * p.q_blocks + q) * p.k_blocks + k;
    uint8_t* to = reinterpret_cast<uint8_t*>(p.rows + (plane * p.q_blocks + q) * k_words) + k / 8;
    uint32_t column[8] = {};
    for (int r0 = 0; r0 < rows; r0 += kTogether) {
      uint2 bytes[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        bytes[i] = load_blocks<kAligned>(from + int64_t{r0 + i} * p.k_blocks, r0 + i < rows ? count : 0);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint32_t bits = bits_of(bytes[i]);
        if (r0 + i < rows && k / 8 < k_words * 4) to[int64_t{r0 + i} * k_words * 4] = static_cast<uint8_t>(bits);
#pragma unroll
        for (int c = 0; c < 8; ++c) column[c] |= (bits >> c & 1) << (r0 + i);
      }
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) columns[lane * 8 + c][warp] = column[c];
    __syncthreads();
    for (int i = threadIdx.x; i < kSide * kWarps; i += kThreads) {
      const int c = i / kWarps, w = i % kWarps;
      if (k0 + c < p.k_blocks && q0 / 32 + w < q_words)
        p.columns[(plane * p.k_blocks + k0 + c) * q_words + q0 / 32 + w] = columns[c][w];
    }
    __syncthreads();  // before the next tile's
  }
}

}  // namespace
}  // namespace sbnet

extern "C" sbnet::Status sbnet_pack_attention_blocks_cuda(const sbnet::PackAttentionBlocksParams* p,
                                                          void* stream_handle) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  const int64_t tiles =
      size_product({p->planes, (int64_t{p->q_blocks} + kSide - 1) / kSide, (int64_t{p->k_blocks} + kSide - 1) / kSide});
  if (!tiles) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(kPackOp, &device));
  const int64_t grid = tiles < device.sm_count * 8 ? tiles : device.sm_count * 8;
  const bool aligned = p->k_blocks % 8 == 0 && reinterpret_cast<uintptr_t>(p->blocks) % 8 == 0;
  SBNET_CUDA_TRY(
      kPackOp, launch_dependent(
                   device, aligned ? pack_attention_blocks_kernel<true> : pack_attention_blocks_kernel<false>,
                   dim3(static_cast<unsigned>(grid)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream_handle), *p));
  return ok_status();
}

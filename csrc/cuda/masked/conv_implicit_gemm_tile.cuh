// The tile of an implicit GEMM: how four warps sum it over the reduction, whatever becomes of the sums then, and how
// its kernels are launched.
#pragma once
#include "cuda/masked/conv_implicit_gemm_load.cuh"

namespace sbnet::portable {
namespace {

// The warp's quadrant of the tile: 64 pixels by kTileN/2 channels.
template <class T, int kTileN>
struct WarpTile {
  static constexpr int kM = 4, kN = kTileN / 16;  // 16-pixel and 8-channel pieces
  struct Operands {
    uint32_t a[kM][4], b[kN / 2][4];
  };
  float sums[kM][kN][4];
  uint32_t a_row, b_row, a_word, b_word;  // this lane's ldmatrix row in bytes, and its word's distance from the first

  __device__ __forceinline__ WarpTile(int warp, int lane) {
    a_row = ((warp % 2) * 64 + lane % 16) * kRowBytes;
    a_word = lane / 16;
    b_row = ((warp / 2) * (kTileN / 2) + lane / 16 * 8 + lane % 8) * kRowBytes;
    b_word = lane / 8 % 2;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[m][n][e] = 0;
  }
  // `half` counts pairs of words: 32 bytes of the reduction.
  __device__ __forceinline__ void load(uint32_t smem, int slot, int half, Operands* o) const {
    using Smem = Shared<kTileN>;
    const uint32_t x = smem + slot * Smem::kStageX + a_row;
    const uint32_t weight = smem + Smem::kWeights + slot * Smem::kStageWeight + b_row;
    const uint32_t swizzle = threadIdx.x % 8;  // the row of every address is this modulo 8
#pragma unroll
    for (int m = 0; m < kM; ++m)
      load_matrix_x4(x + m * 16 * kRowBytes + (((half * 2 + a_word) ^ swizzle) << 4), o->a[m]);
#pragma unroll
    for (int n = 0; n < kN / 2; ++n)
      load_matrix_x4(weight + n * 16 * kRowBytes + (((half * 2 + b_word) ^ swizzle) << 4), o->b[n]);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int m = 0; m < kM; ++m) round_fragment(o->a[m]);
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) round_fragment(o->b[n]);
    }
  }
  __device__ __forceinline__ void multiply(const Operands& o) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) mma_16x8<T>(sums[m][n], o.a[m], o.b[n / 2][n % 2 * 2], o.b[n / 2][n % 2 * 2 + 1]);
  }
  __device__ __forceinline__ void stage_sums(float* to, int pitch, int warp, int lane) const {
    float* base = to + ((warp % 2) * 64 + lane / 4) * pitch + (warp / 2) * (kTileN / 2) + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<Pack<float, 2>*>(base + (m * 16 + h * 8) * pitch + n * 8) = {sums[m][n][h * 2],
                                                                                         sums[m][n][h * 2 + 1]};
  }
};

// Sums a tile that the loader has begun: stages come in while those before them are multiplied. fresh: the stages do
// not hold the weights yet.
template <class T, int kTileN, Fetch kFetch>
__device__ __forceinline__ void sum_tile(Loader<T, kTileN, kFetch>& loader, WarpTile<T, kTileN>& work, char* smem,
                                         int steps, bool fresh) {
  const uint32_t shared = shared_address(smem);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    loader.seek(s, s < steps, fresh);
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) loader.fetch(s, smem, quarter);
    cp_async_commit();
  }
  work.clear();
  typename WarpTile<T, kTileN>::Operands operands[2];
  cp_async_wait<kStages - 2>();
  __syncthreads();
  work.load(shared, 0, 0, &operands[0]);
  int read = 0, write = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    loader.seek(step + kStages - 1, step + kStages - 1 < steps, fresh);
    loader.tabulate(step + kStages, read);
    const int next = read + 1 == kStages ? 0 : read + 1;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      loader.fetch(write, smem, half);
      if (half < 3) {
        work.load(shared, read, half + 1, &operands[(half + 1) % 2]);
      } else {  // the next stage's first operands, while this stage's last are multiplied
        cp_async_commit();
        cp_async_wait<kStages - 2>();
        __syncthreads();  // stage `next` has landed for all threads, and all are done with stage `read`
        work.load(shared, next, 0, &operands[0]);
      }
      work.multiply(operands[half % 2]);
    }
    write = read;
    read = next;
  }
}

// ---------------------------------------------------------------- host

// The wide tile reads x half as often. The narrow one is for few output channels and for few tiles: the device should
// have several waves of them, more so as the list is seldom full.
bool wide_tile(const Conv2dParams& p, const DeviceInfo& device) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  return (outputs + 63) / 64 % 2 == 0 && GemmPlan(p, 1, 128).most_tiles(p, kTileM) >= 4 * device.sm_count;
}

// Launches kKernel(p, plan) on as many CTAs as its tiles and the fringe could use. tables: bytes behind its stages.
template <auto kKernel, int kTileN, class Params>
Status launch_tiles(const char* op, const Params& p, const GemmPlan& plan, int tables, const DeviceInfo& device,
                    cudaStream_t stream) {
  static OccupancyCache cache;
  const size_t smem = Shared<kTileN>::kBytes + tables;
  const int64_t tiles = plan.most_tiles(p, kTileM);
  SBNET_CHECK(tiles <= INT32_MAX / 2, "%s: active: expected at most 2^30 tiles, got %lld", op,
              static_cast<long long>(tiles));
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kKernel, kThreads, smem, &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, tiles, plan.fringe.threads(p), kThreads);
  SBNET_CUDA_TRY(op, launch_dependent(device, kKernel, dim3(grid), dim3(kThreads), smem, stream, p, plan));
  return ok_status();
}

}  // namespace
}  // namespace sbnet::portable

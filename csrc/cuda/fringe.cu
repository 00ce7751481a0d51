// The fringe on CUDA: mark_kernel sets one bit a pixel and counts them by chunk, list_kernel turns bits into indices.
// Like reduce_mask: no atomics, no state, a fixed order.
#include "core/fringe.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 1024;
constexpr int kChunk = 2048;  // pixels of one CTA
constexpr int kWords = kChunk / 32;

struct FringeArgs {
  FringeTest in_fringe;
  FastDiv width, height;
  int pixels;  // of the batch
  int64_t capacity;
  int32_t *list, *count;
  uint32_t* words;     // [chunks, kWords]
  int32_t* per_chunk;  // [chunks]
};

__device__ __forceinline__ int sum_over_cta(int v, int* scratch) {
  v = __reduce_add_sync(0xffffffff, v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  int sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += scratch[w];
  __syncthreads();
  return sum;
}

__global__ void __launch_bounds__(kThreads) mark_kernel(const __grid_constant__ FringeArgs a) {
  __shared__ int scratch[kThreads / 32];
  grid_dependency_release();
  grid_dependency_wait();
  const int first = blockIdx.x * kChunk;
  int mine = 0;
  for (int k = threadIdx.x; k < kChunk; k += kThreads) {
    const unsigned pixel = static_cast<unsigned>(first) + k;
    bool hit = false;
    if (pixel < static_cast<unsigned>(a.pixels)) {
      uint32_t row, n, y, x;
      a.width.divmod(pixel, &row, &x);
      a.height.divmod(row, &n, &y);
      hit = a.in_fringe(n, y, x);
    }
    const unsigned ballot = __ballot_sync(0xffffffff, hit);
    if (threadIdx.x % 32 == 0) {
      a.words[static_cast<int64_t>(blockIdx.x) * kWords + k / 32] = ballot;
      mine += __popc(ballot);
    }
  }
  mine = sum_over_cta(mine, scratch);
  if (threadIdx.x == 0) a.per_chunk[blockIdx.x] = mine;
}

__global__ void __launch_bounds__(kThreads) list_kernel(const __grid_constant__ FringeArgs a, int chunks) {
  __shared__ int scratch[kThreads / 32];
  __shared__ int start[kWords];
  grid_dependency_wait();
  grid_dependency_release();
  int before = 0, total = 0;
  for (int c = threadIdx.x; c < chunks; c += kThreads) {
    const int n = a.per_chunk[c];
    total += n;
    before += c < static_cast<int>(blockIdx.x) ? n : 0;
  }
  before = sum_over_cta(before, scratch);
  total = sum_over_cta(total, scratch);
  const int64_t capacity = a.capacity;
  if (static_cast<int>(blockIdx.x) < chunks) {
    const uint32_t* words = a.words + static_cast<int64_t>(blockIdx.x) * kWords;
    constexpr int kOwn = kWords / 32;  // words a lane of the one warp that scans them
    if (threadIdx.x < 32) {
      int own[kOwn], sum = 0;
      for (int w = 0; w < kOwn; ++w) {
        own[w] = sum;
        sum += __popc(words[threadIdx.x * kOwn + w]);
      }
      int scan = sum;
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(0xffffffff, scan, step);
        if (static_cast<int>(threadIdx.x) >= step) scan += left;
      }
      for (int w = 0; w < kOwn; ++w) start[threadIdx.x * kOwn + w] = before + scan - sum + own[w];
    }
    __syncthreads();
    for (int k = threadIdx.x; k < kChunk; k += kThreads) {
      const uint32_t word = words[k / 32];
      if (!(word >> (k % 32) & 1)) continue;
      const int64_t slot = start[k / 32] + __popc(word & ((1u << (k % 32)) - 1));
      if (slot < capacity) a.list[slot] = blockIdx.x * kChunk + k;
    }
  }
  for (int64_t k = total + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; k < capacity;
       k += static_cast<int64_t>(gridDim.x) * kThreads)
    a.list[k] = -1;
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.count = static_cast<int>(total < capacity ? total : capacity);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_fringe_cuda(const sbnet::FringeParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  constexpr const char* kOp = "fringe";
  SBNET_TRY(validate(*params));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  FringeArgs a = {FringeTest(*params),
                  FastDiv(params->width),
                  FastDiv(params->height),
                  static_cast<int>(params->batch * params->height * params->width),
                  params->capacity,
                  params->pixels,
                  params->count,
                  nullptr,
                  nullptr};
  const int chunks = static_cast<int>((static_cast<int64_t>(a.pixels) + kChunk - 1) / kChunk);
  a.words = static_cast<uint32_t*>(workspace);
  a.per_chunk = static_cast<int32_t*>(workspace) + static_cast<int64_t>(chunks) * kWords;
  if (chunks) SBNET_CUDA_TRY(kOp, launch_dependent(device, mark_kernel, dim3(chunks), dim3(kThreads), 0, stream, a));
  SBNET_CUDA_TRY(
      kOp, launch_dependent(device, list_kernel, dim3(chunks ? chunks : 1), dim3(kThreads), 0, stream, a, chunks));
  return ok_status();
}

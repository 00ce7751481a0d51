// A sum or maximum over an image's active pixels in one launch: the CTAs of a cluster take a share of the pixels each,
// tell one another through the workspace what they found, and go on with it. Hopper alone, and only where a share is
// read sooner than another launch would begin; else block_fold.cuh.
#pragma once
#include "cuda/capability.h"
#include "cuda/masked/block_fold.cuh"

namespace sbnet {

constexpr int kImageThreads = 512, kMostImageBlocks = 4096;

struct ImagePlan {
  FastDiv pixels, width, columns;  // of a block; blocks of a row of the grid
  FastDiv words;                   // of a pixel, a thread each
  int rows;                        // pixels that a CTA has under way at once
};

// All CTAs of an image have come here, and see what the others wrote.
__device__ __forceinline__ void meet_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The active blocks of image n, in order, to `blocks` [grid] in shared memory. Returns how many there are.
__device__ __forceinline__ int list_image(const int32_t* block_map, const BlockGrid& grid, int n, int* blocks) {
  __shared__ int of_warps[kImageThreads / 32];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, all = grid.count[0] * grid.count[1];
  int active = 0;
  for (int base = 0; base < all; base += kImageThreads) {
    const int at = base + thread;
    const bool is_active = at < all && block_map[int64_t{n} * all + at] >= 0;
    const unsigned flags = __ballot_sync(0xffffffffu, is_active);
    if (lane == 0) of_warps[warp] = __popc(flags);
    __syncthreads();
    int before = active;
    for (int w = 0; w < kImageThreads / 32; ++w) {
      if (w < warp) before += of_warps[w];
      active += of_warps[w];
    }
    if (is_active) blocks[before + __popc(flags & ((1u << lane) - 1))] = at;
    __syncthreads();
  }
  return active;
}

// body(row, column, in), each argument an array of kTogether pixels, for this thread's pixels of the share of CTA
// `rank`: a thread keeps to its word of channels. `in`: is there such a pixel?
template <int kTogether, class Body>
__device__ __forceinline__ void for_share(const TensorView& x, const BlockGrid& grid, const ImagePlan& plan, int active,
                                          int rank, const int* blocks, const Body& body) {
  const int own = static_cast<int>(plan.words.quotient(threadIdx.x));
  if (own >= plan.rows) return;
  const int64_t pixels = int64_t{active} * plan.pixels.divisor;
  const int begin = static_cast<int>(pixels * rank / kImageRanks), end = pixels * (rank + 1) / kImageRanks;
  for (int first = begin + own; first < end; first += kTogether * plan.rows) {
    uint32_t row[kTogether], column[kTogether];
    bool in[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int pixel = first + i * plan.rows;
      uint32_t slot, rest, block_row, block_column;
      plan.pixels.divmod(pixel < end ? pixel : first, &slot, &rest);
      plan.width.divmod(rest, &row[i], &column[i]);
      plan.columns.divmod(blocks[slot], &block_row, &block_column);
      row[i] += block_row * grid.size[0], column[i] += block_column * grid.size[1];
      in[i] = pixel < end && row[i] < x.size[2] && column[i] < x.size[3];
    }
    body(row, column, in);
  }
}

// Every thread of CTA `rank` of image n: its share's folds go to values[rank] [C] and counts[rank]. folds:
// [kImageThreads] in shared memory. The order of additions follows from the mask alone.
template <class T, class Fold>
__device__ __forceinline__ void fold_image(const TensorView& x, const BlockGrid& grid, const ImagePlan& plan, int n,
                                           int active, int rank, const int* blocks, Fold* folds, float* values,
                                           float* counts) {
  constexpr int kN = Fold::kN, kTogether = 4;
  const int thread = threadIdx.x;
  uint32_t row_of_thread, word;
  plan.words.divmod(thread, &row_of_thread, &word);
  const T* image = static_cast<const T*>(x.data) + n * x.stride[0] + int64_t{word} * kN;
  Fold found;
  found.clear();
  for_share<kTogether>(x, grid, plan, active, rank, blocks, [&](const auto& row, const auto& column, const auto& in) {
    Word<T, kN> loaded[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (in[i])
        loaded[i] = *reinterpret_cast<const Word<T, kN>*>(image + row[i] * x.stride[2] + column[i] * x.stride[3]);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (!in[i]) continue;
      float taken[kN];
#pragma unroll
      for (int e = 0; e < kN; ++e) taken[e] = to_float(loaded[i].channel[e]);
      found.add(taken);
    }
  });
  folds[thread] = found;
  __syncthreads();
  int half = 1;
  while (half < plan.rows) half *= 2;
  const int words = static_cast<int>(plan.words.divisor), row = static_cast<int>(row_of_thread);
  for (half /= 2; half; half /= 2) {
    if (row < half && row + half < plan.rows) folds[thread].merge(folds[thread + half * words]);
    __syncthreads();
  }
  if (row == 0) {
#pragma unroll
    for (int e = 0; e < kN; ++e) values[int64_t{rank} * x.size[1] + word * kN + e] = folds[thread].value[0][e];
    if (word == 0) counts[rank] = folds[thread].count;
  }
}

// Is one launch the faster way for x?
template <class T>
bool plan_image(const TensorView& x, const BlockGrid& grid, const DeviceInfo& device, ImagePlan* plan) {
  constexpr int64_t kMostBytes = 512 * 1024;  // of a CTA's share, unless there are images for half of the device
  const int64_t height = std::min<int64_t>(grid.size[0], x.size[2]), width = std::min<int64_t>(grid.size[1], x.size[3]);
  const int64_t words = x.size[1] / kLanes<T>, blocks = int64_t{grid.count[0]} * grid.count[1];
  if (!has_clusters(device) || x.size[1] % kLanes<T> || !channels_vectorize(x) || words > kImageThreads) return false;
  if (blocks > kMostImageBlocks || static_cast<double>(blocks) * height * width > INT32_MAX / 16) return false;
  const int64_t share = x.size[2] * x.size[3] * x.size[1] * static_cast<int64_t>(sizeof(T)) / kImageRanks;
  if (share > kMostBytes && x.size[0] * kImageRanks * 2 < device.sm_count) return false;
  plan->pixels = FastDiv(height * width);
  plan->width = FastDiv(width);
  plan->columns = FastDiv(grid.count[1]);
  plan->words = FastDiv(words);
  plan->rows = static_cast<int>(kImageThreads / words);
  return true;
}

// So many CTAs for each image, one or a cluster.
template <class... Params, class... Args>
Status launch_images(const char* op, void (*kernel)(Params...), int64_t images, int ranks, size_t shared,
                     cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(images * ranks));
  config.blockDim = dim3(kImageThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  config.attrs = attributes;
  config.numAttrs = ranks > 1 ? 2 : 0;
  SBNET_CUDA_TRY(op, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
  return ok_status();
}

}  // namespace sbnet

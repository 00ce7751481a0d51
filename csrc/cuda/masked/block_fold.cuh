// Sums, maxima and moments over active pixels on CUDA. A CTA takes a part and some words of channels: its threads go
// through the pixels of the part's blocks, then merge what they found in a tree.
#pragma once
#include "core/masked/block_fold.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {

// What a thread found of kN channels. `count` is of pixels.
template <int N>
struct SumFold {
  static constexpr FoldKind kKind = FoldKind::kSum;
  static constexpr int kN = N;
  float count, value[1][N];

  __device__ void clear() {
    count = 0.f;
    for (int e = 0; e < N; ++e) value[0][e] = 0.f;
  }
  __device__ void add(const float (&x)[N]) {
    count += 1.f;
#pragma unroll
    for (int e = 0; e < N; ++e) value[0][e] += x[e];
  }
  __device__ void merge(const SumFold& other) {
    count += other.count;
    for (int e = 0; e < N; ++e) value[0][e] += other.value[0][e];
  }
};

template <int N>
struct MaxFold {
  static constexpr FoldKind kKind = FoldKind::kMax;
  static constexpr int kN = N;
  float count, value[1][N];

  __device__ void clear() {
    count = 0.f;
    for (int e = 0; e < N; ++e) value[0][e] = -INFINITY;
  }
  __device__ void add(const float (&x)[N]) {
    count += 1.f;
#pragma unroll
    for (int e = 0; e < N; ++e) value[0][e] = max_nan(value[0][e], x[e]);
  }
  __device__ void merge(const MaxFold& other) {
    count += other.count;
    for (int e = 0; e < N; ++e) value[0][e] = max_nan(value[0][e], other.value[0][e]);
  }
};

// Mean and sum of squared distances from it, as Welford adds an element (1962) and Chan, Golub and LeVeque merge two
// sets (1979): no difference of large sums.
template <int N>
struct MomentsFold {
  static constexpr FoldKind kKind = FoldKind::kMoments;
  static constexpr int kN = N;
  float count, value[2][N];

  __device__ void clear() {
    count = 0.f;
    for (int e = 0; e < N; ++e) value[0][e] = value[1][e] = 0.f;
  }
  __device__ void add(const float (&x)[N]) {
    count += 1.f;
    const float share = 1.f / count;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float apart = x[e] - value[0][e];
      value[0][e] += apart * share;
      value[1][e] += apart * (x[e] - value[0][e]);
    }
  }
  __device__ void merge(const MomentsFold& other) {
    if (other.count == 0.f) return;
    const float all = count + other.count, share = other.count / all;
    for (int e = 0; e < N; ++e) {
      const float apart = other.value[0][e] - value[0][e];
      value[0][e] += apart * share;
      value[1][e] += other.value[1][e] + apart * apart * (count * share);
    }
    count = all;
  }
};

constexpr int kFoldThreads = 256;

struct FoldPlan {
  FastDiv chunks;       // CTAs that share a part, each with its words
  int log2_words;       // words of a CTA
  int words;            // of a pixel
  bool channels_inner;  // neighbouring threads take the words of a pixel, else the pixels of a word
};

template <class T, class Fold>
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ FoldParts parts, const __grid_constant__ FoldPlan plan, float* values,
                float* counts) {
  constexpr int kN = Fold::kN;
  __shared__ Fold folds[kFoldThreads];
  grid_dependency_wait();
  grid_dependency_release();
  const TensorView& x = parts.x;
  const int words = 1 << plan.log2_words, lanes = kFoldThreads >> plan.log2_words, thread = threadIdx.x;
  const int lane = plan.channels_inner ? thread >> plan.log2_words : thread & (lanes - 1);
  const int column_of_word = plan.channels_inner ? thread & (words - 1) : thread / lanes;
  const int64_t tasks = parts.count() * plan.chunks.divisor;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t part = task / plan.chunks.divisor;
    const int word = static_cast<int>(task - part * plan.chunks.divisor) * words + column_of_word;
    Fold& own = folds[column_of_word * lanes + lane];
    Fold found;
    found.clear();
    if (word < plan.words) {
      PixelRect rect;
      for (BlockWalk walk(parts, part); walk.next(&rect);) {
        const int width = rect.column_end - rect.column, rows = lanes / width, columns = lanes % width;
        const T* image = static_cast<const T*>(x.data) + walk.image() * x.stride[0] + int64_t{word} * kN * x.stride[1];
        int row = rect.row + lane / width, column = rect.column + lane % width;
        while (row < rect.row_end) {
          const T* at = image + row * x.stride[2] + column * x.stride[3];
          const Word<T, kN> loaded = *reinterpret_cast<const Word<T, kN>*>(at);
          float taken[kN];
#pragma unroll
          for (int e = 0; e < kN; ++e) taken[e] = to_float(loaded.channel[e]);
          found.add(taken);
          row += rows, column += columns;
          if (column >= rect.column_end) column -= width, ++row;
        }
      }
    }
    own = found;
    __syncthreads();
    for (int half = lanes / 2; half; half /= 2) {
      if (lane < half) folds[column_of_word * lanes + lane].merge(folds[column_of_word * lanes + lane + half]);
      __syncthreads();
    }
    if (lane == 0 && word < plan.words) {
      float* to = values + part * fold_values(Fold::kKind) * x.size[1] + int64_t{word} * kN;
      for (int k = 0; k < fold_values(Fold::kKind); ++k)
        for (int e = 0; e < kN; ++e) to[k * x.size[1] + e] = own.value[k][e];
      if (word == 0) counts[part] = own.count;
    }
    __syncthreads();  // before the next task overwrites folds
  }
}

// Fills the workspace: `values` [parts, fold_values, C] and `counts` [parts].
template <class T, template <int> class Fold>
Status launch_fold(const char* op, const FoldParts& parts, void* workspace, const DeviceInfo& device,
                   cudaStream_t stream) {
  constexpr int kWide = kLanes<T>, kMostWords = 6;
  const TensorView& x = parts.x;
  const bool whole = channels_vectorize(x) && x.size[1] % kWide == 0;
  FoldPlan plan;
  plan.words = static_cast<int>(whole ? x.size[1] / kWide : x.size[1]);
  plan.channels_inner = x.stride[1] <= x.stride[3];
  plan.log2_words = 0;
  const int most = plan.channels_inner ? kMostWords : 3;  // a warp of pixels or more, where those are neighbours
  while (plan.log2_words < most && 1 << plan.log2_words < plan.words) ++plan.log2_words;
  plan.chunks = FastDiv((plan.words + (1 << plan.log2_words) - 1) >> plan.log2_words);
  const int64_t tasks = parts.count() * plan.chunks.divisor, most_ctas = int64_t{device.sm_count} * 32;
  const dim3 ctas(static_cast<unsigned>(tasks < most_ctas ? tasks : most_ctas));
  float* const values = static_cast<float*>(workspace);
  float* const counts = fold_counts(parts, Fold<1>::kKind, workspace);
  const auto kernel = whole ? fold_kernel<T, Fold<kWide>> : fold_kernel<T, Fold<1>>;
  SBNET_CUDA_TRY(op,
                 launch_dependent(device, kernel, ctas, dim3(kFoldThreads), 0, stream, parts, plan, values, counts));
  return ok_status();
}

}  // namespace sbnet

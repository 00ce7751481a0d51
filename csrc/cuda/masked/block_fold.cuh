// Sums, maxima and moments over active pixels on CUDA. A CTA takes a part and some words of channels: its threads go
// through the pixels of the part's bands, then merge what they found in a tree.
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
constexpr int kFoldLoads = 4;  // that a thread has under way

struct FoldPlan {
  FastDiv chunks;         // CTAs that share a part, each with its words
  FastDiv pixels, width;  // of a band of a whole block
  int bands;              // that a CTA notes at once
  int log2_words;         // words of a CTA
  int words;              // of a pixel
  bool channels_inner;    // neighbouring threads take the words of a pixel, else the pixels of a word
};

template <class T, class Fold>
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ FoldParts parts, const __grid_constant__ FoldPlan plan, float* values,
                float* counts) {
  constexpr int kN = Fold::kN;
  __shared__ Fold folds[kFoldThreads];
  __shared__ PixelRect rects[kFoldThreads];
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
    BandWalk walk(parts, part);
    if (task == blockIdx.x) {  // all that needs no memory is done by now
      grid_dependency_wait();
      grid_dependency_release();
    }
    bool any = false;
    const T* image = static_cast<const T*>(x.data) + walk.image() * x.stride[0] + int64_t{word} * kN * x.stride[1];
    for (int64_t left = walk.left(); left > 0; left -= plan.bands, walk.skip(plan.bands)) {
      const int bands = static_cast<int>(left < plan.bands ? left : plan.bands);
      const bool active = thread < bands && walk.peek(thread, &rects[thread]);
      if (thread < bands && !active) rects[thread] = {};
      if (!__syncthreads_or(active)) continue;
      any = true;
      const int pixels = word < plan.words ? bands * static_cast<int>(plan.pixels.divisor) : 0;
      for (int first = lane; first < pixels; first += kFoldLoads * lanes) {
        Word<T, kN> loaded[kFoldLoads];
        bool in[kFoldLoads];
#pragma unroll
        for (int i = 0; i < kFoldLoads; ++i) {
          const int pixel = first + i * lanes;
          uint32_t band, rest, row, column;
          plan.pixels.divmod(pixel < pixels ? pixel : first, &band, &rest);
          plan.width.divmod(rest, &row, &column);
          const PixelRect rect = rects[band];
          row += rect.row, column += rect.column;
          in[i] = pixel < pixels && static_cast<int>(row) < rect.row_end && static_cast<int>(column) < rect.column_end;
          if (in[i])
            loaded[i] = *reinterpret_cast<const Word<T, kN>*>(image + row * x.stride[2] + column * x.stride[3]);
        }
#pragma unroll
        for (int i = 0; i < kFoldLoads; ++i) {
          if (!in[i]) continue;
          float taken[kN];
#pragma unroll
          for (int e = 0; e < kN; ++e) taken[e] = to_float(loaded[i].channel[e]);
          found.add(taken);
        }
      }
      __syncthreads();  // before the next bands overwrite rects
    }
    own = found;
    __syncthreads();
    for (int half = any ? lanes / 2 : 0; half; half /= 2) {
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
  constexpr int kWide = kLanes<T>;
  const TensorView& x = parts.x;
  const bool whole = channels_vectorize(x) && x.size[1] % kWide == 0;
  FoldPlan plan;
  plan.words = static_cast<int>(whole ? x.size[1] / kWide : x.size[1]);
  plan.channels_inner = x.stride[1] <= x.stride[3];
  // 128 bytes of a pixel, or a warp of pixels where those are neighbours; fewer words where a quarter would go unused.
  plan.log2_words = plan.channels_inner && !whole ? 6 : 3;
  while (plan.log2_words) {
    const int words = 1 << plan.log2_words, taken = (plan.words + words - 1) / words * words;
    if (3 * int64_t{taken} <= 4 * int64_t{plan.words}) break;
    --plan.log2_words;
  }
  const int64_t width = std::min<int64_t>(parts.grid.size[1], x.size[3]), pixels = parts.band_rows * width;
  plan.width = FastDiv(width);
  plan.pixels = FastDiv(pixels);
  plan.bands = static_cast<int>(std::min<int64_t>(kFoldThreads, std::max<int64_t>(1, (1 << 20) / pixels)));
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

// What the entry points of ops that fold are: launch(T{}, device, stream) with x's element type, if the params are
// valid and there is an image.
template <class Params, class Launch>
Status run_fold(const char* op, const Params& p, void* stream, const Launch& launch) {
  SBNET_TRY(validate(p));
  if (!p.x.size[0]) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(op, &device));
  return by_dtype(p.x.dtype, [&](auto t) { return launch(t, device, static_cast<cudaStream_t>(stream)); });
}

}  // namespace sbnet

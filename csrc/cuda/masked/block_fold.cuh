// Sums, maxima and moments over active pixels on CUDA. A CTA takes a part and some words of channels: its threads go
// through the pixels of the part's bands, then merge what they found in a tree.
#pragma once
#include "core/masked/block_fold.h"
#include "cuda/masked/pixels.cuh"

namespace sbnet {

// What a thread found of kN channels: a sum or a maximum. `count` is of pixels.
template <FoldKind kOf, int N>
struct OneFold {
  static constexpr FoldKind kKind = kOf;
  static constexpr int kN = N;
  float count, value[1][N];

  static __device__ float both(float a, float b) { return kOf == FoldKind::kMax ? max_nan(a, b) : a + b; }
  __device__ void clear() {
    count = 0.f;
    for (int e = 0; e < N; ++e) value[0][e] = kOf == FoldKind::kMax ? -INFINITY : 0.f;
  }
  __device__ void add(const float (&x)[N]) {
    count += 1.f;
#pragma unroll
    for (int e = 0; e < N; ++e) value[0][e] = both(value[0][e], x[e]);
  }
  __device__ void merge(const OneFold& other) {
    count += other.count;
    for (int e = 0; e < N; ++e) value[0][e] = both(value[0][e], other.value[0][e]);
  }
};
template <int N>
using SumFold = OneFold<FoldKind::kSum, N>;
template <int N>
using MaxFold = OneFold<FoldKind::kMax, N>;

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

// Moments of x, and sums of dy and of dy (x - mean): core/masked/norm_grad.h.
template <int N>
struct GradientFold {
  static constexpr FoldKind kKind = FoldKind::kGradient;
  static constexpr int kN = N;
  float count, value[4][N];

  __device__ void clear() {
    count = 0.f;
    for (int k = 0; k < 4; ++k)
      for (int e = 0; e < N; ++e) value[k][e] = 0.f;
  }
  __device__ void add(const float (&x)[N], const float (&dy)[N]) {
    count += 1.f;
    const float share = 1.f / count;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float apart = x[e] - value[0][e], moved = apart * share, left = apart - moved;
      value[0][e] += moved;
      value[1][e] += apart * left;
      value[3][e] += dy[e] * left - value[2][e] * moved;
      value[2][e] += dy[e];
    }
  }
  __device__ void merge(const GradientFold& other) {
    if (other.count == 0.f) return;
    const float all = count + other.count, share = other.count / all;
    for (int e = 0; e < N; ++e) {
      const float apart = other.value[0][e] - value[0][e], moved = apart * share;
      value[0][e] += moved;
      value[1][e] += other.value[1][e] + apart * apart * (count * share);
      value[3][e] += other.value[3][e] - value[2][e] * moved + other.value[2][e] * (apart - moved);
      value[2][e] += other.value[2][e];
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
  bool channels_inner;    // FoldWords
  bool settled;           // core/settled.h

  FoldPlan(const FoldParts& parts, const FoldWords& cut)
      : chunks(cut.chunks),
        log2_words(cut.log2_words),
        words(cut.words),
        channels_inner(cut.channels_inner),
        settled(inputs_settled()) {
    const int64_t columns = std::min<int64_t>(parts.grid.size[1], parts.x.size[3]), all = parts.band_rows * columns;
    width = FastDiv(columns);
    pixels = FastDiv(all);
    bands = static_cast<int>(std::min<int64_t>(kFoldThreads, std::max<int64_t>(1, (1 << 20) / all)));
  }
};

// A task is a part and some words of channels; this is a thread's share of one.
struct FoldThread {
  int words, lanes;  // of the CTA; threads that share a word
  int lane, column;  // which of them, and of which of the CTA's words
  int64_t part;
  int word;  // of the pixel

  __device__ FoldThread(const FoldPlan& plan, int64_t task)
      : words(1 << plan.log2_words), lanes(kFoldThreads >> plan.log2_words), part(task / plan.chunks.divisor) {
    const int thread = threadIdx.x;
    lane = plan.channels_inner ? thread >> plan.log2_words : thread & (lanes - 1);
    column = plan.channels_inner ? thread & (words - 1) : thread / lanes;
    word = first_word(plan, task) + column;
  }
  static __device__ int first_word(const FoldPlan& plan, int64_t task) {
    return static_cast<int>(task % plan.chunks.divisor) << plan.log2_words;
  }
};

// Notes the pixels of the next bands in `rects` [kFoldThreads]: how many bands there are, of none that is active 0.
__device__ __forceinline__ int note_bands(const FoldPlan& plan, const BandWalk& walk, PixelRect* rects) {
  const int64_t left = walk.left();
  const int bands = static_cast<int>(left < plan.bands ? left : plan.bands), thread = threadIdx.x;
  const bool active = thread < bands && walk.peek(thread, &rects[thread]);
  if (thread < bands && !active) rects[thread] = {};
  return __syncthreads_or(active) ? bands : 0;
}

// kFoldLoads of the pixels that were noted, `first` and every lanes-th after it.
template <class T, int kN>
struct FoldPixels {
  Word<T, kN> loaded[kFoldLoads];
  uint32_t row[kFoldLoads], column[kFoldLoads];
  bool in[kFoldLoads];

  // image: of this thread's word.
  __device__ __forceinline__ void load(const FoldPlan& plan, const PixelRect* rects, const TensorView& x,
                                       const T* image, int first, int lanes, int pixels) {
#pragma unroll
    for (int i = 0; i < kFoldLoads; ++i) {
      const int pixel = first + i * lanes;
      uint32_t band, rest;
      plan.pixels.divmod(pixel < pixels ? pixel : first, &band, &rest);
      plan.width.divmod(rest, &row[i], &column[i]);
      const PixelRect rect = rects[band];
      row[i] += rect.row, column[i] += rect.column;
      in[i] =
          pixel < pixels && static_cast<int>(row[i]) < rect.row_end && static_cast<int>(column[i]) < rect.column_end;
      if (in[i])
        loaded[i] = *reinterpret_cast<const Word<T, kN>*>(image + row[i] * x.stride[2] + column[i] * x.stride[3]);
    }
  }
};

// Folds this CTA's share of a task; what it found of word `column` is then in folds[column * lanes], for all to read.
// wait(): once the bands are noted, before any pixel is read. grad: of kGradient. False if no block of the part is
// active.
template <class T, class Fold, class Wait>
__device__ __forceinline__ bool fold_task(const FoldParts& parts, const FoldPlan& plan, const FoldThread& own,
                                          Fold* folds, PixelRect* rects, const Wait& wait,
                                          const TensorView* grad = nullptr) {
  constexpr int kN = Fold::kN;
  constexpr bool kWithGrad = Fold::kKind == FoldKind::kGradient;
  const TensorView& x = parts.x;
  Fold found;
  found.clear();
  BandWalk walk(parts, own.part);
  if (!plan.settled) wait();
  bool any = false, waits = plan.settled;
  const auto image_of = [&](const TensorView& t) {
    return static_cast<const T*>(t.data) + walk.image() * t.stride[0] + int64_t{own.word} * kN * t.stride[1];
  };
  const T* const image = image_of(x);
  for (; walk.left() > 0; walk.skip(plan.bands)) {
    const int bands = note_bands(plan, walk, rects);
    if (waits) wait();
    waits = false;
    if (!bands) continue;
    any = true;
    const int pixels = own.word < plan.words ? bands * static_cast<int>(plan.pixels.divisor) : 0;
    for (int first = own.lane; first < pixels; first += kFoldLoads * own.lanes) {
      FoldPixels<T, kN> some, more;
      some.load(plan, rects, x, image, first, own.lanes, pixels);
      if constexpr (kWithGrad) more.load(plan, rects, *grad, image_of(*grad), first, own.lanes, pixels);
#pragma unroll
      for (int i = 0; i < kFoldLoads; ++i) {
        if (!some.in[i]) continue;
        float taken[kN];
#pragma unroll
        for (int e = 0; e < kN; ++e) taken[e] = to_float(some.loaded[i].channel[e]);
        if constexpr (kWithGrad) {
          float dy[kN];
#pragma unroll
          for (int e = 0; e < kN; ++e) dy[e] = to_float(more.loaded[i].channel[e]);
          found.add(taken, dy);
        } else {
          found.add(taken);
        }
      }
    }
    __syncthreads();  // before the next bands overwrite rects
  }
  if (waits) wait();
  Fold* const of_word = folds + own.column * own.lanes;
  of_word[own.lane] = found;
  __syncthreads();
  for (int half = any ? own.lanes / 2 : 0; half; half /= 2) {
    if (own.lane < half) of_word[own.lane].merge(of_word[own.lane + half]);
    __syncthreads();
  }
  return any;
}

template <class T, class Fold>
__global__ void __launch_bounds__(kFoldThreads)
    fold_kernel(const __grid_constant__ FoldParts parts, const __grid_constant__ FoldPlan plan,
                const __grid_constant__ TensorView grad, float* values, float* counts) {
  constexpr int kN = Fold::kN;
  __shared__ Fold folds[kFoldThreads];
  __shared__ PixelRect rects[kFoldThreads];
  const int64_t tasks = parts.count() * plan.chunks.divisor;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const FoldThread own(plan, task);
    const auto wait = [&] {
      if (task != blockIdx.x) return;
      grid_dependency_wait();
      grid_dependency_release();
    };
    fold_task<T>(parts, plan, own, folds, rects, wait, &grad);
    if (own.lane == 0 && own.word < plan.words) {
      const Fold& found = folds[own.column * own.lanes];
      float* to = values + own.part * fold_values(Fold::kKind) * parts.x.size[1] + int64_t{own.word} * kN;
      for (int k = 0; k < fold_values(Fold::kKind); ++k)
        for (int e = 0; e < kN; ++e) to[k * parts.x.size[1] + e] = found.value[k][e];
      if (own.word == 0) counts[own.part] = found.count;
    }
    __syncthreads();  // before the next task overwrites folds
  }
}

inline dim3 fold_ctas(int64_t tasks, const DeviceInfo& device) {
  const int64_t most = int64_t{device.sm_count} * 32;
  return dim3(static_cast<unsigned>(tasks < most ? tasks : most));
}

// Fills the workspace: `values` [parts, fold_values, C] and `counts` [parts]. grad: of kGradient.
template <class T, template <int> class Fold>
Status launch_fold(const char* op, const FoldParts& parts, void* workspace, const DeviceInfo& device,
                   cudaStream_t stream, const TensorView* grad = nullptr) {
  constexpr int kWide = kLanes<T>;
  const bool whole =
      channels_vectorize(parts.x) && (!grad || channels_vectorize(*grad)) && parts.x.size[1] % kWide == 0;
  const FoldWords cut(parts.x, whole, 6);
  const FoldPlan plan(parts, cut);
  float* const values = static_cast<float*>(workspace);
  float* const counts = fold_counts(parts, Fold<1>::kKind, workspace);
  const auto kernel = whole ? fold_kernel<T, Fold<kWide>> : fold_kernel<T, Fold<1>>;
  SBNET_CUDA_TRY(op, launch_dependent(device, kernel, fold_ctas(parts.count() * cut.chunks, device), dim3(kFoldThreads),
                                      0, stream, parts, plan, grad ? *grad : TensorView{}, values, counts));
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

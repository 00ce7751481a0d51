// sparse_squeeze_excite2d on CUDA: of many images on Hopper one launch (squeeze_excite_cluster.cuh), else two of the
// same tasks: some channels of a part of an image's blocks (core/masked/squeeze_excite.h).
//   squeeze  sums the task's pixels, and multiplies the sums by its columns of weight1: what they add to each hidden
//            number. A product is linear, so it needs no wait for the other channels.
//   excite   adds up what the image's tasks gave, makes the gates of the task's channels, multiplies its pixels by
//            them. Its pixels and weights are under way before squeeze has ended.
#include "core/masked/squeeze_excite.h"
#include "cuda/masked/squeeze_excite_cluster.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_squeeze_excite2d";
constexpr int kThreads = kFoldThreads, kMostChannels = 64;  // of a task
constexpr int kHeld = 4;                                    // words of a matrix that a thread has under way

using gate_cluster::bias_at;

template <class T, int kN>
__device__ __forceinline__ float dot(const Word<T, kN>& word, const float* vector) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < kN; ++e) sum = fmaf(to_float(word.channel[e]), vector[e], sum);
  return sum;
}

// ---- squeeze

template <class T, int kN>
__global__ void __launch_bounds__(kThreads)
    squeeze_kernel(const __grid_constant__ SqueezeExciteParams p, const __grid_constant__ FoldParts parts,
                   const __grid_constant__ FoldPlan plan, int step, float* given) {
  using Fold = SumFold<kN>;
  __shared__ Fold folds[kThreads];
  __shared__ PixelRect rects[kThreads];
  __shared__ float sums[kMostChannels];
  const int C = static_cast<int>(p.x.size[1]), R = static_cast<int>(p.hidden), thread = threadIdx.x;
  const int words = 1 << plan.log2_words, rows = kThreads >> plan.log2_words;
  const int column = thread & (words - 1), row = thread >> plan.log2_words;
  const int64_t tasks = parts.count() * plan.chunks.divisor;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const FoldThread own(plan, task);
    const int word = FoldThread::first_word(plan, task) + column;
    const T* const matrix = static_cast<const T*>(p.weight1) + int64_t{word} * kN;
    Word<T, kN> held[kHeld];
    const auto load = [&](int base) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int r = base + row + i * rows;
        if (r < R && word < plan.words) held[i] = *reinterpret_cast<const Word<T, kN>*>(matrix + int64_t{r} * C);
      }
    };
    if (plan.settled) load(0);
    const bool any = fold_task<T>(parts, plan, own, folds, rects, [&] {
      if (task != blockIdx.x) return;
      grid_dependency_wait();
      grid_dependency_release();
    });
    if (any && own.lane == 0) {
#pragma unroll
      for (int e = 0; e < kN; ++e) sums[own.column * kN + e] = folds[own.column * own.lanes].value[0][e];
    }
    __syncthreads();
    float* const to = given + task * step;
    for (int base = 0; base < R; base += kHeld * rows) {
      if (base || !plan.settled) load(base);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int r = base + row + i * rows;
        float sum = any && r < R && word < plan.words ? dot(held[i], sums + column * kN) : 0.f;
        for (int away = words / 2; away; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
        if (r < R && column == 0) to[r] = sum;
      }
    }
    __syncthreads();  // before the next task overwrites what this one reads
  }
}

// ---- excite

// The hidden numbers of image n, to `hidden` [R]: sums over what its tasks gave, in their order. own_bias: of number
// threadIdx.x.
template <class T>
__device__ __forceinline__ void add_up(const SqueezeExciteParams& p, int64_t tasks, int step, const float* given,
                                       int64_t n, float own_bias, float4* found, float* hidden) {
  const int R = static_cast<int>(p.hidden), words = step / 4, thread = threadIdx.x;
  const float4* const from = reinterpret_cast<const float4*>(given + n * tasks * step);
  const float pixels = static_cast<float>(p.x.size[2] * p.x.size[3]);
  for (int base = 0; base < words; base += kThreads) {
    const int columns = min(words - base, kThreads), rows = kThreads / columns, row = thread / columns;
    const int column = thread - row * columns;
    float4 sum = {};
    if (row < rows) {
#pragma unroll 8
      for (int64_t k = row; k < tasks; k += rows) {
        const float4 v = from[k * words + base + column];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
    }
    found[thread] = sum;
    __syncthreads();
    for (int k = thread; k < 4 * columns; k += kThreads) {
      const int r = 4 * base + k;
      if (r >= R) continue;
      float all = 0.f;
#pragma unroll 4
      for (int i = 0; i < rows; ++i) all += reinterpret_cast<const float*>(found)[i * 4 * columns + k];
      const float bias = r == thread ? own_bias : bias_at<T>(p.bias1, p.bias_dtype, r);
      hidden[r] = gate_step(p.activation, all / pixels + bias);
    }
    __syncthreads();
  }
}

// This thread's share of a row of weight2: a few neighbouring lanes take a row.
template <class T, int kW>
struct Row {
  Word<T, kW> held[kHeld];
  const T* from;
  int n, lane, lanes;

  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int k = first + (i * lanes + lane) * kW;
      if (k < n) held[i] = *reinterpret_cast<const Word<T, kW>*>(from + k);
    }
  }
  __device__ float times(const float* vector, bool loaded) {
    float sum = 0.f;
    for (int first = 0; first < n; first += kHeld * lanes * kW) {
      if (first || !loaded) load(first);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int k = first + (i * lanes + lane) * kW;
        if (k < n) sum += dot(held[i], vector + k);
      }
    }
    return sum;
  }
};

// kW: of words of weight2.
template <class T, int kN, int kW>
__global__ void __launch_bounds__(kThreads)
    excite_kernel(const __grid_constant__ SqueezeExciteParams p, const __grid_constant__ FoldParts parts,
                  const __grid_constant__ FoldPlan plan, int step, const float* given) {
  extern __shared__ __align__(16) float shared[];  // the hidden numbers
  __shared__ float4 found[kThreads];
  __shared__ PixelRect rects[kThreads];
  __shared__ float gates[kMostChannels];
  const int C = static_cast<int>(p.x.size[1]), chunks = static_cast<int>(plan.chunks.divisor), thread = threadIdx.x;
  const bool scales = p.scaled.data != nullptr;
  const int channels = kN << plan.log2_words;  // of a task: a power of two
  const int lanes = min(32, kThreads / channels);
  const int slices = scales ? parts.slices : 1;
  const int64_t tasks = p.x.size[0] * slices * chunks;
  bool waits = true;
  const auto wait = [&] {
    if (!waits) return;
    grid_dependency_wait();
    grid_dependency_release();
    waits = false;
  };
  if (!plan.settled) wait();
  const float hidden_bias = thread < p.hidden ? bias_at<T>(p.bias1, p.bias_dtype, thread) : 0.f;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const FoldThread own(plan, task);
    const int64_t n = own.part / slices;
    const int in_task = thread / lanes, c = FoldThread::first_word(plan, task) * kN + in_task;
    const bool gives = in_task < channels && c < C;
    Row<T, kW> row;
    row.from = static_cast<const T*>(p.weight2) + (gives ? int64_t{c} * p.hidden : 0);
    row.n = gives ? static_cast<int>(p.hidden) : 0;
    row.lane = thread % lanes, row.lanes = lanes;
    row.load(0);
    const float own_bias = gives ? bias_at<T>(p.bias2, p.bias_dtype, c) : 0.f;

    // squeeze began when all before it had ended, and let this launch begin then: x is there.
    BandWalk walk(parts, scales ? own.part : 0);
    const auto at = [&](const TensorView& t) { return n * t.stride[0] + int64_t{own.word} * kN * t.stride[1]; };
    const T* const image = static_cast<const T*>(p.x.data) + at(p.x);
    const int of_band = own.word < plan.words ? static_cast<int>(plan.pixels.divisor) : 0;
    FoldPixels<T, kN> some;
    int pixels = 0;
    if (scales) {
      pixels = note_bands(plan, walk, rects) * of_band;
      some.load(plan, rects, p.x, image, own.lane, own.lanes, pixels);
    }
    wait();

    add_up<T>(p, int64_t{parts.slices} * chunks, step, given, n, hidden_bias, found, shared);
    float sum = row.times(shared, true);
    for (int away = lanes / 2; away; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
    if (gives && thread % lanes == 0) {
      const T gate = from_float<T>(gate_step(p.gate, sum + own_bias));
      gates[in_task] = to_float(gate);
      if (own.part % slices == 0) static_cast<T*>(p.y.data)[n * p.y.stride[0] + c * p.y.stride[1]] = gate;
    }
    __syncthreads();
    if (!scales) continue;  // add_up keeps tasks apart

    T* const to = static_cast<T*>(p.scaled.data) + at(p.scaled);
    float gate[kN];
#pragma unroll
    for (int e = 0; e < kN; ++e) gate[e] = gates[own.column * kN + e];
    bool loaded = true;
    while (true) {
      for (int first = own.lane; first < pixels; first += kFoldLoads * own.lanes) {
        if (!loaded) some.load(plan, rects, p.x, image, first, own.lanes, pixels);
        loaded = false;
#pragma unroll
        for (int i = 0; i < kFoldLoads; ++i) {
          if (!some.in[i]) continue;
#pragma unroll
          for (int e = 0; e < kN; ++e)
            some.loaded[i].channel[e] = from_float<T>(to_float(some.loaded[i].channel[e]) * gate[e]);
          *reinterpret_cast<Word<T, kN>*>(to + some.row[i] * p.scaled.stride[2] + some.column[i] * p.scaled.stride[3]) =
              some.loaded[i];
        }
      }
      loaded = false;
      walk.skip(plan.bands);
      __syncthreads();  // before the next bands overwrite rects
      if (walk.left() <= 0) break;
      pixels = note_bands(plan, walk, rects) * of_band;
    }
  }
}

template <class T, int kN>
Status launch_gate(const SqueezeExciteParams& p, const GateCut& cut, float* given, const DeviceInfo& device,
                   cudaStream_t stream) {
  const FoldPlan plan(cut.parts, cut.words);
  const int step = static_cast<int>(hidden_step(p));
  SBNET_CUDA_TRY(kOp, launch_dependent(device, squeeze_kernel<T, kN>, fold_ctas(cut.tasks(), device), dim3(kThreads), 0,
                                       stream, p, cut.parts, plan, step, given));
  constexpr int kMost = static_cast<int>(kMostGateChannels * sizeof(float));
  SBNET_TRY((allow_shared<excite_kernel<T, kN, kLanes<T>>>(kOp, device, kMost)));
  SBNET_TRY((allow_shared<excite_kernel<T, kN, 1>>(kOp, device, kMost)));
  const bool words = reinterpret_cast<uintptr_t>(p.weight2) % 16 == 0 && p.hidden % kLanes<T> == 0;
  const auto kernel = words ? excite_kernel<T, kN, kLanes<T>> : excite_kernel<T, kN, 1>;
  const int64_t tasks = p.scaled.data ? cut.tasks() : p.x.size[0] * cut.words.chunks;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, fold_ctas(tasks, device), dim3(kThreads), step * sizeof(float),
                                       stream, p, cut.parts, plan, step, static_cast<const float*>(given)));
  return ok_status();
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_squeeze_excite2d_cuda(const sbnet::SqueezeExciteParams* params, void* workspace,
                                                 void* stream_handle) {
  using namespace sbnet;
  return run_fold(kOp, *params, stream_handle, [&](auto t, const DeviceInfo& device, cudaStream_t stream) {
    using T = decltype(t);
    ImagePlan image;
    if (gate_cluster::plan_gate<T>(*params, device, &image))
      return gate_cluster::launch_gate<T>(kOp, *params, image, workspace, device, stream);
    const GateCut cut = cut_gate(*params);
    float* const given = static_cast<float*>(workspace);
    return cut.words.lanes > 1 ? launch_gate<T, kLanes<T>>(*params, cut, given, device, stream)
                               : launch_gate<T, 1>(*params, cut, given, device, stream);
  });
}

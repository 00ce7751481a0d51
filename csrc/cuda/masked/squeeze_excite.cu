// sparse_squeeze_excite2d on CUDA: one launch folds the blocks of parts (block_fold.cuh), one does the rest; or one
// does all (image_fold.cuh). Some CTAs take a sample: each averages some channels, or sums some pixels, then, when all
// have, gives some hidden numbers, then some of the gate's. A cluster of them meets in between; where there are no
// clusters, each step is a launch of its own. What they tell one another goes through the workspace. The in-place op
// multiplies by the gate what has just been read.
#include "core/masked/squeeze_excite.h"
#include "core/settled.h"
#include "cuda/capability.h"
#include "cuda/masked/image_fold.cuh"

namespace sbnet {
namespace {

constexpr const char* kOp = "sparse_squeeze_excite2d";
constexpr int kThreads = kImageThreads, kCluster = kImageRanks;

// A product: so many neighbouring threads take a row of the matrix, in words of 16 bytes or an element at a time.
struct ProductPlan {
  int lanes, rows;  // rows that a CTA takes at once
  bool words;
};

constexpr int kAverages = 1, kHidden = 2, kGates = 4, kEveryStep = 7;

struct GatePlan {
  int ranks;       // CTAs of a sample
  int steps;       // of this launch
  int log2_lanes;  // neighbouring threads that average neighbouring channels
  bool settled;    // core/settled.h
  ProductPlan product[2];
};

template <class T>
__device__ __forceinline__ float bias_at(const void* data, DType dtype, int64_t k) {
  if (!data) return 0.f;
  return dtype == DType::kF32 ? static_cast<const float*>(data)[k] : to_float(static_cast<const T*>(data)[k]);
}

// kHeld: words that a thread has under way.
template <class T, int kN, int kHeld>
struct Held {
  Word<T, kN> word[kHeld];

  // Elements of a row from `first` on; none of a row that there is not (n = 0).
  __device__ void load(const T* row, int n, int first, int lane, int lanes) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int k = first + (i * lanes + lane) * kN;
      if (k < n) word[i] = *reinterpret_cast<const Word<T, kN>*>(row + k);
    }
  }
  __device__ float times(const float* vector, int n, int first, int lane, int lanes) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int k = first + (i * lanes + lane) * kN;
      if (k >= n) continue;
#pragma unroll
      for (int e = 0; e < kN; ++e) sum += to_float(word[i].channel[e]) * vector[k + e];
    }
    return sum;
  }
};

// One of the two layers, matrix [rows, n] and vector: each CTA of a sample gives some numbers. What needs no vector is
// loaded by `begin`, before the CTAs have met.
template <class T, int kHeld>
struct Layer {
  static constexpr int kWord = kLanes<T>;
  const T* matrix;
  const void* bias;
  DType bias_dtype;
  int rows, n, row, lane;
  ProductPlan plan;
  float own_bias;
  Held<T, kWord, kHeld> held;

  __device__ void begin(int rank) {
    row = rank * plan.rows + static_cast<int>(threadIdx.x) / plan.lanes;
    lane = static_cast<int>(threadIdx.x) % plan.lanes;
    own_bias = row < rows ? bias_at<T>(bias, bias_dtype, row) : 0.f;
    if (plan.words) held.load(matrix + int64_t{row} * n, row < rows ? n : 0, 0, lane, plan.lanes);
  }
  template <class Give>
  __device__ void run(int ranks, const float* vector, const Give& give) {
    for (int left = rows - (row - static_cast<int>(threadIdx.x) / plan.lanes); left > 0; left -= ranks * plan.rows) {
      const bool inside = row < rows;
      const T* const from = matrix + int64_t{row} * n;
      float sum = 0.f;
      if (plan.words) {
        for (int first = 0; first < n; first += kHeld * kWord * plan.lanes) {
          if (first) held.load(from, inside ? n : 0, first, lane, plan.lanes);
          sum += held.times(vector, inside ? n : 0, first, lane, plan.lanes);
        }
      } else {
        for (int first = 0; first < n; first += kHeld * plan.lanes) {
          Held<T, 1, kHeld> few;
          few.load(from, inside ? n : 0, first, lane, plan.lanes);
          sum += few.times(vector, inside ? n : 0, first, lane, plan.lanes);
        }
      }
      for (int away = plan.lanes / 2; away; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
      if (inside && lane == 0) give(row, sum + own_bias);
      row += ranks * plan.rows;
      if (row >= rows) continue;
      own_bias = bias_at<T>(bias, bias_dtype, row);
      if (plan.words) held.load(matrix + int64_t{row} * n, n, 0, lane, plan.lanes);
    }
  }
};

// Where another launch has folded parts: this CTA's share of the averages.
template <class T>
__device__ __forceinline__ void average(const SqueezeExciteParams& p, const GatePlan& plan, int slices,
                                        const float* values, float* mean, int rank, int n) {
  __shared__ float sums[kThreads];
  const int thread = threadIdx.x, C = static_cast<int>(p.x.size[1]);
  const int lanes = 1 << plan.log2_lanes, rows = kThreads >> plan.log2_lanes;
  const int column = thread & (lanes - 1), row = thread >> plan.log2_lanes;
  const float pixels = static_cast<float>(p.x.size[2] * p.x.size[3]);
  for (int base = rank * lanes; base < C; base += plan.ranks * lanes) {
    const int c = base + column;
    float sum = 0.f;
    if (c < C) {
#pragma unroll 8
      for (int s = row; s < slices; s += rows) sum += values[(int64_t{n} * slices + s) * C + c];
    }
    sums[thread] = sum;
    __syncthreads();
    if (row == 0 && c < C) {
      for (int r = 1; r < rows; ++r) sum += sums[r * lanes + column];
      mean[c] = sum / pixels;
    }
    __syncthreads();  // before the next channels overwrite what this one reads
  }
}

template <class T, int kN, class Gate>
__device__ __forceinline__ void scale_word(const SqueezeExciteParams& p, int64_t n, int64_t row, int64_t column,
                                           int64_t c, const Gate& gate) {
  const auto at = [&](const TensorView& t) {
    return n * t.stride[0] + c * t.stride[1] + row * t.stride[2] + column * t.stride[3];
  };
  Word<T, kN> word = *reinterpret_cast<const Word<T, kN>*>(static_cast<const T*>(p.x.data) + at(p.x));
#pragma unroll
  for (int e = 0; e < kN; ++e) word.channel[e] = from_float<T>(to_float(word.channel[e]) * gate(e));
  *reinterpret_cast<Word<T, kN>*>(static_cast<T*>(p.scaled.data) + at(p.scaled)) = word;
}

// This CTA's share of x times the gates [C] in shared memory: pixels that it has read before.
template <class T>
__device__ __forceinline__ void scale_share(const SqueezeExciteParams& p, const ImagePlan& plan, int n, int active,
                                            int rank, const int* blocks, const float* gates) {
  constexpr int kN = kLanes<T>, kTogether = 4;
  const int64_t c = static_cast<int64_t>(threadIdx.x - plan.words.quotient(threadIdx.x) * plan.words.divisor) * kN;
  float own[kN];
#pragma unroll
  for (int e = 0; e < kN; ++e) own[e] = gates[c + e];
  for_share<kTogether>(p.x, p.grid, plan, active, rank, blocks,
                       [&](const auto& row, const auto& column, const auto& in) {
#pragma unroll
                         for (int i = 0; i < kTogether; ++i)
                           if (in[i]) scale_word<T, kN>(p, n, row[i], column[i], c, [&](int e) { return own[e]; });
                       });
}

// kFolds: the launch sums the pixels itself, into `values`, and multiplies them by the gate where p.scaled is there.
template <class T, bool kFolds>
__global__ void __launch_bounds__(kThreads, kFolds ? 2 : 1)  // clusters of 16 images fit a device at once
    gate_kernel(const __grid_constant__ SqueezeExciteParams p, const __grid_constant__ GatePlan plan,
                const __grid_constant__ ImagePlan image, int slices, float* values, float* means) {
  extern __shared__ __align__(16) float shared[];  // the averages, the hidden numbers, the gates; kFolds: then blocks
  const int rank = static_cast<int>(blockIdx.x) % plan.ranks, n = static_cast<int>(blockIdx.x) / plan.ranks;
  const int C = static_cast<int>(p.x.size[1]), R = static_cast<int>(p.hidden), thread = threadIdx.x;
  // Of a launch that folds, `means` are the counts of pixels, which no average here asks for.
  float* const hidden = means + p.x.size[0] * (kFolds ? kCluster : C) + int64_t{n} * R;
  constexpr int kHeld = kFolds ? 4 : 8;
  Layer<T, kHeld> first = {static_cast<const T*>(p.weight1), p.bias1, p.bias_dtype, R, C, 0, 0, plan.product[0]};
  Layer<T, kHeld> second = {static_cast<const T*>(p.weight2), p.bias2, p.bias_dtype, C, R, 0, 0, plan.product[1]};
  int* const blocks = reinterpret_cast<int*>(shared + max(C, R));
  int active = 0;
  if (!plan.settled) grid_dependency_wait();
  if constexpr (kFolds)
    active = list_image(p.block_map, p.grid, n, blocks);
  else if (plan.steps & kHidden)
    first.begin(rank);
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();

  if constexpr (kFolds) {
    using Fold = SumFold<kLanes<T>>;
    __shared__ Fold folds[kThreads];
    float* const found = values + int64_t{n} * kCluster * C;
    fold_image<T, Fold>(p.x, p.grid, image, n, active, rank, blocks, folds, found, means + int64_t{n} * kCluster);
    first.begin(rank);
    meet_cluster();
    const float pixels = static_cast<float>(p.x.size[2] * p.x.size[3]);
    for (int c = thread; c < C; c += kThreads) {
      float sum = 0.f;
#pragma unroll
      for (int r = 0; r < kCluster; ++r) sum += found[int64_t{r} * C + c];
      shared[c] = sum / pixels;
    }
  } else {
    float* const mean = means + int64_t{n} * C;
    if (plan.steps & kAverages) average<T>(p, plan, slices, values, mean, rank, n);
    if (plan.steps == kAverages) return;
    if (plan.steps == kEveryStep) meet_cluster();
    if (plan.steps & kHidden)
      for (int c = thread; c < C; c += kThreads) shared[c] = mean[c];
  }
  __syncthreads();
  if (plan.steps & kHidden)
    first.run(plan.ranks, shared, [&](int r, float sum) { hidden[r] = gate_step(p.activation, sum); });
  if (plan.steps == kHidden) return;
  second.begin(rank);
  if (plan.steps == kEveryStep) meet_cluster();

  for (int r = thread; r < R; r += kThreads) shared[r] = hidden[r];
  __syncthreads();
  T* const y = static_cast<T*>(p.y.data) + n * p.y.stride[0];
  second.run(plan.ranks, shared,
             [&](int c, float sum) { y[c * p.y.stride[1]] = from_float<T>(gate_step(p.gate, sum)); });
  if constexpr (kFolds) {
    if (!p.scaled.data) return;
    meet_cluster();
    for (int c = thread; c < C; c += kThreads) shared[c] = to_float(y[c * p.y.stride[1]]);
    __syncthreads();
    scale_share<T>(p, image, n, active, rank, blocks, shared);
  }
}

// Where the launch that makes the gates does not scale, another one does: a CTA takes so many words of a block.
template <class T, int kN>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ SqueezeExciteParams p) {
  grid_dependency_wait();
  grid_dependency_release();
  const int words = static_cast<int>(p.x.size[1] / kN), blocks = p.grid.count[0] * p.grid.count[1];
  const int height = p.grid.size[0], width = p.grid.size[1];
  const int64_t of_block = int64_t{height} * width * words, parts = (of_block + kThreads - 1) / kThreads;
  for (int64_t part = blockIdx.x; part < p.x.size[0] * blocks * parts; part += gridDim.x) {
    const int64_t block = part / parts, n = block / blocks, i = (part - block * parts) * kThreads + threadIdx.x;
    if (p.block_map[block] < 0 || i >= of_block) continue;
    const int at = static_cast<int>(block - n * blocks), pixel = static_cast<int>(i / words);
    const int row = at / p.grid.count[1] * height + pixel / width,
              column = at % p.grid.count[1] * width + pixel % width;
    if (row >= p.x.size[2] || column >= p.x.size[3]) continue;
    const int64_t c = (i - int64_t{pixel} * words) * kN;
    scale_word<T, kN>(p, n, row, column, c, [&](int e) {
      return to_float(static_cast<const T*>(p.y.data)[n * p.y.stride[0] + (c + e) * p.y.stride[1]]);
    });
  }
}

template <class T>
Status launch_scale(const SqueezeExciteParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t C = p.x.size[1];
  const bool words = channels_vectorize(p.scaled) && C % kLanes<T> == 0 && channels_vectorize(p.x);
  const double all =
      static_cast<double>(p.x.size[0]) * p.x.size[2] * p.x.size[3] * C / (words ? kLanes<T> : 1) / kThreads +
      p.x.size[0];
  const dim3 ctas(static_cast<unsigned>(std::min(all + 1, device.sm_count * 8.)));
  const auto kernel = words ? scale_kernel<T, kLanes<T>> : scale_kernel<T, 1>;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, ctas, dim3(kThreads), 0, stream, p));
  return ok_status();
}

// As many threads a row as let a CTA take all of its rows at once.
template <class T>
ProductPlan plan_product(const void* data, int64_t rows, int64_t row, int ranks) {
  ProductPlan plan = {32, kThreads / 32, reinterpret_cast<uintptr_t>(data) % 16 == 0 && row % kLanes<T> == 0};
  for (; plan.lanes > 1 && int64_t{plan.rows} * ranks < rows; plan.rows *= 2) plan.lanes /= 2;
  return plan;
}

template <class T>
Status launch_type(const SqueezeExciteParams& p, void* workspace, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t C = p.x.size[1], R = p.hidden;
  constexpr int ranks = kCluster;
  const ProductPlan products[] = {plan_product<T>(p.weight1, R, C, ranks), plan_product<T>(p.weight2, C, R, ranks)};
  GatePlan plan = {ranks, kEveryStep, 5, inputs_settled(), {products[0], products[1]}};
  while (plan.log2_lanes < 8 && int64_t{plan.ranks} << plan.log2_lanes < C) ++plan.log2_lanes;
  float* const values = static_cast<float*>(workspace);
  ImagePlan image;
  const bool vectors = !p.scaled.data || channels_vectorize(p.scaled);
  if (vectors && plan_image<T>(p.x, p.grid, device, &image)) {
    constexpr int kMost = static_cast<int>((kMostGateChannels + kMostImageBlocks) * sizeof(float));
    const int64_t shared = (std::max(C, R) + int64_t{p.grid.count[0]} * p.grid.count[1]) * sizeof(float);
    SBNET_TRY((allow_shared<gate_kernel<T, true>>(kOp, device, kMost)));
    // A few images are 8 multiprocessors each: where their shares are large, all of the device scales.
    constexpr int64_t kMostBytes = 96 * 1024;
    const int64_t share = C * p.x.size[2] * p.x.size[3] * static_cast<int64_t>(sizeof(T)) / ranks;
    const bool apart = p.scaled.data && share > kMostBytes && p.x.size[0] * ranks * 2 <= device.sm_count;
    SqueezeExciteParams given = p;
    if (apart) given.scaled = {};
    SBNET_TRY(launch_images(kOp, gate_kernel<T, true>, p.x.size[0], ranks, shared, stream, given, plan, image, 0,
                            values, values + p.x.size[0] * kCluster * C));
    return apart ? launch_scale<T>(p, device, stream) : ok_status();
  }
  const FoldParts parts = cuda_parts(p);
  SBNET_TRY((launch_fold<T, SumFold>(kOp, parts, workspace, device, stream)));
  const size_t shared = static_cast<size_t>(std::max(C, R)) * sizeof(float);
  SBNET_TRY((allow_shared<gate_kernel<T, false>>(kOp, device, static_cast<int>(kMostGateChannels * sizeof(float)))));
  const int slices = static_cast<int>(parts.slices);
  float* const means = gate_means(parts, workspace);
  const auto gates = gate_kernel<T, false>;
  if (has_clusters(device)) {
    SBNET_TRY(launch_images(kOp, gates, p.x.size[0], ranks, shared, stream, p, plan, image, slices, values, means));
  } else {
    for (const int step : {kAverages, kHidden, kGates}) {
      plan.steps = step;
      SBNET_CUDA_TRY(kOp, launch_dependent(device, gates, dim3(static_cast<unsigned>(p.x.size[0] * ranks)),
                                           dim3(kThreads), shared, stream, p, plan, image, slices, values, means));
    }
  }
  return p.scaled.data ? launch_scale<T>(p, device, stream) : ok_status();
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_squeeze_excite2d_cuda(const sbnet::SqueezeExciteParams* params, void* workspace,
                                                 void* stream_handle) {
  using namespace sbnet;
  return run_fold(kOp, *params, stream_handle, [&](auto t, const DeviceInfo& device, cudaStream_t stream) {
    return launch_type<decltype(t)>(*params, workspace, device, stream);
  });
}

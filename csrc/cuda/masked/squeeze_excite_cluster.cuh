// sparse_squeeze_excite2d on Hopper in one launch: a cluster of CTAs takes an image. Each sums a share of the active
// pixels, then, when all have, gives some hidden numbers, then some of the gates; what they tell one another goes
// through the workspace. Pixels are multiplied by the gate while they are in the cache. See squeeze_excite.cu.
#pragma once
#include "core/masked/squeeze_excite.h"
#include "cuda/masked/image_fold.cuh"

namespace sbnet::gate_cluster {

constexpr int kThreads = kImageThreads, kCluster = kImageRanks;

// A product: so many neighbouring threads take a row of the matrix, in words of 16 bytes or an element at a time.
struct ProductPlan {
  int lanes, rows;  // rows that a CTA takes at once
  bool words;
};

struct GatePlan {
  bool settled;  // core/settled.h
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

template <class T>
__global__ void __launch_bounds__(kThreads, 2)  // clusters of 16 images fit a device at once
    gate_kernel(const __grid_constant__ SqueezeExciteParams p, const __grid_constant__ GatePlan plan,
                const __grid_constant__ ImagePlan image, float* values, float* numbers) {
  extern __shared__ __align__(16) float shared[];  // the averages, the hidden numbers, the gates; then blocks
  __shared__ SumFold<kLanes<T>> folds[kThreads];
  const int rank = static_cast<int>(blockIdx.x) % kCluster, n = static_cast<int>(blockIdx.x) / kCluster;
  const int C = static_cast<int>(p.x.size[1]), R = static_cast<int>(p.hidden), thread = threadIdx.x;
  float *const counts = numbers + int64_t{n} * kCluster, *const hidden =
                                                             numbers + p.x.size[0] * kCluster + int64_t{n} * R;
  float* const found = values + int64_t{n} * kCluster * C;
  Layer<T, 4> first = {static_cast<const T*>(p.weight1), p.bias1, p.bias_dtype, R, C, 0, 0, plan.product[0]};
  Layer<T, 4> second = {static_cast<const T*>(p.weight2), p.bias2, p.bias_dtype, C, R, 0, 0, plan.product[1]};
  int* const blocks = reinterpret_cast<int*>(shared + max(C, R));
  if (!plan.settled) grid_dependency_wait();
  const int active = list_image(p.block_map, p.grid, n, blocks);
  if (plan.settled) grid_dependency_wait();
  grid_dependency_release();

  fold_image<T, SumFold<kLanes<T>>>(p.x, p.grid, image, n, active, rank, blocks, folds, found, counts);
  first.begin(rank);
  meet_cluster();
  const float pixels = static_cast<float>(p.x.size[2] * p.x.size[3]);
  for (int c = thread; c < C; c += kThreads) {
    float sum = 0.f;
#pragma unroll
    for (int r = 0; r < kCluster; ++r) sum += found[int64_t{r} * C + c];
    shared[c] = sum / pixels;
  }
  __syncthreads();
  first.run(kCluster, shared, [&](int r, float sum) { hidden[r] = gate_step(p.activation, sum); });
  second.begin(rank);
  meet_cluster();

  for (int r = thread; r < R; r += kThreads) shared[r] = hidden[r];
  __syncthreads();
  T* const y = static_cast<T*>(p.y.data) + n * p.y.stride[0];
  second.run(kCluster, shared, [&](int c, float sum) { y[c * p.y.stride[1]] = from_float<T>(gate_step(p.gate, sum)); });
  if (!p.scaled.data) return;
  meet_cluster();
  for (int c = thread; c < C; c += kThreads) shared[c] = to_float(y[c * p.y.stride[1]]);
  __syncthreads();
  scale_share<T>(p, image, n, active, rank, blocks, shared);
}

// As many threads a row as let a CTA take all of its rows at once.
template <class T>
ProductPlan plan_product(const void* data, int64_t rows, int64_t row) {
  ProductPlan plan = {32, kThreads / 32, reinterpret_cast<uintptr_t>(data) % 16 == 0 && row % kLanes<T> == 0};
  for (; plan.lanes > 1 && int64_t{plan.rows} * kCluster < rows; plan.rows *= 2) plan.lanes /= 2;
  return plan;
}

// Is one launch the faster way? A few images are 8 multiprocessors each: where their shares are large, all of the
// device is faster, in two.
template <class T>
bool plan_gate(const SqueezeExciteParams& p, const DeviceInfo& device, ImagePlan* image) {
  constexpr int64_t kMostBytes = 96 * 1024;
  const int64_t share = p.x.size[1] * p.x.size[2] * p.x.size[3] * static_cast<int64_t>(sizeof(T)) / kCluster;
  if (share > kMostBytes && p.x.size[0] * kCluster * 4 <= device.sm_count) return false;
  return (!p.scaled.data || channels_vectorize(p.scaled)) && plan_image<T>(p.x, p.grid, device, image);
}

template <class T>
Status launch_gate(const char* op, const SqueezeExciteParams& p, const ImagePlan& image, void* workspace,
                   const DeviceInfo& device, cudaStream_t stream) {
  const int64_t C = p.x.size[1], R = p.hidden;
  const GatePlan plan = {inputs_settled(), {plan_product<T>(p.weight1, R, C), plan_product<T>(p.weight2, C, R)}};
  constexpr int kMost = static_cast<int>((kMostGateChannels + kMostImageBlocks) * sizeof(float));
  const int64_t shared = (std::max(C, R) + int64_t{p.grid.count[0]} * p.grid.count[1]) * sizeof(float);
  SBNET_TRY((allow_shared<gate_kernel<T>>(op, device, kMost)));
  float* const values = static_cast<float*>(workspace);
  return launch_images(op, gate_kernel<T>, p.x.size[0], kCluster, shared, stream, p, plan, image, values,
                       values + p.x.size[0] * kCluster * C);
}

}  // namespace sbnet::gate_cluster

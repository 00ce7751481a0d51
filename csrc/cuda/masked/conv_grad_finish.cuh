// The end of a weight gradient's tile: sums of the bias, the parts of a cluster added up, results written.
#pragma once
#include "cuda/masked/conv_grad.cuh"

namespace sbnet::portable {
namespace {

// What a CTA computes. Parts of a tile are neighbours, as clusters are.
struct GradCta {
  uint32_t tile_n, tile_m, group;
  int part;

  __device__ __forceinline__ GradCta(const GradParts& parts, const FastDiv& tiles_m, const FastDiv& tiles_n) {
    const uint32_t most = static_cast<uint32_t>(parts.most), tile = blockIdx.x / most;
    part = static_cast<int>(blockIdx.x - tile * most);
    uint32_t rest;
    tiles_n.divmod(tile, &rest, &tile_n);
    tiles_m.divmod(rest, &group, &tile_m);
  }
};

// Sums go into the CTA's part of the workspace or, where nobody else has any, are the gradient itself.
template <class T>
struct GradSink {
  const ConvWeightGradParams& params;
  const GradParts& parts;
  const FastDiv &channels, &taps_per_row;
  float* workspace;
  int stored;

  __device__ __forceinline__ void put(int64_t k, uint32_t column, float sum) const {
    if (parts.stored() > 1)
      parts.sums(workspace, stored)[k * parts.columns + column] = sum;
    else if (params.weight.dtype == DType::kF32)
      store_gradient<float>(params.weight, channels, taps_per_row, k, column, sum);
    else
      store_gradient<T>(params.weight, channels, taps_per_row, k, column, sum);
  }
  // Of four neighbouring columns.
  __device__ __forceinline__ void put(int64_t k, uint32_t column, const float (&sums)[4]) const {
    if (parts.stored() > 1 && parts.columns % 4 == 0)
      *reinterpret_cast<float4*>(parts.sums(workspace, stored) + k * parts.columns + column) =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    else
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < parts.columns) put(k, column + i, sums[i]);
  }
  __device__ __forceinline__ void put_bias(int64_t k, float sum) const {
    (parts.stored() > 1 ? parts.biases(workspace, stored, params.conv.weight.size[0]) : params.bias)[k] = sum;
  }
};

// Sums of dy over the pixels of stages, which lie in rows of kRowBytes with word w at w ^ (row % 8).
template <class T, int kWords, int kPixels, int kRowBytes, int kThreads>
struct BiasSums {
  static constexpr int kStep = kThreads / kWords;  // threads that share a word
  float sums[kLanes<T>] = {};

  __device__ __forceinline__ void add(const char* grad) {
    const int word = threadIdx.x % kWords;
#pragma unroll
    for (int i = 0; i < kPixels / kStep; ++i) {
      const int row = threadIdx.x / kWords + i * kStep;
      const uint4 all = *reinterpret_cast<const uint4*>(grad + row * kRowBytes + ((word ^ (row % 8)) << 4));
      const T* part = reinterpret_cast<const T*>(&all);
#pragma unroll
      for (int e = 0; e < kLanes<T>; ++e) sums[e] += to_float(part[e]);
    }
  }
  // The whole CTA; `room` holds kThreads words of floats.
  __device__ __forceinline__ void gather(float* room, float* biases) const {
    constexpr int kOutputs = kWords * kLanes<T>;
#pragma unroll
    for (int e = 0; e < kLanes<T>; ++e) room[threadIdx.x * kLanes<T> + e] = sums[e];
    __syncthreads();
    for (int k = threadIdx.x; k < kOutputs; k += kThreads) {
      float sum = 0.f;
      for (int step = 0; step < kStep; ++step) sum += room[step * kOutputs + k];
      biases[k] = sum;
    }
    __syncthreads();
  }
};

// Of sums in shared memory: eight floats more than a row has, against bank conflicts.
template <int kColumns>
constexpr int kSumsPitch = kColumns + 8;
constexpr int sums_bytes(int rows, int columns) { return rows * (columns + 8) * 4; }

// The parts of a cluster add theirs in order: each some quads of the tile, the first the biases.
template <int kRows, int kColumns, int kThreads, class Put, class PutBias>
__device__ __forceinline__ void add_in_cluster(const float* own, const float* biases, int parts, bool with_bias,
                                               const Put& put, const PutBias& put_bias) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto meet = [] {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  };
  const auto there = [](const float* mine, int rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
    return address;
  };
  meet();
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  constexpr int kQuads = kColumns / 4;
  for (int e = static_cast<int>(rank) * kThreads + threadIdx.x; e < kRows * kQuads; e += parts * kThreads) {
    const int m = e / kQuads, n = e % kQuads * 4;
    float values[4][4], sums[4] = {};
#pragma unroll
    for (int q = 0; q < 4; ++q)
      if (q < parts)
        asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(values[q][0]), "=f"(values[q][1]), "=f"(values[q][2]), "=f"(values[q][3])
                     : "r"(there(own + m * kSumsPitch<kColumns> + n, q))
                     : "memory");
#pragma unroll
    for (int q = 0; q < 4; ++q)
      if (q < parts)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += values[q][i];
    put(m, n, sums);
  }
  if (with_bias && rank == 0)
    for (int k = threadIdx.x; k < kRows; k += kThreads) {
      float sum = 0.f;
      for (int q = 0; q < parts; ++q) {
        float value;
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there(biases + k, q)) : "memory");
        sum += value;
      }
      put_bias(k, sum);
    }
  meet();  // nobody leaves while others read
#endif
}

// each(visit) shows the thread's sums as visit(row, column, sum). Shared memory is free again; biases: [kRows], there.
template <int kRows, int kColumns, int kThreads, class Each, class Put, class PutBias>
__device__ __forceinline__ void finish_tile(char* shared, const float* biases, int cluster, bool with_bias,
                                            const Each& each, const Put& put, const PutBias& put_bias) {
  if (cluster == 1) {
    each(put);
    if (with_bias)
      for (int k = threadIdx.x; k < kRows; k += kThreads) put_bias(k, biases[k]);
    return;
  }
  float* const own = reinterpret_cast<float*>(shared);
  each([&](int m, int n, float sum) { own[m * kSumsPitch<kColumns> + n] = sum; });
  add_in_cluster<kRows, kColumns, kThreads>(own, biases, cluster, with_bias, put, put_bias);
}

// One CTA a part and tile.
template <auto kKernel, class Plan>
Status launch_grad(const ConvWeightGradParams& p, const Plan& plan, const GradParts& parts, int64_t tiles, int threads,
                   int bytes, int most_bytes, float* workspace, const DeviceInfo& device, cudaStream_t stream) {
  SBNET_CHECK(tiles <= (INT32_MAX / 2) / parts.most, "%s: weight: expected at most 2^30 tiles, got %lld", kGradOp,
              static_cast<long long>(tiles));
  SBNET_TRY(allow_shared<kKernel>(kGradOp, device, most_bytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles * parts.most));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(parts.cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = !has_clusters(device) ? 0 : parts.cluster > 1 ? 2 : 1;
  SBNET_CUDA_TRY(kGradOp, cudaLaunchKernelEx(&config, kKernel, p, plan, workspace));
  return ok_status();
}

}  // namespace
}  // namespace sbnet::portable

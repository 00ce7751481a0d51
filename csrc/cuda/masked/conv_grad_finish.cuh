// The end of a weight gradient's tile: sums of the bias, the parts of a cluster added up, results written.
#pragma once
#include <utility>

#include "cuda/masked/conv_grad.cuh"

namespace sbnet::portable {
namespace {

// The arguments of a launch.
template <class Plan_>
struct GradLayer {
  using Plan = Plan_;
  ConvWeightGradParams params;
  Plan plan;
  float* workspace;
};
template <class Layer_, int kMost_>
struct GradLaunch {
  using Layer = Layer_;
  static constexpr int kMost = kMost_;
  uint32_t ends[kMost];  // CTAs of this layer and those before it; past the last one all
  Layer layer[kMost];

  // The one that this CTA is of; *number: which of the layer's CTAs it is. A copy in shared memory was slower.
  __device__ __forceinline__ const Layer& own(uint32_t* number) const {
    int of = 0;
#pragma unroll
    for (int k = 0; k < kMost - 1; ++k) of += blockIdx.x >= ends[k];
    *number = blockIdx.x - (of ? ends[of - 1] : 0);
    return layer[of];
  }
};

// What a CTA computes. Parts of a tile are neighbours, as clusters are.
struct GradCta {
  uint32_t tile_n, tile_m, group;
  int part;

  __device__ __forceinline__ GradCta(uint32_t number, const GradParts& parts, const FastDiv& tiles_m,
                                     const FastDiv& tiles_n) {
    const uint32_t most = static_cast<uint32_t>(parts.most), tile = number / most;
    part = static_cast<int>(number - tile * most);
    uint32_t rest;
    tiles_n.divmod(tile, &rest, &tile_n);
    tiles_m.divmod(rest, &group, &tile_m);
  }
};

// Sums go into the CTA's part of the workspace or, where there is one part alone, are the gradient itself.
template <class T>
struct GradSink {
  const ConvWeightGradParams& params;
  const GradParts& parts;
  const FastDiv &channels, &taps_per_row;
  float* workspace;
  int stored;

  __device__ __forceinline__ void put_one(int64_t k, uint32_t column, float sum) const {
    if (parts.stored() > 1)
      parts.sums(workspace, stored)[k * parts.columns + column] = sum;
    else if (params.weight.dtype == DType::kF32)
      store_gradient<float>(params.weight, channels, taps_per_row, k, column, sum);
    else
      store_gradient<T>(params.weight, channels, taps_per_row, k, column, sum);
  }
  // Of four neighbouring columns.
  __device__ __forceinline__ void put(int64_t k, uint32_t column, const float (&sums)[4]) const {
    if (parts.quads)
      *reinterpret_cast<float4*>(
          (parts.stored() > 1 ? parts.sums(workspace, stored) : static_cast<float*>(params.weight.data)) +
          k * parts.columns + column) = make_float4(sums[0], sums[1], sums[2], sums[3]);
    else
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (column + i < parts.columns) put_one(k, column + i, sums[i]);
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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t there(const float* mine, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  return address;
}
__device__ __forceinline__ float4 read_quad(const float* mine, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there(mine, rank))
               : "memory");
  return v;
}
__device__ __forceinline__ float read_one(const float* mine, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there(mine, rank)) : "memory");
  return v;
}
#else
constexpr bool kClusters = false;
__device__ __forceinline__ void meet_cluster() {}
__device__ __forceinline__ float4 read_quad(const float* mine, int) { return *reinterpret_cast<const float4*>(mine); }
__device__ __forceinline__ float read_one(const float* mine, int) { return *mine; }
#endif

// each(visit) shows the thread's sums as visit(row, column, sum). The parts of a cluster add theirs in order, each some
// quads of the tile, the first the biases, and put what they find. Shared memory is free again; biases: [kRows], there.
template <int kRows, int kColumns, int kThreads, class Each, class Put, class PutBias>
__device__ __forceinline__ void finish_tile(char* shared, const float* biases, const GradParts& plan, int part,
                                            bool with_bias, const Each& each, const Put& put, const PutBias& put_bias) {
  constexpr int kPitch = kSumsPitch<kColumns>, kQuads = kColumns / 4;
  float* const own = reinterpret_cast<float*>(shared);
  each([&](int m, int n, float sum) { own[m * kPitch + n] = sum; });
  const int parts = kClusters ? plan.cluster : 1, rank = part % parts;
  if (parts > 1)
    meet_cluster();
  else
    __syncthreads();
  for (int e = rank * kThreads + threadIdx.x; e < kRows * kQuads; e += parts * kThreads) {
    const int m = e / kQuads, n = e % kQuads * 4;
    const float* const at = own + m * kPitch + n;
    float4 found[4];
    if (parts > 1) {
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (q < parts) found[q] = read_quad(at, q);
    } else {
      found[0] = *reinterpret_cast<const float4*>(at);
    }
    float sums[4] = {found[0].x, found[0].y, found[0].z, found[0].w};
#pragma unroll
    for (int q = 1; q < 4; ++q)
      if (q < parts) sums[0] += found[q].x, sums[1] += found[q].y, sums[2] += found[q].z, sums[3] += found[q].w;
    put(m, n, sums);
  }
  if (with_bias && rank == 0)
    for (int k = threadIdx.x; k < kRows; k += kThreads) {
      float sum = biases[k];
      for (int q = 1; q < parts; ++q) sum += read_one(biases + k, q);
      put_bias(k, sum);
    }
  if (parts > 1) meet_cluster();  // until all have read
}

template <class Launch, size_t... kLayers>
Launch all_of(const typename Launch::Layer& layer, std::index_sequence<kLayers...>) {
  return {{}, {(static_cast<void>(kLayers), layer)...}};
}

// One CTA a part and tile. plan_of(work): its Plan.
template <auto kKernel, class Launch, class PlanOf>
Status launch_grad(const GradWork* layers, int count, const GradKernel& kernel, const PlanOf& plan_of, int threads,
                   int bytes, const DeviceInfo& device, cudaStream_t stream) {
  const auto layer_of = [&](const GradWork& w) ->
      typename Launch::Layer { return {w.params, plan_of(w), w.workspace}; };
  Launch launch = all_of<Launch>(layer_of(layers[0]), std::make_index_sequence<Launch::kMost>());
  int64_t ctas = 0;
  for (int k = 0; k < Launch::kMost; ++k) {
    if (k < count) {
      ctas += kernel.tiles(layers[k].params) * layers[k].parts.most;
      launch.layer[k] = layer_of(layers[k]);
    }
    SBNET_CHECK(ctas <= INT32_MAX / 2, "%s: weight: expected at most 2^30 tiles, got %lld", kGradOp,
                static_cast<long long>(ctas));
    launch.ends[k] = static_cast<uint32_t>(ctas);
  }
  SBNET_TRY(allow_shared<kKernel>(kGradOp, device, bytes));
  const int cluster = layers[0].parts.cluster;  // of one layer: layers that share a launch have none
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = !has_clusters(device) ? 0 : cluster > 1 ? 2 : 1;
  SBNET_CUDA_TRY(kGradOp, cudaLaunchKernelEx(&config, kKernel, launch));
  return ok_status();
}

}  // namespace
}  // namespace sbnet::portable

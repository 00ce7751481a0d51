// sparse_conv2d_weight_grad on every CUDA device since sm_80: dW[K, (r, s, c)] = dy[pixels, K]^T x[pixels, (r, s, c)],
// a GEMM whose reduction runs over the list's pixels and whose right operand is gathered from x.
//
// A CTA owns kTile output channels by kTile columns of one group, and a part of the list. A pipeline stage holds 32
// pixels of both operands, a pixel a row, in 16-byte words at position w ^ (row % 8) of their eight. Both operands lie
// pixel by pixel, so that ldmatrix transposes both. float32 goes to the tensor cores as tf32, if that is allowed, or is
// multiplied as it is.
#include "cuda/capability.h"
#include "cuda/masked/conv_grad.cuh"
#include "cuda/masked/conv_grad_piece.cuh"

namespace sbnet::portable {
namespace {

constexpr int kChunk = 32;  // pixels of a stage
constexpr int kStages = 4;
constexpr int kLeastChunks = 8;  // of a part: fewer would be more work to add than to sum

// Where a pixel lies in dy and in x.
struct alignas(16) Entry {
  Source source;
  int64_t grad;  // bytes; < 0 for an empty entry
  int64_t unused;
};

struct GradPlan {
  GradParts parts;
  Reduction columns;
  FastDiv tiles_m, tiles_n, channels;
  int32_t group_inputs, group_outputs;
  bool words_of_grad;  // may dy be read in 16-byte words?

  GradPlan(const ConvWeightGradParams& p, const GradParts& parts, int tile, int unit_channels)
      : parts(parts),
        columns(p.conv, p.conv.weight.size[1], unit_channels),
        tiles_m((p.conv.weight.size[0] / p.conv.groups + tile - 1) / tile),
        tiles_n((parts.columns + tile - 1) / tile),
        channels(p.conv.weight.size[1]),
        group_inputs(static_cast<int32_t>(p.conv.weight.size[1])),
        group_outputs(static_cast<int32_t>(p.conv.weight.size[0] / p.conv.groups)),
        words_of_grad(false) {}
};

// kTile x kTile of dW. Four warps, two by two, of 32 x 32 each; or eight, two by four, of 64 x 32.
template <class T, int kTile, bool kElements>
struct GradTile {
  static constexpr int kThreads = kTile == 128 ? 256 : 128;
  static constexpr int kRowBytes = kTile * static_cast<int>(sizeof(T));
  static constexpr int kStage = kChunk * kRowBytes;  // of one operand
  static constexpr int kWords = kRowBytes / 16, kRowsPerPass = kThreads / kWords, kPasses = kChunk / kRowsPerPass;
  static constexpr int kTables = kStages + 1;
  static constexpr int kEntries = 2 * kStages * kStage;
  static constexpr int kBytes = kEntries + kTables * kChunk * static_cast<int>(sizeof(Entry));
  // What the parts of a cluster tell one another lies where the stages were, the biases where the tables were.
  static_assert(kTile * kTile * 4 <= kEntries && kTile * 4 <= kBytes - kEntries);
  static_assert(kPasses >= 1 && kBytes <= 99 * 1024, "the least that a device since sm_80 has");
};

// Fetches a thread's word of each of its rows.
template <class T, int kTile, bool kElements>
struct GradLoader {
  using Tile = GradTile<T, kTile, kElements>;
  static constexpr int kUnits = kElements ? kLanes<T> : 1;
  const Conv2dParams& p;
  const GradPlan& plan;
  const char *x, *grad;  // of the group's first channel, of the word's first output channel
  Tap tap[kUnits];
  int word, row0, outputs;  // outputs that the word has

  __device__ __forceinline__ GradLoader(const Conv2dParams& p, const GradPlan& plan, int group, int64_t k, int column)
      : p(p), plan(plan), word(threadIdx.x % Tile::kWords), row0(threadIdx.x / Tile::kWords) {
    const int64_t first = k + word * kLanes<T>;  // within the group
    outputs = static_cast<int>(min(max(plan.group_outputs - first, int64_t{0}), int64_t{kLanes<T>}));
    grad = static_cast<const char*>(p.y.data) +
           (int64_t{group} * plan.group_outputs + first) * p.y.stride[1] * static_cast<int>(sizeof(T));
    x = static_cast<const char*>(p.x.data) +
        int64_t{group} * plan.group_inputs * p.x.stride[1] * static_cast<int>(sizeof(T));
    const int unit = column / plan.columns.unit_channels + word * kUnits;
#pragma unroll
    for (int e = 0; e < kUnits; ++e) {
      tap[e] = tap_of(p, plan.columns, unit + e);
      tap[e].x_offset *= static_cast<int>(sizeof(T));
    }
  }
  __device__ __forceinline__ void fetch(const Entry* entries, char* to_grad, char* to_x) const {
#pragma unroll
    for (int pass = 0; pass < Tile::kPasses; ++pass) {
      const int row = row0 + pass * Tile::kRowsPerPass;
      const Source source = load_source(&entries[row].source);
      const int64_t at = entries[row].grad;
      const int to = row * Tile::kRowBytes + ((word ^ (row % 8)) << 4);
      if (!kElements || plan.words_of_grad) {
        cp_async_16(shared_address(to_grad + to), grad + at, at >= 0 && outputs > 0);
      } else {
        uint4 all{0, 0, 0, 0};
        T* part = reinterpret_cast<T*>(&all);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e)
          if (at >= 0 && e < outputs) part[e] = reinterpret_cast<const T*>(grad + at)[e * p.y.stride[1]];
        *reinterpret_cast<uint4*>(to_grad + to) = all;
      }
      if constexpr (!kElements) {
        cp_async_16(shared_address(to_x + to), x + source.offset + tap[0].x_offset, reads_plane(p, source, tap[0]));
      } else {
        uint4 all{0, 0, 0, 0};
        T* part = reinterpret_cast<T*>(&all);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e)
          if (reads_plane(p, source, tap[e]))
            part[e] = *reinterpret_cast<const T*>(x + source.offset + tap[e].x_offset);
        *reinterpret_cast<uint4*>(to_x + to) = all;
      }
    }
  }
};

// The parts of a cluster add theirs in order: each some rows of the tile, the first the biases.
template <int kTile, int kThreads, class Put, class PutBias>
__device__ __forceinline__ void add_in_cluster(const float* own, const float* biases, int parts, bool with_bias,
                                               const Put& put, const PutBias& put_bias) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto meet = [] {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  };
  const auto read = [](const float* mine, int rank) {
    uint32_t there;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
  };
  meet();
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int rows = kTile / parts;
  for (int e = threadIdx.x; e < rows * kTile; e += kThreads) {
    const int m = static_cast<int>(rank) * rows + e / kTile, n = e % kTile;
    float values[8], sum = 0.f;
#pragma unroll
    for (int q = 0; q < 8; ++q) values[q] = q < parts ? read(own + m * kTile + n, q) : 0.f;
#pragma unroll
    for (int q = 0; q < 8; ++q) sum += values[q];
    put(m, n, sum);
  }
  if (with_bias && rank == 0 && static_cast<int>(threadIdx.x) < kTile) {
    float sum = 0.f;
    for (int q = 0; q < parts; ++q) sum += read(biases + threadIdx.x, q);
    put_bias(threadIdx.x, sum);
  }
  meet();  // nobody leaves while others read
#endif
}

template <class T, Math kMath, int kTile, bool kElements>
__global__ void __launch_bounds__(kTile == 128 ? 256 : 128, kTile == 128 ? 2 : 3)
    conv_grad_kernel(const __grid_constant__ ConvWeightGradParams params, const __grid_constant__ GradPlan plan,
                     float* workspace) {
  using Tile = GradTile<T, kTile, kElements>;
  extern __shared__ __align__(128) char smem[];
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32;
  const int m0 = kTile == 128 ? warp / 4 * 64 : warp / 2 * 32, n0 = kTile == 128 ? warp % 4 * 32 : warp % 2 * 32;

  uint32_t rest, tile_n, group, tile_m;
  plan.tiles_n.divmod(blockIdx.x, &rest, &tile_n);
  plan.tiles_m.divmod(rest, &group, &tile_m);
  const int64_t k = int64_t{tile_m} * kTile;
  const int column = static_cast<int>(tile_n) * kTile;
  const GradLoader<T, kTile, kElements> loader(p, plan, static_cast<int>(group), k, column);

  grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, static_cast<int>(blockIdx.y));
  const int64_t steps = range.end - range.begin;
  const bool last = plan.parts.stored() == 1;  // is what is found here the gradient itself?
  if (steps <= 0 && plan.parts.cluster == 1 && !last) return;

  Entry* const tables = reinterpret_cast<Entry*>(smem + Tile::kEntries);
  const auto tabulate = [&](int64_t step) {
    if (threadIdx.x >= kChunk || step >= steps) return;
    const Pixel pixel = locate_pixel(p, plan.parts.list, (range.begin + step) * kChunk + threadIdx.x, count);
    Entry& to = tables[step % Tile::kTables * kChunk + threadIdx.x];
    to.source = source_of<T>(p, pixel);
    to.grad = pixel.n < 0 ? -1 : pixel_offset(p.y, pixel) * static_cast<int>(sizeof(T));
  };
  const auto fetch = [&](int64_t step) {
    const int slot = static_cast<int>(step % kStages);
    if (step < steps)
      loader.fetch(tables + step % Tile::kTables * kChunk, smem + 2 * slot * Tile::kStage,
                   smem + (2 * slot + 1) * Tile::kStage);
    cp_async_commit();
  };

  constexpr int kM = kTile == 128 ? 4 : 2;
  std::conditional_t<kMath == Math::kFloat, FloatPiece, Piece<T, kMath, kM, 4>> piece;
  piece.clear();
  float bias = 0.f;
  const bool with_bias = params.bias && tile_n == 0 && static_cast<int>(threadIdx.x) < kTile;

  for (int s = 0; s < kStages; ++s) tabulate(s);
  __syncthreads();
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  for (int64_t step = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the stage has landed for all threads, and all are done with the one before
    fetch(step + kStages - 1);
    tabulate(step + kStages);
    const int slot = static_cast<int>(step % kStages);
    const char *grad = smem + 2 * slot * Tile::kStage, *x = grad + Tile::kStage;
    constexpr int kRows = kMath == Math::kHalf ? 16 : kMath == Math::kTf32 ? 8 : 1;
#pragma unroll
    for (int row = 0; row < kChunk; row += kRows) piece.template multiply<Tile::kRowBytes>(grad, x, row, m0, n0);
    piece.end_stage();
    if (with_bias) {
      constexpr int kIn = kLanes<T>;
      float sum = 0.f;
#pragma unroll 8
      for (int row = 0; row < kChunk; ++row)
        sum += to_float(*reinterpret_cast<const T*>(
            grad + row * Tile::kRowBytes + (((threadIdx.x / kIn) ^ (row % 8)) << 4) + threadIdx.x % kIn * sizeof(T)));
      bias += sum;
    }
  }
  cp_async_wait<0>();
  grid_dependency_release();  // not before: who waits for the parts takes room that tiles could have

  const int stored = static_cast<int>(blockIdx.y) / plan.parts.cluster;
  const int64_t first = int64_t{group} * plan.group_outputs + k;  // output channel
  const auto put = [&](int m, int n, float sum) {
    if (k + m >= plan.group_outputs || column + n >= plan.parts.columns) return;
    if (!last)
      plan.parts.sums(workspace, stored)[(first + m) * plan.parts.columns + column + n] = sum;
    else if (params.weight.dtype == DType::kF32)
      store_gradient<float>(params.weight, plan.channels, plan.columns.taps_per_row, first + m, column + n, sum);
    else
      store_gradient<T>(params.weight, plan.channels, plan.columns.taps_per_row, first + m, column + n, sum);
  };
  const auto put_bias = [&](int m, float sum) {
    if (k + m >= plan.group_outputs) return;
    (last ? params.bias : plan.parts.biases(workspace, stored, p.weight.size[0]))[first + m] = sum;
  };
  if (plan.parts.cluster == 1) {
    piece.each(m0, n0, put);
    if (with_bias) put_bias(threadIdx.x, bias);
    return;
  }
  __syncthreads();  // all are done with the stages
  float* const own = reinterpret_cast<float*>(smem);
  float* const biases = reinterpret_cast<float*>(smem + Tile::kEntries);
  piece.each(m0, n0, [&](int m, int n, float sum) { own[m * kTile + n] = sum; });
  if (with_bias) biases[threadIdx.x] = bias;
  add_in_cluster<kTile, Tile::kThreads>(own, biases, plan.parts.cluster, params.bias && tile_n == 0, put, put_bias);
}

// ---- host

bool words_of_grad(const Conv2dParams& p) {
  return channels_vectorize(p.y) && p.weight.size[0] / p.groups % (16 / dtype_size(p.x.dtype)) == 0;
}
// Are 16-byte words of both operands' channels whole, and of one group?
bool in_words(const Conv2dParams& p) {
  return channels_vectorize(p.x) && p.weight.size[1] % (16 / dtype_size(p.x.dtype)) == 0 && words_of_grad(p);
}

// The wide tile reads both operands half as often.
int tile_of(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  const int64_t outputs = c.weight.size[0] / c.groups, columns = c.weight.size[1] * c.weight.size[2] * c.weight.size[3];
  if (c.x.dtype == DType::kF32 || !in_words(c) || outputs <= 64 || columns <= 64) return 64;
  // How much of the tiles is in use.
  const auto use = [&](int64_t tile) {
    const int64_t m = (outputs + tile - 1) / tile * tile, n = (columns + tile - 1) / tile * tile;
    return static_cast<double>(outputs) * columns / (static_cast<double>(m) * n);
  };
  return use(128) >= 0.8 * use(64) ? 128 : 64;
}

GradParts gemm_parts(const ConvWeightGradParams& p, const DeviceInfo& device) {
  const int64_t tile = tile_of(p), outputs = p.conv.weight.size[0] / p.conv.groups;
  const int64_t columns = p.conv.weight.size[1] * p.conv.weight.size[2] * p.conv.weight.size[3];
  const int64_t tiles = p.conv.groups * ((outputs + tile - 1) / tile) * ((columns + tile - 1) / tile);
  GradParts parts(p, tiles, wanted_ctas(device, tile == 128 ? 2 : 3), kChunk, kLeastChunks);
  if (has_clusters(device)) parts.join();
  return parts;
}

template <class T, Math kMath, int kTile, bool kElements>
Status launch(const ConvWeightGradParams& p, const GradParts& parts, float* workspace, const DeviceInfo& device,
              cudaStream_t stream) {
  using Tile = GradTile<T, kTile, kElements>;
  GradPlan plan(p, parts, kTile, kElements ? 1 : kLanes<T>);
  plan.words_of_grad = words_of_grad(p.conv);
  const int64_t tiles = int64_t{plan.tiles_m.divisor} * plan.tiles_n.divisor * p.conv.groups;
  SBNET_CHECK(tiles <= INT32_MAX / 2 && parts.most < 65536, "%s: weight: expected at most 2^30 tiles, got %lld",
              kGradOp, static_cast<long long>(tiles));
  SBNET_TRY((allow_shared<conv_grad_kernel<T, kMath, kTile, kElements>>(kGradOp, device, Tile::kBytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(parts.most));
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kBytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, static_cast<unsigned>(parts.cluster), 1};
  config.attrs = attributes;
  config.numAttrs = !has_clusters(device) ? 0 : parts.cluster > 1 ? 2 : 1;
  SBNET_CUDA_TRY(kGradOp,
                 cudaLaunchKernelEx(&config, conv_grad_kernel<T, kMath, kTile, kElements>, p, plan, workspace));
  return ok_status();
}

template <class T, Math kMath>
Status launch_math(const ConvWeightGradParams& p, const GradParts& parts, float* workspace, const DeviceInfo& device,
                   cudaStream_t stream) {
  if (!in_words(p.conv)) return launch<T, kMath, 64, true>(p, parts, workspace, device, stream);
  if constexpr (kMath == Math::kHalf)
    if (tile_of(p) == 128) return launch<T, kMath, 128, false>(p, parts, workspace, device, stream);
  return launch<T, kMath, 64, false>(p, parts, workspace, device, stream);
}

}  // namespace

}  // namespace sbnet::portable

namespace {
bool lanewise(const sbnet::ConvWeightGradParams& p) { return sbnet::is_depthwise(p.conv.weight, p.conv.groups); }

sbnet::portable::GradParts parts_of(const sbnet::ConvWeightGradParams& p, const sbnet::DeviceInfo& device) {
  return lanewise(p) ? sbnet::portable::depthwise_parts(p, device) : sbnet::portable::gemm_parts(p, device);
}
}  // namespace

int64_t sbnet_sparse_conv2d_weight_grad_workspace_bytes_cuda(const sbnet::ConvWeightGradParams* p) {
  using namespace sbnet;
  DeviceInfo device = {};
  if (!current_device(portable::kGradOp, &device).ok()) return 0;  // the launch says so
  const portable::GradParts parts = parts_of(*p, device);
  return lanewise(*p) || parts.stored() > 1 ? 4 * parts.workspace_floats(p->conv.weight.size[0]) : 0;
}

sbnet::Status sbnet_sparse_conv2d_weight_grad_cuda(const sbnet::ConvWeightGradParams* params, void* workspace,
                                                   void* stream_handle) {
  using namespace sbnet;
  using namespace sbnet::portable;
  const ConvWeightGradParams& p = *params;
  SBNET_TRY(validate(p));
  DeviceInfo device;
  SBNET_TRY(current_device(kGradOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  float* const sums = static_cast<float*>(workspace);
  const GradParts parts = parts_of(p, device);
  if (lanewise(p)) {
    SBNET_TRY(launch_grad_depthwise(p, sums, device, stream));
  } else {
    SBNET_TRY(by_dtype(p.conv.x.dtype, [&](auto t) -> Status {
      using T = decltype(t);
      if constexpr (sizeof(T) == 2)
        return launch_math<T, Math::kHalf>(p, parts, sums, device, stream);
      else
        return p.conv.allow_tf32 ? launch_math<T, Math::kTf32>(p, parts, sums, device, stream)
                                 : launch_math<T, Math::kFloat>(p, parts, sums, device, stream);
    }));
  }
  return lanewise(p) || parts.stored() > 1 ? add_parts(p, parts, sums, device, stream) : ok_status();
}

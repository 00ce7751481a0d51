// Weight gradients of what the other kernels do not take, float32 and channels that are no whole words, on every CUDA
// device since sm_80.
//
// dW[K, (r, s, c)] = dy[pixels, K]^T x[pixels, (r, s, c)] is a GEMM whose reduction runs over the list's pixels and
// whose right operand is gathered from x. A CTA owns 64x64 of one group's, and a part of the list. A pipeline stage
// holds 32 pixels of both operands, a pixel a row, in 16-byte words at position w ^ (row % 8). float32 goes to the
// tensor cores as tf32, if that is allowed, or is multiplied as it is.
#include "cuda/masked/conv_grad_finish.cuh"
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
  PixelList list;
  Reduction columns;
  FastDiv tiles_m, tiles_n, channels;
  int32_t group_inputs, group_outputs;
  bool words_of_grad;  // may dy be read in 16-byte words?

  GradPlan(const ConvWeightGradParams& p, const GradParts& parts, int unit_channels)
      : parts(parts),
        list(p.conv),
        columns(p.conv, p.conv.weight.size[1], unit_channels),
        tiles_m((p.conv.weight.size[0] / p.conv.groups + 63) / 64),
        tiles_n((parts.columns + 63) / 64),
        channels(p.conv.weight.size[1]),
        group_inputs(static_cast<int32_t>(p.conv.weight.size[1])),
        group_outputs(static_cast<int32_t>(p.conv.weight.size[0] / p.conv.groups)),
        words_of_grad(false) {}
};

using ElementsLaunch = GradLaunch<GradLayer<GradPlan>, 1>;

// Four warps, two by two, of 32 x 32 each.
constexpr int kTile = 64, kThreads = 128;
template <class T>
struct GradTile {
  static constexpr int kRowBytes = kTile * static_cast<int>(sizeof(T));
  static constexpr int kStage = kChunk * kRowBytes;  // of one operand
  static constexpr int kWords = kRowBytes / 16, kRowsPerPass = kThreads / kWords, kPasses = kChunk / kRowsPerPass;
  static constexpr int kTables = kStages + 1;
  static constexpr int kTablesAt = 2 * kStages * kStage;
  static constexpr int kBytes = kTablesAt + kTables * kChunk * static_cast<int>(sizeof(Entry));
  // The sums of a cluster's parts lie where the stages were, the biases where the tables were.
  static_assert(sums_bytes(kTile, kTile) <= kTablesAt && kTile * 4 <= kBytes - kTablesAt);
  static_assert(kPasses >= 1 && kBytes <= 99 * 1024, "the least that a device since sm_80 has");
};

// Fetches a thread's word of each of its rows.
template <class T, bool kElements>
struct GradLoader {
  using Tile = GradTile<T>;
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

template <class T, Math kMath, bool kElements>
__global__ void __launch_bounds__(kThreads, 3) conv_grad_kernel(const __grid_constant__ ElementsLaunch launch) {
  using Tile = GradTile<T>;
  extern __shared__ __align__(128) char smem[];
  uint32_t number;
  const auto& layer = launch.own(&number);
  const ConvWeightGradParams& params = layer.params;
  const GradPlan& plan = layer.plan;
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32;
  const int m0 = warp / 2 * 32, n0 = warp % 2 * 32;

  const GradCta cta(number, plan.parts, plan.tiles_m, plan.tiles_n);
  const int64_t k = int64_t{cta.tile_m} * kTile;
  const int column = static_cast<int>(cta.tile_n) * kTile;
  const GradLoader<T, kElements> loader(p, plan, static_cast<int>(cta.group), k, column);

  grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, cta.part);
  const int64_t steps = range.end - range.begin;
  if (steps <= 0 && plan.parts.cluster == 1 && plan.parts.stored() > 1) return;

  Entry* const tables = reinterpret_cast<Entry*>(smem + Tile::kTablesAt);
  const auto tabulate = [&](int64_t step) {
    if (threadIdx.x >= kChunk || step >= steps) return;
    const Pixel pixel = locate_pixel(p, plan.list, (range.begin + step) * kChunk + threadIdx.x, count);
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

  std::conditional_t<kMath == Math::kFloat, FloatPiece, Piece<T, kMath, 2, 4>> piece;
  piece.clear();
  float bias = 0.f;
  const bool with_bias = params.bias && cta.tile_n == 0;

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
    if (with_bias && threadIdx.x < kTile) {
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
  __syncthreads();            // all are done with the stages
  grid_dependency_release();  // not before: who waits for the parts takes room that tiles could have

  float* const biases = reinterpret_cast<float*>(smem + Tile::kTablesAt);
  if (with_bias) {
    if (threadIdx.x < kTile) biases[threadIdx.x] = bias;
    __syncthreads();
  }
  const GradSink<T> sink = {
      params, plan.parts, plan.channels, plan.columns.taps_per_row, layer.workspace, cta.part / plan.parts.cluster};
  const int64_t first = static_cast<int64_t>(cta.group) * plan.group_outputs + k;  // output channel
  const auto put = [&](int m, int n, const float (&sums)[4]) {
    if (k + m < plan.group_outputs && column + n < plan.parts.columns)
      sink.put(first + m, static_cast<uint32_t>(column + n), sums);
  };
  const auto put_bias = [&](int m, float sum) {
    if (k + m < plan.group_outputs) sink.put_bias(first + m, sum);
  };
  const auto each = [&](const auto& visit) { piece.each(m0, n0, visit); };
  finish_tile<kTile, kTile, kThreads>(smem, biases, plan.parts, cta.part, with_bias, each, put, put_bias);
}

// ---- host

bool words_of_grad(const Conv2dParams& p) {
  return channels_vectorize(p.y) && p.weight.size[0] / p.groups % (16 / dtype_size(p.x.dtype)) == 0;
}
// Are 16-byte words of both operands' channels whole, and of one group?
bool in_words(const Conv2dParams& p) {
  return channels_vectorize(p.x) && p.weight.size[1] % (16 / dtype_size(p.x.dtype)) == 0 && words_of_grad(p);
}

int64_t tiles_of(const ConvWeightGradParams& p) {
  const int64_t outputs = p.conv.weight.size[0] / p.conv.groups;
  const int64_t columns = p.conv.weight.size[1] * p.conv.weight.size[2] * p.conv.weight.size[3];
  return p.conv.groups * ((outputs + kTile - 1) / kTile) * ((columns + kTile - 1) / kTile);
}

GradParts elements_parts(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t) {
  const int64_t tiles = tiles_of(p);
  GradParts parts(p, PixelList(p.conv).pixels_per_block, (int64_t{3} * device.sm_count + tiles - 1) / tiles, kChunk,
                  kLeastChunks);
  if (has_clusters(device)) parts.join(int64_t{3} * device.sm_count, tiles);
  return parts;
}

template <class T, Math kMath, bool kElements>
Status launch(const GradWork* layers, const DeviceInfo& device, cudaStream_t stream) {
  const auto plan_of = [](const GradWork& w) {
    GradPlan plan(w.params, w.parts, kElements ? 1 : kLanes<T>);
    plan.words_of_grad = words_of_grad(w.params.conv);
    return plan;
  };
  return launch_grad<conv_grad_kernel<T, kMath, kElements>, ElementsLaunch>(layers, 1, kGradElements, plan_of, kThreads,
                                                                            GradTile<T>::kBytes, device, stream);
}

template <class T, Math kMath>
Status launch_math(const GradWork* layers, const DeviceInfo& device, cudaStream_t stream) {
  if (!in_words(layers[0].params.conv)) return launch<T, kMath, true>(layers, device, stream);
  return launch<T, kMath, false>(layers, device, stream);
}

Status launch_elements_grad(const GradWork* layers, int, const DeviceInfo& device, cudaStream_t stream) {
  const Conv2dParams& c = layers[0].params.conv;
  return by_dtype(c.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2)
      return launch_math<T, Math::kHalf>(layers, device, stream);
    else
      return c.allow_tf32 ? launch_math<T, Math::kTf32>(layers, device, stream)
                          : launch_math<T, Math::kFloat>(layers, device, stream);
  });
}

}  // namespace

const GradKernel kGradElements = {nullptr, tiles_of, elements_parts, launch_elements_grad};

}  // namespace sbnet::portable

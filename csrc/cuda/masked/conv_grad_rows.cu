// Weight gradients of any kernel, float16 and bfloat16 in whole words of channels, with what every GPU since sm_80 has:
// mma.sync, ldmatrix, cp.async.
//
// dW[K, (r, s, c)] = dy[pixels, K]^T x[pixels, (r, s, c)]. A CTA owns 128x128, 64x256 or 256x64 of a group's, each of
// its four warps 64x64. A stage holds 32 pixels of both operands, a pixel a row, with word w at w ^ (row % 8). The
// reduction runs over the rows, so ldmatrix transposes both.
//
// Where pixels are is tabulated 128 at a time, and what the list says of them is asked for 128 ahead: a stage takes
// less time than an answer from memory.
#include "cuda/masked/conv_grad_finish.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128, kChunk = 32, kStages = 4, kWarp = 64;
constexpr int kLeastChunks = 4;                              // of a part
constexpr int kTable = kThreads, kTabled = kTable / kChunk;  // pixels of a table, and its stages

struct RowsPlan {
  GradParts parts;
  PixelList list;
  Reduction columns;
  FastDiv tiles_m, tiles_n, channels;
  int32_t group_inputs, group_outputs;

  RowsPlan(const ConvWeightGradParams& p, const GradParts& parts, int rows, int width)
      : parts(parts),
        list(p.conv),
        columns(p.conv, p.conv.weight.size[1], 8),
        tiles_m((p.conv.weight.size[0] / p.conv.groups + rows - 1) / rows),
        tiles_n((parts.columns + width - 1) / width),
        channels(p.conv.weight.size[1]),
        group_inputs(static_cast<int32_t>(p.conv.weight.size[1])),
        group_outputs(static_cast<int32_t>(p.conv.weight.size[0] / p.conv.groups)) {}
};

using RowsLaunch = GradLaunch<GradLayer<RowsPlan>, kGradTogether>;

// kDown of the four warps one below the other.
template <int kDown>
struct RowsTile {
  static constexpr int kRows = kDown * kWarp, kColumns = 4 / kDown * kWarp;
  static constexpr int kWordsGrad = kRows / 8, kWordsX = kColumns / 8;
  static constexpr int kGrad = kChunk * kRows * 2, kStage = kGrad + kChunk * kColumns * 2;
  static constexpr int kBiasesAt = 2 * kTable * static_cast<int>(sizeof(int4)), kStagesAt = kBiasesAt + kRows * 4;
  static constexpr int kShared = std::max(kStagesAt + kStages * kStage, kStagesAt + sums_bytes(kRows, kColumns));
  static_assert(kStagesAt % 128 == 0 && kShared <= 99 * 1024, "the least that a device since sm_80 has");
};

// kTaps: not 1x1 without padding, of which a pixel reads one of x that is there.
template <class T, int kDown, bool kTaps>
struct RowsLoader {
  using Entry = std::conditional_t<kTaps, int4, int2>;
  using Tile = RowsTile<kDown>;
  const Conv2dParams& p;
  const RowsPlan& plan;
  Entry* const tables;  // two: where a pixel is in dy, in words, -1 for none; its first tap in x; its row and column
  const T *x, *grad;    // this thread's channels
  Tap tap;
  bool grad_in;
  int count;
  int next, end;  // entries
  BlockIndex block;
  int down, across;  // of the pixel in its block

  __device__ __forceinline__ RowsLoader(const Conv2dParams& p, const RowsPlan& plan, const GradCta& cta, Entry* tables)
      : p(p), plan(plan), tables(tables) {
    const int k = static_cast<int>(cta.tile_m) * Tile::kRows + static_cast<int>(threadIdx.x) % Tile::kWordsGrad * 8;
    grad_in = k < plan.group_outputs;
    grad = static_cast<const T*>(p.y.data) + static_cast<int64_t>(cta.group) * plan.group_outputs + k;
    tap = tap_of(p, plan.columns,
                 static_cast<int>(cta.tile_n) * Tile::kWordsX + static_cast<int>(threadIdx.x) % Tile::kWordsX);
    x = static_cast<const T*>(p.x.data) + static_cast<int64_t>(cta.group) * plan.group_inputs + tap.x_offset;
  }
  __device__ __forceinline__ void begin(const PartRange& range, int blocks) {
    next = static_cast<int>(range.begin * kChunk + threadIdx.x), end = static_cast<int>(range.end * kChunk);
    count = blocks;
    ask();
  }
  __device__ __forceinline__ void ask() {
    block.n = -1;
    if (next >= end) return;
    uint32_t slot, rest, r, c;
    plan.list.block_pixels.divmod(static_cast<uint32_t>(next), &slot, &rest);
    plan.list.block_width.divmod(rest, &r, &c);
    if (static_cast<int>(slot) >= count) return;
    down = static_cast<int>(r), across = static_cast<int>(c);
    const int32_t* row = p.active.indices + int64_t{slot} * 3;
    block = {row[0], row[1], row[2]};
  }
  __device__ __forceinline__ void tabulate(int number) {
    Entry entry = {-1, -1};
    if constexpr (kTaps) entry.z = entry.w = -(1 << 30);
    if (is_block(block, static_cast<int>(p.y.size[0]), p.active.grid)) {
      const int row = block.i * p.active.grid.size[0] + down, column = block.j * p.active.grid.size[1] + across;
      if (row < p.y.size[2] && column < p.y.size[3]) {
        const int top = row * p.stride[0] - p.padding[0], left = column * p.stride[1] - p.padding[1];
        entry.x = static_cast<int>((block.n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3]) / 8);
        entry.y = static_cast<int>((block.n * p.x.stride[0] + top * p.x.stride[2] + left * p.x.stride[3]) / 8);
        if constexpr (kTaps) entry.z = top, entry.w = left;
      }
    }
    tables[number % 2 * kTable + threadIdx.x] = entry;
    next += kTable;
    ask();
  }
  static constexpr int kCopiesGrad = Tile::kWordsGrad / 4, kCopies = kCopiesGrad + Tile::kWordsX / 4;
  static __device__ __forceinline__ int row_of(int i) {
    const int words = i < kCopiesGrad ? Tile::kWordsGrad : Tile::kWordsX;
    return static_cast<int>(threadIdx.x) / words + (i < kCopiesGrad ? i : i - kCopiesGrad) * (kThreads / words);
  }
  __device__ __forceinline__ Entry entry_of(int i, int step) const {
    return tables[step / kTabled % 2 * kTable + step % kTabled * kChunk + row_of(i)];
  }
  // One of kCopies, whose entry of the table is given.
  __device__ __forceinline__ void copy(int i, const Entry& entry, uint32_t stage) const {
    const int row = row_of(i);
    if (i < kCopiesGrad) {
      const int word = static_cast<int>(threadIdx.x) % Tile::kWordsGrad;
      cp_async_16_or_zeros(stage + (row * Tile::kWordsGrad + (word ^ (row % 8))) * 16, grad + int64_t{entry.x} * 8,
                           grad_in & (entry.x >= 0));
    } else {
      const int word = static_cast<int>(threadIdx.x) % Tile::kWordsX;
      bool reads = tap.in;
      if constexpr (kTaps)
        reads &= (static_cast<unsigned>(entry.z + tap.row) < static_cast<unsigned>(p.x.size[2])) &
                 (static_cast<unsigned>(entry.w + tap.column) < static_cast<unsigned>(p.x.size[3]));
      else
        reads &= entry.x >= 0;
      cp_async_16_or_zeros(stage + Tile::kGrad + (row * Tile::kWordsX + (word ^ (row % 8))) * 16,
                           x + int64_t{entry.y} * 8, reads);
    }
  }
};

template <class T, int kDown, bool kTaps>
__global__ void __launch_bounds__(kThreads, 2) conv_grad_rows_kernel(const __grid_constant__ RowsLaunch launch) {
  using Tile = RowsTile<kDown>;
  extern __shared__ __align__(128) char smem[];
  uint32_t number;
  const auto& layer = launch.own(&number);
  const ConvWeightGradParams& params = layer.params;
  const RowsPlan& plan = layer.plan;
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int m0 = warp % kDown * kWarp, n0 = warp / kDown * kWarp;
  const GradCta cta(number, plan.parts, plan.tiles_m, plan.tiles_n);
  using Loader = RowsLoader<T, kDown, kTaps>;
  Loader loader(p, plan, cta, reinterpret_cast<typename Loader::Entry*>(smem));

  grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, cta.part);
  const int steps = static_cast<int>(range.end - range.begin);
  if (steps <= 0 && plan.parts.cluster == 1 && plan.parts.stored() > 1) return;
  loader.begin(range, count);

  float sums[4][8][4] = {};
  const bool with_bias = params.bias && cta.tile_n == 0;
  BiasSums<T, Tile::kWordsGrad, kChunk, Tile::kRows * 2, kThreads> bias;
  const uint32_t stages = shared_address(smem + Tile::kStagesAt);
  const uint32_t lane_a = (lane / 16 * 8 + lane % 8) * Tile::kRows * 2 + m0 * 2 + (((lane / 8 % 2) ^ (lane % 8)) << 4);
  const uint32_t lane_b =
      Tile::kGrad + (lane / 8 % 2 * 8 + lane % 8) * Tile::kColumns * 2 + n0 * 2 + (((lane / 16) ^ (lane % 8)) << 4);
  // Between products, to which the next entry of the table comes meanwhile.
  typename Loader::Entry entry;
  const auto copy = [&](int i, int step) {
    if (step >= steps) return;
    loader.copy(i, entry, stages + step % kStages * Tile::kStage);
    if (i + 1 < Loader::kCopies) entry = loader.entry_of(i + 1, step);
  };
  uint32_t a[2][4][4], b[2][4][4];
  const auto load = [&](int step, int half, uint32_t (&to_a)[4][4], uint32_t (&to_b)[4][4]) {
    const uint32_t stage = stages + step % kStages * Tile::kStage;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      load_matrix_x4_transposed(stage + (lane_a ^ (m << 5)) + half * 16 * Tile::kRows * 2, to_a[m]);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      load_matrix_x4_transposed(stage + (lane_b ^ (n << 5)) + half * 16 * Tile::kColumns * 2, to_b[n]);
  };

  loader.tabulate(0);
  __syncthreads();
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) {
    entry = loader.entry_of(0, s);
#pragma unroll
    for (int i = 0; i < Loader::kCopies; ++i) copy(i, s);
    cp_async_commit();
  }
  loader.tabulate(1);
  cp_async_wait<kStages - 2>();
  __syncthreads();
  load(0, 0, a[0], b[0]);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int next = step + kStages - 1;
    entry = loader.entry_of(0, next);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0) {
        load(step, 1, a[1], b[1]);
      } else {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // the next stage has landed for all threads, and all are done with this one
        load(step + 1, 0, a[0], b[0]);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int m = 0; m < 4; ++m)
          mma_16x8<T>(sums[m][n], a[half][m], b[half][n / 2][n % 2 * 2], b[half][n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int i = 0; i < Loader::kCopies; ++i)
          if (half == 0 && i * 8 / Loader::kCopies == n) copy(i, next);
      }
      if (half == 0) {
        cp_async_commit();
        if (with_bias) bias.add(smem + Tile::kStagesAt + step % kStages * Tile::kStage);
        // The table before the one that is read now: all have passed a barrier since they read it.
        if (next % kTabled == 0) loader.tabulate(next / kTabled + 1);
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();            // all are done with the stages
  grid_dependency_release();  // not before: who waits for the parts takes room that tiles could have

  float* const biases = reinterpret_cast<float*>(smem + Tile::kBiasesAt);
  if (with_bias) bias.gather(reinterpret_cast<float*>(smem + Tile::kStagesAt), biases);
  const GradSink<T> sink = {
      params, plan.parts, plan.channels, plan.columns.taps_per_row, layer.workspace, cta.part / plan.parts.cluster};
  const int k = static_cast<int>(cta.tile_m) * Tile::kRows, column = static_cast<int>(cta.tile_n) * Tile::kColumns;
  const int64_t group = static_cast<int64_t>(cta.group) * plan.group_outputs;
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          visit(m0 + m * 16 + lane / 4 + e / 2 * 8, n0 + n * 8 + lane % 4 * 2 + e % 2, sums[m][n][e]);
  };
  const auto put = [&](int m, int n, const float (&sums)[4]) {
    if (k + m < plan.group_outputs && column + n < plan.parts.columns)
      sink.put(group + k + m, static_cast<uint32_t>(column + n), sums);
  };
  const auto put_bias = [&](int m, float sum) {
    if (k + m < plan.group_outputs) sink.put_bias(group + k + m, sum);
  };
  finish_tile<Tile::kRows, Tile::kColumns, kThreads>(smem + Tile::kStagesAt, biases, plan.parts, cta.part, with_bias,
                                                     each, put, put_bias);
}

// ---- host

int64_t tiles_of(const ConvWeightGradParams& p, int down) {
  const Conv2dParams& c = p.conv;
  const int64_t rows = down * kWarp, width = 4 / down * kWarp;
  const int64_t columns = c.weight.size[1] * c.weight.size[2] * c.weight.size[3];
  return c.groups * ((c.weight.size[0] / c.groups + rows - 1) / rows) * ((columns + width - 1) / width);
}
// The shape that wastes least; the square one reads least.
int down_of(const ConvWeightGradParams& p) {
  const int64_t square = tiles_of(p, 2), flat = tiles_of(p, 1), tall = tiles_of(p, 4);
  return square <= std::min(flat, tall) ? 2 : flat <= tall ? 1 : 4;
}

bool has_taps(const Conv2dParams& c) {
  return c.weight.size[2] > 1 || c.weight.size[3] > 1 || c.padding[0] || c.padding[1];
}
int rows_variant(const ConvWeightGradParams& p) {
  return down_of(p) * 4 + has_taps(p.conv) * 2 + (p.conv.x.dtype == DType::kF16);
}
int64_t rows_tiles(const ConvWeightGradParams& p) { return tiles_of(p, down_of(p)); }

GradParts rows_parts(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t wanted) {
  const int64_t tiles = rows_tiles(p);
  GradParts parts(p, PixelList(p.conv).pixels_per_block, wanted ? wanted : parts_for(device, tiles), kChunk,
                  kLeastChunks);
  if (!wanted && has_clusters(device)) parts.join(grad_slots(device), tiles);
  return parts;
}

template <class T, int kDown>
Status launch_rows(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream) {
  using Tile = RowsTile<kDown>;
  const auto plan_of = [](const GradWork& w) { return RowsPlan(w.params, w.parts, Tile::kRows, Tile::kColumns); };
  const auto run = [&](auto kernel) {
    return launch_grad<decltype(kernel)::value, RowsLaunch>(layers, count, kGradRows, plan_of, kThreads, Tile::kShared,
                                                            device, stream);
  };
  if (has_taps(layers[0].params.conv))
    return run(std::integral_constant<decltype(&conv_grad_rows_kernel<T, kDown, true>),
                                      &conv_grad_rows_kernel<T, kDown, true>>());
  return run(std::integral_constant<decltype(&conv_grad_rows_kernel<T, kDown, false>),
                                    &conv_grad_rows_kernel<T, kDown, false>>());
}

Status launch_rows_grad(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream) {
  const int down = down_of(layers[0].params);
  return by_dtype(layers[0].params.conv.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2)
      return (down == 2   ? launch_rows<T, 2>
              : down == 1 ? launch_rows<T, 1>
                          : launch_rows<T, 4>)(layers, count, device, stream);
    return make_status(Code::kUnsupported, "%s: x: dtype: expected float16 or bfloat16, got float32", kGradOp);
  });
}

}  // namespace

bool grad_rows_takes(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  return c.x.dtype != DType::kF32 && channels_vectorize(c.x) && channels_vectorize(c.y) && c.weight.size[1] % 8 == 0 &&
         c.weight.size[0] / c.groups % 8 == 0 && !PixelList(c).wide && grad_in_reach(c.x) && grad_in_reach(c.y);
}

const GradKernel kGradRows = {rows_variant, rows_tiles, rows_parts, launch_rows_grad};

}  // namespace sbnet::portable

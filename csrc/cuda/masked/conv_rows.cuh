// Convolutions by rows, 1x1 and any other of up to 8x8 taps, strides and dilations, with what every GPU since sm_80
// has: mma.sync, ldmatrix, cp.async.
//
// A tile is 128 entries of the pixel list by 64 or 128 output channels of a group, a stage of it 128 bytes of the
// reduction a row: eight words of channels, each of one tap. Stages are one stream over all tiles of a CTA: the next
// tile's pixels come in while results go straight from registers. Rows of both operands are 128 bytes. Word w of row n
// of x lies at w ^ (n % 8); rows of weights are read in another order, as output channels are permuted among the
// columns of products (conv_patch.cuh), and lie accordingly.
#pragma once
#include "cuda/masked/conv_sums_bytes.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kRowThreads = 128, kTilePixels = 128, kRowStages = 3, kRowPass = kRowThreads / 8;
constexpr int kRowCtas = 2, kNarrowCtas = 3;  // on a multiprocessor, where tiles are of 64 channels alone

// Of a table of outputs: of bytes they may lie anywhere.
template <class T>
constexpr int kUnitY = sizeof(T) == 1 ? 1 : 8;

struct RowsPlan {
  PixelList list;
  FastDiv tap_words, taps_per_row;      // words of a tap; taps of a row of the kernel
  FastDiv group_tiles[2];               // tiles across a group, of 128 and of 64 channels
  int32_t units, group_outputs;         // words of the reduction
  int32_t image, row, column;           // strides of x from pixel to pixel of y, in units of eight channels
  int32_t tap_row, tap_column;          // and of its own pixels
  int32_t to_image, to_row, to_column;  // those of y, and of the residual, in units of kUnitY channels
  FringePlan fringe;

  RowsPlan() = default;
  explicit RowsPlan(const Conv2dParams& p) : list(p), fringe(p) {
    const PixelStrides x = pixel_strides(p.x), y = pixel_strides(p.y);
    tap_row = static_cast<int32_t>(x.y / 8), tap_column = static_cast<int32_t>(x.x / 8);
    image = static_cast<int32_t>(x.n / 8), row = static_cast<int32_t>(x.y / 8 * p.stride[0]),
    column = static_cast<int32_t>(x.x / 8 * p.stride[1]);
    const int to_unit = dtype_size(p.x.dtype) == 1 ? kUnitY<int8_t> : kUnitY<__half>;
    to_image = static_cast<int32_t>(y.n / to_unit), to_row = static_cast<int32_t>(y.y / to_unit),
    to_column = static_cast<int32_t>(y.x / to_unit);
    const int64_t words = p.weight.size[1] * dtype_size(p.x.dtype) / 16;
    tap_words = FastDiv(words), taps_per_row = FastDiv(p.weight.size[3]);
    units = static_cast<int32_t>(p.weight.size[2] * p.weight.size[3] * words);
    group_outputs = static_cast<int32_t>(p.weight.size[0] / p.groups);
    for (int i = 0; i < 2; ++i) group_tiles[i] = FastDiv((group_outputs + (128 >> i) - 1) / (128 >> i));
  }
};

// Warps two by two. kTaps: not 1x1 of one group and no padding, whose table is a word a pixel.
template <class T, int kOutputs, bool kTaps>
struct RowTiles {
  static constexpr int kRowBytes = 128;
  static constexpr int kStageX = kTilePixels * kRowBytes, kStageWeight = kOutputs * kRowBytes;
  static constexpr int kWeightsAt = kRowStages * kStageX, kTablesAt = kWeightsAt + kRowStages * kStageWeight;
  // Of tables, which are written a tile ahead, or two where a tile may be one stage.
  static constexpr int kLeastChunks = kTaps ? 2 : 1;
  static constexpr int kSlotsX = 2, kSlotsY = kTaps ? 3 : 4;
  static constexpr int kShared = kTablesAt + (kSlotsX * (kTaps ? 6 : 4) + kSlotsY * 4) * kTilePixels;
  static constexpr int kCopiesX = kTilePixels / kRowPass, kCopiesWeight = kOutputs / kRowPass;
  static constexpr int kM = 4, kTiles = kOutputs / 16, kPairs = kTiles / 2;  // of a warp
  static_assert(kShared <= 99 * 1024, "the least that a device since sm_80 has");

  const ParamsOf<T>& p;
  const RowsPlan& plan;
  const int cta, ctas;  // of those that share the tiles
  const int count, column_tiles, tiles, chunks;
  const uint32_t stages;
  int* const from;        // tables of words of x, of a pixel's first tap; without taps -1 for no pixel
  int* const to;          // and of y, -1 for no pixel
  uint16_t* const reads;  // which rows of taps are inside the plane, a bit each, and above them which columns
  // What is copied next.
  int tile, chunk = 0, ordinal = 0, slot = 0, left;
  const T *weights, *x;  // a tile's
  const T* source;       // this thread's word of the first pixel
  int own_reads;         // what its tap needs
  uint32_t place;

  static __device__ __forceinline__ const FastDiv& across(const RowsPlan& plan) {
    return plan.group_tiles[kOutputs == 64];
  }
  static __device__ __forceinline__ int columns(const Conv2dParams& p, const RowsPlan& plan) {
    return static_cast<int>(across(plan).divisor) * p.groups;
  }
  // A row of weights in a stage: the eight that a matrix takes lie in different words.
  static __device__ __forceinline__ uint32_t weight_word(int row, int word) {
    return word ^ ((row >> 3 & 3) << 1 | (row & 1));
  }

  __device__ __forceinline__ RowTiles(const ParamsOf<T>& p, const RowsPlan& plan, char* smem, int count, int cta,
                                      int ctas)
      : p(p),
        plan(plan),
        cta(cta),
        ctas(ctas),
        count(count),
        column_tiles(columns(p, plan)),
        tiles(static_cast<int>(plan.list.tiles(count, kTilePixels)) * column_tiles),
        chunks(max((plan.units + 7) / 8, kLeastChunks)),
        stages(shared_address(smem)),
        from(reinterpret_cast<int*>(smem + kTablesAt)),
        to(from + kSlotsX * kTilePixels),
        reads(reinterpret_cast<uint16_t*>(to + kSlotsY * kTilePixels)),
        tile(cta) {
    const int row = threadIdx.x / 8, word = threadIdx.x % 8;
    place = row * kRowBytes + ((word ^ (row % 8)) << 4);
    begin_tile();
  }
  // The first output channel of a tile, and the last one's end.
  __device__ __forceinline__ void outputs_of(int of, int& group, int& first, int& end) const {
    const uint32_t column = static_cast<uint32_t>(of % column_tiles);
    uint32_t g = 0, c = column;
    if constexpr (kTaps) across(plan).divmod(column, &g, &c);
    group = static_cast<int>(g), end = (group + 1) * plan.group_outputs;
    first = end - plan.group_outputs + static_cast<int>(c) * kOutputs;
  }
  __device__ __forceinline__ void begin_tile() {
    int group, first, end;
    outputs_of(tile, group, first, end);
    left = end - first;
    weights = static_cast<const T*>(p.weight.data) + (int64_t{first} * plan.units + threadIdx.x % 8) * kLanes<T>;
    x = static_cast<const T*>(p.x.data) + group * p.weight.size[1];
    begin_chunk();
  }
  __device__ __forceinline__ void begin_chunk() {
    const int unit = chunk * 8 + threadIdx.x % 8;
    if constexpr (kTaps) {
      uint32_t tap, c, r, s;
      plan.tap_words.divmod(unit, &tap, &c);
      plan.taps_per_row.divmod(tap, &r, &s);
      own_reads = unit < plan.units ? 1 << r | 256 << s : 1 << 16;
      source = x + c * kLanes<T> +
               (int64_t{r} * p.dilation[0] * plan.tap_row + int64_t{s} * p.dilation[1] * plan.tap_column) * 8;
    } else {
      source = x + unit * kLanes<T>;
    }
  }
  __device__ __forceinline__ void tabulate(int of, int number) const {
    if (of >= tiles) return;
    const Pixel pixel = locate_pixel(p, plan.list, int64_t{of / column_tiles} * kTilePixels + threadIdx.x, count);
    const int at = number % kSlotsX * kTilePixels + threadIdx.x;
    if constexpr (kTaps) {
      const auto inside = [&](int d, int first) {  // bits of the taps from there on
        int bits = 0;
#pragma unroll 1
        for (int t = 0; t < p.weight.size[2 + d]; ++t)
          bits |= static_cast<int>(static_cast<unsigned>(first + t * p.dilation[d]) <
                                   static_cast<unsigned>(p.x.size[2 + d]))
                  << t;
        return bits;
      };
      const int row = pixel.row * p.stride[0] - p.padding[0], column = pixel.column * p.stride[1] - p.padding[1];
      from[at] = pixel.n * plan.image + row * plan.tap_row + column * plan.tap_column;
      reads[at] = static_cast<uint16_t>(pixel.n < 0 ? 0 : inside(0, row) | inside(1, column) << 8);
    } else {
      from[at] = pixel.n < 0 ? -1 : pixel.n * plan.image + pixel.row * plan.row + pixel.column * plan.column;
    }
    to[number % kSlotsY * kTilePixels + threadIdx.x] =
        pixel.n < 0 ? -1 : pixel.n * plan.to_image + pixel.row * plan.to_row + pixel.column * plan.to_column;
  }
  // A quarter of a stage, so that copies mix with products. Past the last tile they repeat, into stages that are free.
  __device__ __forceinline__ void copy(int quarter) const {
    const int unit = chunk * 8 + threadIdx.x % 8, row0 = threadIdx.x / 8;
    const bool in = unit < plan.units;
    const uint32_t stage = stages + slot * kStageX + place;
#pragma unroll
    for (int i = quarter * kCopiesX / 4; i < (quarter + 1) * kCopiesX / 4; ++i) {
      const int at = ordinal % kSlotsX * kTilePixels + row0 + i * kRowPass, word = from[at];
      const bool reads_x = kTaps ? (reads[at] & own_reads) == own_reads : in & (word >= 0);
      cp_async_16(stage + i * kRowPass * kRowBytes, source + int64_t{word} * 8, reads_x);
    }
#pragma unroll
    for (int i = quarter * kCopiesWeight / 4; i < (quarter + 1) * kCopiesWeight / 4; ++i) {
      const int row = row0 + i * kRowPass;
      cp_async_16(
          stages + kWeightsAt + slot * kStageWeight + row * kRowBytes + (weight_word(row, threadIdx.x % 8) << 4),
          weights + (row * plan.units + chunk * 8) * kLanes<T>, in & (row < left));
    }
  }
  // After the copies of a stage. The table of x that is written was last read before the barrier that all have passed;
  // that of y, too, but where tiles are as short as they may be: then some may still be at the tile before this one.
  __device__ __forceinline__ void advance() {
    cp_async_commit();
    const int next = tile + ctas;
    if (chunk == 0) {
      if (chunks == kLeastChunks) __syncthreads();
      tabulate(next, ordinal + 1);
    }
    slot = slot + 1 == kRowStages ? 0 : slot + 1;
    if (++chunk < chunks) return begin_chunk();
    chunk = 0;
    if (next < tiles) tile = next, ++ordinal;
    begin_tile();
  }

  __device__ __forceinline__ void run() {
    // Else CTAs of the next kernel would take what multiprocessors this list leaves idle, two each, and wait there.
    if (tiles >= ctas) grid_dependency_release();
    if (tile >= tiles) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp % 2, warp_column = warp / 2;
    const int l8 = lane % 8;
    const uint32_t row_x = (warp_row * 64 + lane % 16) * kRowBytes;
    const int row_w = warp_column * (kOutputs / 2) + 8 * (l8 / 2) + l8 % 2 + lane / 16 * 2;
    tabulate(tile, 0);
    __syncthreads();
#pragma unroll 1
    for (int s = 0; s < kRowStages - 1; ++s) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) copy(quarter);
      advance();
      __syncthreads();
    }
    uint32_t a[2][kM][4], b[2][kPairs][4];
    int read = 0, number = 0;
    const auto load = [&](int kk, uint32_t (&to_a)[kM][4], uint32_t (&to_b)[kPairs][4]) {
      const uint32_t x = stages + read * kStageX + row_x + (((kk * 2 + lane / 16) ^ (lane % 8)) << 4);
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrix_x4(x + m * 16 * kRowBytes, to_a[m]);
      const uint32_t w = stages + kWeightsAt + read * kStageWeight + row_w * kRowBytes +
                         (weight_word(row_w, kk * 2 + lane / 8 % 2) << 4);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) load_matrix_x4(w + (j / 2 * 32 + j % 2 * 4) * kRowBytes, to_b[j]);
    };
    cp_async_wait<kRowStages - 2>();
    __syncthreads();
    load(0, a[0], b[0]);
    for (int own = cta; own < tiles; own += ctas, ++number) {
      SumOf<T> sums[kM][kTiles][4];
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][j][e] = 0;
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          copy(kk);
          if (kk == 3) {  // the next stage's first operands, while this one's last are multiplied
            advance();
            cp_async_wait<kRowStages - 2>();
            __syncthreads();
            read = read + 1 == kRowStages ? 0 : read + 1;
          }
          load((kk + 1) % 4, a[(kk + 1) % 2], b[(kk + 1) % 2]);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
              const uint32_t* w = b[kk % 2][j / 2];
              if constexpr (sizeof(T) == 4) {  // a fragment's first use
                if (j == 0) round_fragment(a[kk % 2][m]);
                if (m == 0 && j % 2 == 0) round_fragment(b[kk % 2][j / 2]);
              }
              mma_16x8<T>(sums[m][j], a[kk % 2][m], w[j % 2 * 2], w[j % 2 * 2 + 1]);
            }
        }
      }
      finish(sums, own, number, warp_row, warp_column, lane);
    }
    cp_async_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void finish(SumOf<T> (&sums)[kM][kTiles][4], int own, int number, int warp_row,
                                         int warp_column, int lane) const {
    const int* own_to = to + number % kSlotsY * kTilePixels + warp_row * 64 + lane / 4;
    const auto output = [&](int m, int h) -> Output {
      const int64_t at = int64_t{own_to[m * 16 + h * 8]} * kUnitY<T>;
      return {at, at};
    };
    int group, first, end;
    outputs_of(own, group, first, end);
    const int k = first + warp_column * (kOutputs / 2) + lane % 4 * 8;
    if constexpr (sizeof(T) == 1)
      finish_sums<T, true>(p, sums, output, k, end);
    else
      finish_sums<T>(p, sums, output, k, end);
  }
};

// kNarrow: no group has more than 64 output channels.
template <class T, bool kTaps, bool kNarrow>
__device__ __forceinline__ void run_rows(const ParamsOf<T>& p, const RowsPlan& plan, char* smem, int cta, int ctas) {
  using Wide = RowTiles<T, 128, kTaps>;
  using Narrow = RowTiles<T, 64, kTaps>;
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  if constexpr (!kNarrow) {
    const int64_t rows = plan.list.tiles(count, kTilePixels);
    // What tiles cost where one of 128 channels costs 64, as measured.
    const int wide = cost_of<kRowCtas, 64, 38>(rows * Wide::columns(p, plan), ctas);
    const int narrow = cost_of<kRowCtas, 43, 27>(rows * Narrow::columns(p, plan), ctas);
    if (wide <= narrow) return Wide(p, plan, smem, count, cta, ctas).run();
  }
  Narrow(p, plan, smem, count, cta, ctas).run();
}
constexpr int ctas_of(bool narrow) { return narrow ? kNarrowCtas : kRowCtas; }
template <class T, bool kTaps, bool kNarrow>
constexpr int kRowsShared = kNarrow ? RowTiles<T, 64, kTaps>::kShared : RowTiles<T, 128, kTaps>::kShared;

template <class T, bool kTaps, bool kNarrow>
__global__ void __launch_bounds__(kRowThreads, ctas_of(kNarrow))
    conv_rows_kernel(const __grid_constant__ ParamsOf<T> p, const __grid_constant__ RowsPlan plan) {
  extern __shared__ __align__(128) char smem[];
  grid_dependency_wait();
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  clear_fringe_of<T>(p, plan.fringe, int64_t{cta} * kRowThreads + threadIdx.x, int64_t{ctas} * kRowThreads);
  run_rows<T, kTaps, kNarrow>(p, plan, smem, cta, ctas);
}

template <class T, bool kTaps, bool kNarrow>
Status launch_rows(const ParamsOf<T>& p, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  const RowsPlan plan(p);
  constexpr auto kernel = conv_rows_kernel<T, kTaps, kNarrow>;
  constexpr int kShared = kRowsShared<T, kTaps, kNarrow>;
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kRowThreads, kShared, &cache, &ctas));
  const int64_t tiles = plan.list.tiles(p.active.capacity, kTilePixels) * plan.group_tiles[1].divisor * p.groups;
  const unsigned grid = persistent_grid(device, ctas, tiles, plan.fringe.threads(p), kRowThreads);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kRowThreads), kShared, stream, p, plan));
  return ok_status();
}

// Is every output's only tap inside the plane?
bool reads_own_pixels(const Conv2dParams& p) {
  if (p.groups != 1 || p.weight.size[2] * p.weight.size[3] != 1 || p.padding[0] || p.padding[1]) return false;
  for (int d = 0; d < 2; ++d)  // a phase of a transposed convolution may have outputs past its input
    if ((p.y.size[2 + d] - 1) * p.stride[d] >= p.x.size[2 + d]) return false;
  return true;
}

bool is_narrow(const Conv2dParams& p) { return p.weight.size[0] / p.groups <= 64; }

template <class T, bool kNarrow>
Status launch_taps(const ParamsOf<T>& p, const DeviceInfo& device, cudaStream_t stream) {
  return reads_own_pixels(p) ? launch_rows<T, false, kNarrow>(p, device, stream)
                             : launch_rows<T, true, kNarrow>(p, device, stream);
}

}  // namespace
}  // namespace sbnet::portable

// The convolution kernels for every CUDA device since sm_80, and what they share: how a thread finds its pixel in the
// active list, how a reduction index becomes a kernel tap, how large the grid is.
#pragma once
#include <algorithm>

#include "core/masked/conv.h"
#include "cuda/by_dtype.cuh"
#include "cuda/common.cuh"
#include "cuda/masked/conv_epilogue.cuh"

namespace sbnet::portable {

constexpr const char* kConvOp = "sparse_conv2d";

// Tensor cores: float16, bfloat16, and float32 as tf32 (channels_last x and weight with C/groups a multiple of 4).
Status launch_implicit_gemm(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// Tensor cores: float16 and bfloat16, up to four input channels, 17 to 64 taps, up to 64 output channels, y
// channels_last.
Status launch_first(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// Tensor cores: float16 and bfloat16, 3x3 of groups of 4, 8, 16 or 32 channels, stride 1 or 2, channels_last.
Status launch_groups_3x3(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// Tensor cores: float16, bfloat16 and tf32, 3x3 with a stride of 1, channels_last (core/masked/conv_select.cpp says
// which).
template <class T>
Status launch_patch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// Tensor cores: float16, bfloat16 and tf32, up to 8x8 taps, channels a group a multiple of 8, channels_last.
Status launch_rows(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// The same of several such convolutions, without a fringe, in one launch.
constexpr int kMostPhases = 4;
Status launch_rows_phases(const Conv2dParams* p, int phases, const DeviceInfo& device, cudaStream_t stream);
// Tensor cores: float16 and bfloat16, up to four input channels and twelve taps.
Status launch_few_channels(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// float32 in float32, x and weight in 16-byte words of channels.
Status launch_simt_words(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// float32 in float32.
Status launch_simt(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);
// One input channel per group.
Status launch_depthwise(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream);

// The active blocks' pixels form one list: slot * pixels of a block + pixel within the block, row by row. A GEMM tile
// takes the next kTileM entries of it, so that small blocks share a tile and large ones fill several. Entries past
// the plane's edge, or of a row that is no block, stay empty.
struct PixelList {
  int64_t pixels_per_block;
  FastDiv block_pixels, block_width;
  int32_t width;
  bool wide;  // too many entries for 32 bits

  PixelList() = default;
  explicit PixelList(const Conv2dParams& p) {
    // A block larger than the plane is the only one of its direction: count no more of it than the plane has.
    const int64_t height = std::min<int64_t>(p.active.grid.size[0], p.y.size[2]);
    width = static_cast<int32_t>(std::min<int64_t>(p.active.grid.size[1], p.y.size[3]));
    pixels_per_block = height * width;
    wide = p.active.capacity * pixels_per_block + 1024 > INT32_MAX;
    if (!wide) block_pixels = FastDiv(pixels_per_block);
    block_width = FastDiv(width);
  }
  __host__ __device__ int64_t tiles(int64_t blocks, int tile_pixels) const {
    return (blocks * pixels_per_block + tile_pixels - 1) / tile_pixels;
  }
};

struct Pixel {
  int n, row, column;  // of y's plane; n < 0: an empty entry
};
__device__ __forceinline__ Pixel locate_pixel(const Conv2dParams& p, const PixelList& list, int64_t entry, int count) {
  const BlockGrid& g = p.active.grid;
  int64_t slot;
  int row, column;
  if (list.wide) {
    slot = entry / list.pixels_per_block;
    const int64_t rest = entry % list.pixels_per_block;
    row = static_cast<int>(rest / list.width);
    column = static_cast<int>(rest % list.width);
  } else {
    uint32_t s, rest, r, c;
    list.block_pixels.divmod(static_cast<uint32_t>(entry), &s, &rest);
    list.block_width.divmod(rest, &r, &c);
    slot = s, row = r, column = c;
  }
  BlockIndex b;
  if (slot >= count || !load_block(p.active.indices, slot, static_cast<int>(p.y.size[0]), g, &b)) return {-1, 0, 0};
  row += b.i * g.size[0];
  column += b.j * g.size[1];
  return {row < p.y.size[2] && column < p.y.size[3] ? b.n : -1, row, column};
}

// Where a pixel's receptive field begins: tap (r,s) reads row + r*dilation, column + s*dilation.
struct alignas(16) Source {
  int64_t offset;   // of (n, first channel, row, column) in x, in bytes; may lie before x
  int row, column;  // far outside of every plane for an empty entry
};
template <class T>
__device__ __forceinline__ Source source_of(const Conv2dParams& p, const Pixel& pixel) {
  if (pixel.n < 0) return {0, -(1 << 30), -(1 << 30)};
  const int row = pixel.row * p.stride[0] - p.padding[0], column = pixel.column * p.stride[1] - p.padding[1];
  return {(pixel.n * p.x.stride[0] + row * p.x.stride[2] + column * p.x.stride[3]) * static_cast<int>(sizeof(T)), row,
          column};
}
__device__ __forceinline__ int64_t pixel_offset(const TensorView& t, const Pixel& pixel) {
  return pixel.n * t.stride[0] + pixel.row * t.stride[2] + pixel.column * t.stride[3];
}

__device__ __forceinline__ Output output_of(const Conv2dParams& p, const Pixel& pixel) {
  if (pixel.n < 0) return {-1, 0};
  return {pixel_offset(p.y, pixel), pixel_offset(p.residual, pixel)};
}

// The reduction runs over (r, s, c), c fastest, in units of one channel or of one 16-byte word of channels.
struct Reduction {
  FastDiv units_per_tap, taps_per_row;
  int32_t units, unit_channels;

  Reduction(const Conv2dParams& p, int64_t channels, int channels_per_unit)
      : units_per_tap(channels / channels_per_unit),
        taps_per_row(p.weight.size[3]),
        units(static_cast<int32_t>(p.weight.size[2] * p.weight.size[3] * (channels / channels_per_unit))),
        unit_channels(channels_per_unit) {}
};
// One unit as offsets from a Source and from an output channel's weights. Units past the end have in == false.
struct Tap {
  int64_t x_offset, weight_offset;
  int row, column, channel;
  bool in;
};
__device__ __forceinline__ Tap tap_of(const Conv2dParams& p, const Reduction& reduction, int unit) {
  uint32_t tap, c, r, s;
  reduction.units_per_tap.divmod(unit, &tap, &c);
  reduction.taps_per_row.divmod(tap, &r, &s);
  c *= reduction.unit_channels;
  const int row = r * p.dilation[0], column = s * p.dilation[1];
  return {row * p.x.stride[2] + column * p.x.stride[3] + c * p.x.stride[1],
          r * p.weight.stride[2] + s * p.weight.stride[3] + c * p.weight.stride[1],
          row,
          column,
          static_cast<int>(c),
          unit < reduction.units};
}
// No short circuit: a branch would keep the fetches from mixing with the multiplications.
__device__ __forceinline__ bool reads_plane(const Conv2dParams& p, const Source& source, const Tap& tap) {
  return tap.in & (static_cast<unsigned>(source.row + tap.row) < static_cast<unsigned>(p.x.size[2])) &
         (static_cast<unsigned>(source.column + tap.column) < static_cast<unsigned>(p.x.size[3]));
}
// A Source in one shared-memory access.
__device__ __forceinline__ Source load_source(const Source* from) {
  const int4 v = *reinterpret_cast<const int4*>(from);
  return {static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(v.y)) << 32 | static_cast<uint32_t>(v.x)),
          v.z, v.w};
}

// A GEMM launch: tiles of kTileM list entries by kTileN output channels of one group, channels fastest, so that the
// CTAs that share a tile of x run at the same time. A kernel may treat `merged` neighbouring groups as one, whose
// weights are a block-diagonal matrix.
struct GemmPlan {
  PixelList list;
  int32_t group_inputs, group_outputs;  // channels of a merged group
  Reduction reduction;
  FastDiv column_tiles, tiles_per_group;
  FastDiv single_inputs, single_outputs;  // a channel of a merged group -> its own group
  FringePlan fringe;
  bool vector_y, vector_residual;

  GemmPlan(const Conv2dParams& p, int channels_per_unit, int tile_n, int merged = 1)
      : list(p),
        group_inputs(static_cast<int32_t>(p.weight.size[1]) * merged),
        group_outputs(static_cast<int32_t>(p.weight.size[0]) / p.groups * merged),
        reduction(p, group_inputs, channels_per_unit),
        tiles_per_group((group_outputs + tile_n - 1) / tile_n),
        single_inputs(p.weight.size[1]),
        single_outputs(p.weight.size[0] / p.groups),
        fringe(p),
        vector_y(channels_vectorize(p.y)),
        vector_residual(p.residual.data && channels_vectorize(p.residual)) {
    column_tiles = FastDiv(int64_t{tiles_per_group.divisor} * (p.groups / merged));
  }
  // The tiles of a full list: an upper bound of the work, known to the host.
  int64_t most_tiles(const Conv2dParams& p, int tile_m) const {
    return list.tiles(p.active.capacity, tile_m) * column_tiles.divisor;
  }
};

// Where a tile lies: `row` counts tiles of pixels; its output channels are k to k_end of a group, at most.
struct GemmTile {
  uint32_t row, column, group;
  int64_t k_end, k;

  __device__ __forceinline__ GemmTile(const GemmPlan& plan, int tile, int tile_n) {
    plan.column_tiles.divmod(tile, &row, &column);
    plan.tiles_per_group.divmod(column, &group, &column);
    k_end = int64_t{group + 1} * plan.group_outputs;
    k = k_end - plan.group_outputs + column * tile_n;
  }
};

// Lets `kernel` have its shared memory and counts its CTAs per SM: once per kernel and device, then from `cache`.
struct OccupancyCache {
  std::atomic<int> ctas_per_sm[kMaxDevices];
};
template <class Kernel>
Status prepare_kernel(const DeviceInfo& device, Kernel kernel, int threads, size_t smem, OccupancyCache* cache,
                      int* ctas_per_sm) {
  int ctas = device.index < kMaxDevices ? cache->ctas_per_sm[device.index].load(std::memory_order_relaxed) : 0;
  if (!ctas) {
    if (smem > 48 * 1024)
      SBNET_CUDA_TRY(kConvOp,
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)));
    SBNET_CUDA_TRY(kConvOp, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, smem));
    if (ctas < 1)
      return make_status(Code::kUnsupported, "%s: device: expected %zu bytes of shared memory, got less on device %d",
                         kConvOp, smem, device.index);
    if (device.index < kMaxDevices) cache->ctas_per_sm[device.index].store(ctas, std::memory_order_relaxed);
  }
  *ctas_per_sm = ctas;
  return ok_status();
}

// What `units`, shared by the CTAs of a persistent launch, cost: one of each CTA costs kFull, one that has a
// multiprocessor to itself kAlone. Where two share one, a quarter of them is what a list must leave idle: where CTAs
// are is not known.
template <int kCtas, int kFull, int kAlone>
__device__ __forceinline__ int cost_of(int64_t units, int ctas) {
  const int n = static_cast<int>(units), waves = n / ctas, rest = n - waves * ctas;
  return waves * kFull + (rest == 0 ? 0 : kCtas > 1 && rest <= ctas / 4 ? kAlone : kFull);
}

// CTAs of a persistent launch: no more than the tiles and the fringe could use, nor than the device holds.
inline unsigned persistent_grid(const DeviceInfo& device, int ctas_per_sm, int64_t tiles, int64_t fringe_threads,
                                int threads) {
  const int64_t fringe_ctas = (fringe_threads + threads - 1) / threads;
  const int64_t wanted = tiles > fringe_ctas ? tiles : fringe_ctas;
  const int64_t most = int64_t{ctas_per_sm} * device.sm_count;
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

}  // namespace sbnet::portable

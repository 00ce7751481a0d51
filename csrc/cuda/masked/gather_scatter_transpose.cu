// The fused transpose of sparse_gather and sparse_scatter: one side is channels_last, the other NCHW.
//
// A CTA moves tiles of pixels x channels through shared memory: up to 368 pixels x 32 words, or for larger blocks 715 x
// 16 or 1351 x 8, so that a tile holds the whole block: then the rows of the NCHW side follow each other without a gap
// and no part of a memory sector is left to another CTA. Both sides are accessed in vectors: 16 bytes of channels on
// one, as many pixels of one channel as alignment allows on the other. Where a channel of a block in an NCHW stack is
// no multiple of 16 bytes, a few channels together are: they are one run of memory, moved 16 bytes at a time all the
// same.
#include <algorithm>

#include "cuda/masked/gather_scatter.cuh"

namespace sbnet {
namespace {

// One side of a transposed copy. For the stack n is the slot and (y, x) lie within the block.
struct Side {
  char* data;
  int64_t stride_n, stride_c, stride_y, stride_x;  // elements
  bool plane;
};

constexpr int kTileBuffer = 12160;  // words: four CTAs fit a multiprocessor of sm_90, three of sm_80
constexpr int kTileWords = 32;      // of a pixel at most
constexpr int most_pixels(int words) { return kTileBuffer / (words + 1); }
constexpr int kWarps = kThreads / 32;

struct TransposeArgs {
  Side pixels, channels;  // the side whose channels are adjacent, and the side whose pixels are
  bool wide;              // 16-byte accesses are aligned on the pixels side
  const int32_t *indices, *count;
  int capacity, rows, batch, depth, height, width;  // depth: channels of the tensors
  BlockGrid grid;
  int area, pieces, piece_pixels, chunks;  // a block = pieces of pixels x chunks of channels
  int words;                               // channels of a tile, in words of 4 bytes
  int pitch;  // words + 1 from pixel to pixel: odd, so that neither direction has many bank conflicts
  FastDiv block_width, block_area;
  int run_channels, run_vectors;  // channels that are whole vectors of 16 bytes together, and how many they are
  int run_sets;                   // of eight runs, in a tile
  bool zero_tail;
};

struct Tile {
  int slot, first_pixel, pixels, first_channel, channels;
  BlockIndex block;
  bool known;  // the slot names a block of the grid
};

// Offset of pixel p of the tile on one side, or -1 if it lies off the plane.
__device__ __forceinline__ int64_t pixel_offset(const TransposeArgs& a, const Side& side, const Tile& t, int p) {
  if (!side.plane) return t.slot * side.stride_n + (t.first_pixel + p) * side.stride_x;  // the stack is packed
  uint32_t row, column;
  a.block_width.divmod(t.first_pixel + p, &row, &column);
  const int y = a.grid.offset[0] + t.block.i * a.grid.stride[0] + static_cast<int>(row);
  const int x = a.grid.offset[1] + t.block.j * a.grid.stride[1] + static_cast<int>(column);
  const bool inside = t.known && static_cast<unsigned>(y) < static_cast<unsigned>(a.height) &&
                      static_cast<unsigned>(x) < static_cast<unsigned>(a.width);
  return inside ? t.block.n * side.stride_n + y * side.stride_y + x * side.stride_x : -1;
}

// Between the pixels side and the tile in shared memory, 16 bytes of channels a thread.
template <class T, bool kLoad>
__device__ __forceinline__ void move_pixels_wide(const TransposeArgs& a, const Tile& t, uint32_t* tile) {
  constexpr int kPerWord = 4 / sizeof(T);
  T* const base = reinterpret_cast<T*>(a.pixels.data) + t.first_channel;
  const int quads = a.words / 4, log_quads = 31 - __clz(quads);
  for (int first = threadIdx.x; first < t.pixels * quads; first += kThreads * kUnroll) {
    uint4 value[kUnroll];
    int64_t offset[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {  // all loads are under way before the first is used
      const int e = first + u * kThreads, p = e >> log_quads, w = (e & (quads - 1)) * 4;
      const bool mine = p < t.pixels && w * kPerWord < t.channels;
      offset[u] = mine ? pixel_offset(a, a.pixels, t, p) : -1;
      const uint32_t* s = tile + p * a.pitch + w;
      if (kLoad)
        value[u] = offset[u] < 0 ? uint4{} : *reinterpret_cast<const uint4*>(base + offset[u] + w * kPerWord);
      else if (mine)
        value[u] = uint4{s[0], s[1], s[2], s[3]};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int e = first + u * kThreads, p = e >> log_quads, w = (e & (quads - 1)) * 4;
      uint32_t* s = tile + p * a.pitch + w;
      if (kLoad) {
        if (p < t.pixels) s[0] = value[u].x, s[1] = value[u].y, s[2] = value[u].z, s[3] = value[u].w;
      } else if (offset[u] >= 0) {
        *reinterpret_cast<uint4*>(base + offset[u] + w * kPerWord) = value[u];
      }
    }
  }
}

// The same for channel counts or pointers that 16 bytes do not fit: one element a thread.
template <class T, bool kLoad>
__device__ __forceinline__ void move_pixels(const TransposeArgs& a, const Tile& t, uint32_t* tile) {
  T* const base = reinterpret_cast<T*>(a.pixels.data) + t.first_channel;
  for (int p = threadIdx.x / 32; p < t.pixels; p += kWarps) {
    const int64_t offset = pixel_offset(a, a.pixels, t, p);
    for (int c = threadIdx.x % 32; c < t.channels; c += 32) {
      T* s = reinterpret_cast<T*>(tile + p * a.pitch) + c;
      if (kLoad)
        *s = offset < 0 ? T{} : base[offset + c];
      else if (offset >= 0)
        base[offset + c] = *s;
    }
  }
}

// Between the channels side and the tile, kVec pixels of the channels of one word a thread. A warp takes a few words by
// groups of pixels so that it touches whole rows of memory and, with the odd pitch, at most two lanes meet in one bank.
template <class T, int kVec, bool kLoad>
__device__ __forceinline__ void move_channels(const TransposeArgs& a, const Tile& t, uint32_t* tile) {
  constexpr int kPerWord = 4 / sizeof(T);
  constexpr int kWords = kVec == 1               ? 1
                         : kVec * sizeof(T) == 8 ? 2
                                                 : 4,
                kGroups = 32 / kWords;  // of a warp: rows of 64 bytes or more
  constexpr int kAhead = !kLoad ? 1 : kVec == 8 ? 2 : 4;
  const int lane = threadIdx.x % 32, log_across = 31 - __clz(a.words / kWords);  // words is a power of two
  const int steps = (t.pixels + kGroups * kVec - 1) / (kGroups * kVec) << log_across;
  T* const base = reinterpret_cast<T*>(a.channels.data) + t.first_channel * a.channels.stride_c;
  for (int first = threadIdx.x / 32; first < steps; first += kWarps * kAhead) {
    Pack<T, kVec> value[kAhead][kPerWord];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // all reads come before the writes
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int step = first + u * kWarps;
        const int p = ((step >> log_across) * kGroups + lane / kWords) * kVec;
        const int w = (step & ((1 << log_across) - 1)) * kWords + lane % kWords;
        const int c = w * kPerWord;
        if (step >= steps || p >= t.pixels || c >= t.channels) continue;
        uint32_t* s = tile + p * a.pitch + w;
        if (kLoad == (half == 0)) {  // global memory
          const int64_t offset = pixel_offset(a, a.channels, t, p);
#pragma unroll
          for (int h = 0; h < kPerWord; ++h) {
            auto* at = reinterpret_cast<Pack<T, kVec>*>(base + offset + (c + h) * a.channels.stride_c);
            const bool there = offset >= 0 && c + h < t.channels;
            if (kLoad)
              value[u][h] = there ? *at : Pack<T, kVec>{};
            else if (there)
              *at = value[u][h];
          }
        } else {  // shared memory
#pragma unroll
          for (int k = 0; k < kVec; ++k) {
            T word[kPerWord];
            if (kLoad) {
#pragma unroll
              for (int h = 0; h < kPerWord; ++h) word[h] = value[u][h].v[k];
              s[k * a.pitch] = *reinterpret_cast<uint32_t*>(word);
            } else {
              *reinterpret_cast<uint32_t*>(word) = s[k * a.pitch];
#pragma unroll
              for (int h = 0; h < kPerWord; ++h) value[u][h].v[k] = word[h];
            }
          }
        }
      }
    }
  }
}

// The same where the tile holds whole blocks of a stack: vectors of the run that `run_channels` channels are; one may
// end a channel and begin the next. A warp takes four vectors of eight runs at a time, so that few lanes meet in one
// bank.
template <class T, bool kLoad>
__device__ __forceinline__ void move_runs(const TransposeArgs& a, const Tile& t, uint32_t* tile) {
  constexpr int kVec = 16 / sizeof(T), kPerWord = 4 / sizeof(T), kAhead = kLoad ? 3 : 2;
  constexpr int kPitch = (kTileWords + 1) * kPerWord;  // elements from pixel to pixel, a constant: fewer additions
  using Vector = Pack<T, kVec>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int run = warp % a.run_sets * 8 + lane / 4, stride = kWarps / a.run_sets * 4;
  if (run * a.run_channels >= t.channels) return;
  T* const column = reinterpret_cast<T*>(tile) + run * a.run_channels;
  auto* const vectors = reinterpret_cast<Vector*>(reinterpret_cast<T*>(a.channels.data) + t.slot * a.channels.stride_n +
                                                  static_cast<int64_t>(t.first_channel) * a.area) +
                        run * a.run_vectors;
  for (int first = warp / a.run_sets * 4 + lane % 4; first < a.run_vectors; first += stride * kAhead) {
    Vector value[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead && kLoad; ++u)
      if (first + u * stride < a.run_vectors) value[u] = vectors[first + u * stride];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int v = first + u * stride;
      if (v >= a.run_vectors) break;
      uint32_t c, p;
      a.block_area.divmod(v * kVec, &c, &p);
      T* s = column + p * kPitch + c;
      const int left = a.area - static_cast<int>(p);  // pixels to the end of the channel
      const auto move = [&](T* at, int k) {
        if (kLoad)
          at[k * kPitch] = value[u].v[k];
        else
          value[u].v[k] = at[k * kPitch];
      };
      if (left >= kVec) {
#pragma unroll
        for (int k = 0; k < kVec; ++k) move(s, k);
      } else {
        T* const next = s - (a.area * kPitch - 1);
#pragma unroll
        for (int k = 0; k < kVec; ++k) move(k < left ? s : next, k);
      }
      if (!kLoad) vectors[v] = value[u];
    }
  }
}

// kVec: pixels of an access on the channels side; 0: runs of channels.
template <class T, int kVec, bool kGather>
__global__ void __launch_bounds__(kThreads, 4) transpose_kernel(const __grid_constant__ TransposeArgs a) {
  __shared__ uint32_t tile[kTileBuffer];
  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(a.count, min(a.capacity, a.rows));
  const int tile_channels = a.words * 4 / static_cast<int>(sizeof(T));
  const int64_t per_block = static_cast<int64_t>(a.pieces) * a.chunks;
  const int64_t total = (kGather && a.zero_tail ? a.rows : count) * per_block;
  for (int64_t at = blockIdx.x; at < total; at += gridDim.x) {
    Tile t;
    t.slot = static_cast<int>(at / per_block);
    const int within = static_cast<int>(at - t.slot * per_block);
    t.first_pixel = within / a.chunks * a.piece_pixels;
    t.first_channel = within % a.chunks * tile_channels;
    t.pixels = min(a.piece_pixels, a.area - t.first_pixel);
    t.channels = min(tile_channels, a.depth - t.first_channel);
    t.block = {0, 0, 0};
    t.known = t.slot < count && load_block(a.indices, t.slot, a.batch, a.grid, &t.block);
    if (!kGather && !t.known) continue;
    // Reading side -> tile -> writing side.
    if constexpr (kVec == 0) {
      kGather ? move_pixels_wide<T, true>(a, t, tile) : move_runs<T, true>(a, t, tile);
      __syncthreads();
      kGather ? move_runs<T, false>(a, t, tile) : move_pixels_wide<T, false>(a, t, tile);
    } else if (a.pixels.plane == kGather) {
      a.wide ? move_pixels_wide<T, true>(a, t, tile) : move_pixels<T, true>(a, t, tile);
      __syncthreads();
      move_channels<T, kVec, false>(a, t, tile);
    } else {
      move_channels<T, kVec, true>(a, t, tile);
      __syncthreads();
      a.wide ? move_pixels_wide<T, false>(a, t, tile) : move_pixels<T, false>(a, t, tile);
    }
    __syncthreads();
  }
}

template <class T>
cudaError_t launch_transpose(const BlockCopyParams& p, const DeviceInfo& device, bool plane_is_pixels,
                             cudaStream_t stream) {
  const BlockGrid& g = p.active.grid;
  const auto side = [](const TensorView& t, bool plane) {
    return Side{static_cast<char*>(t.data), t.stride[0], t.stride[1], t.stride[2], t.stride[3], plane};
  };
  const TensorView& pixels = plane_is_pixels ? p.plane : p.blocks;
  const TensorView& channels = plane_is_pixels ? p.blocks : p.plane;
  TransposeArgs a = {};
  a.pixels = side(pixels, plane_is_pixels);
  a.channels = side(channels, !plane_is_pixels);
  a.indices = p.active.indices, a.count = p.active.count;
  a.capacity = static_cast<int>(p.active.capacity), a.rows = static_cast<int>(p.blocks.size[0]);
  a.batch = static_cast<int>(p.plane.size[0]), a.depth = static_cast<int>(p.plane.size[1]);
  a.height = static_cast<int>(p.plane.size[2]), a.width = static_cast<int>(p.plane.size[3]);
  a.grid = g;
  a.area = g.size[0] * g.size[1];
  a.block_width = FastDiv(g.size[1]);
  a.block_area = FastDiv(a.area);
  a.zero_tail = p.zero_tail;

  const auto aligned = [](const TensorView& t, int64_t v, std::initializer_list<int> strides) {
    bool yes = reinterpret_cast<uintptr_t>(t.data) % (v * sizeof(T)) == 0;
    for (const int d : strides) yes = yes && t.stride[d] % v == 0;
    return yes;
  };
  constexpr int64_t kWide = 16 / sizeof(T);
  a.wide = a.depth % kWide == 0 && aligned(pixels, kWide, {0, 2, 3});
  // Pixels that one access takes on the channels side: they must lie in one row of a plane, and start aligned.
  int64_t vec = kWide;
  const auto fits = [&](int64_t v) {
    if (plane_is_pixels) return a.area % v == 0 && aligned(channels, v, {});
    return g.size[1] % v == 0 && g.stride[1] % v == 0 && g.offset[1] % v == 0 && p.plane.size[3] % v == 0 &&
           aligned(channels, v, {0, 1, 2});
  };
  while (vec > 1 && !fits(vec)) vec = vec > 4 ? 4 : 1;

  a.words = kTileWords;
  while (a.words > 8 && a.area > most_pixels(a.words) && a.area <= most_pixels(8)) a.words /= 2;
  a.pitch = a.words + 1;
  a.chunks = static_cast<int>(ceil_div(a.depth, a.words * 4 / static_cast<int64_t>(sizeof(T))));
  a.pieces = static_cast<int>(ceil_div(a.area, most_pixels(a.words) / kWide * kWide));
  // Few blocks: smaller pieces, so that every multiprocessor has one.
  while (p.blocks.size[0] * a.pieces * a.chunks < device.sm_count && a.area > a.pieces * 64) ++a.pieces;
  a.piece_pixels = static_cast<int>(ceil_div(ceil_div(a.area, a.pieces), kWide) * kWide);
  a.pieces = static_cast<int>(ceil_div(a.area, a.piece_pixels));
  const int64_t tiles = p.blocks.size[0] * a.pieces * a.chunks;
  const bool gather = p.direction == CopyDirection::kGather;
  a.run_channels = 1;
  while (static_cast<int64_t>(a.run_channels) * a.area % kWide) a.run_channels *= 2;
  a.run_vectors = static_cast<int>(static_cast<int64_t>(a.run_channels) * a.area / kWide);
  a.run_sets = std::max(1, a.words * 4 / static_cast<int>(sizeof(T)) / a.run_channels / 8);
  const bool runs = plane_is_pixels && (vec < kWide || (sizeof(T) == 2 && !gather)) && a.area >= kWide &&
                    a.words == kTileWords && a.wide && a.pieces == 1 && aligned(channels, kWide, {0});
  const auto go = [&](auto kernel) { return launch(device, kernel, tiles, 4, stream, a); };
  if (runs) return go(gather ? transpose_kernel<T, 0, true> : transpose_kernel<T, 0, false>);
  if constexpr (kWide == 8) {
    if (vec == 8) return go(gather ? transpose_kernel<T, 8, true> : transpose_kernel<T, 8, false>);
  }
  if (vec == 4) return go(gather ? transpose_kernel<T, 4, true> : transpose_kernel<T, 4, false>);
  return go(gather ? transpose_kernel<T, 1, true> : transpose_kernel<T, 1, false>);
}

}  // namespace

cudaError_t launch_block_transpose(const BlockCopyParams& p, const DeviceInfo& device, bool plane_is_pixels,
                                   cudaStream_t stream) {
  return dtype_size(p.plane.dtype) == 4 ? launch_transpose<uint32_t>(p, device, plane_is_pixels, stream)
                                        : launch_transpose<uint16_t>(p, device, plane_is_pixels, stream);
}

}  // namespace sbnet

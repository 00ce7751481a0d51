// sparse_gather and sparse_scatter on CUDA: copies between blocks of a plane and rows of a packed stack.
//
//   copy_kernel       any layouts; walks the stack linearly in vectors of up to 16 bytes
//   transpose_kernel  channels_last on one side, NCHW on the other: 32-word tiles through shared memory
//   add_kernel        scatter-add, plain or atomic
//   overlap_kernel    scatter-add of overlapping blocks without atomics: each pixel sums the blocks over it
//
// Rows of the index list that are no block of the grid read as zeros (gather) or are skipped (scatter).
#include "core/blocks.h"
#include "cuda/common.cuh"

namespace sbnet {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

// The block of the stack as a 3-D array [d0, d1, d2] of vectors in memory order, and where its vectors lie on the
// plane. channels_last: (row, column, channel); NCHW: (channel, row, column). All units are vectors.
struct CopyArgs {
  char *plane, *blocks;
  const int32_t *indices, *count;
  int capacity, rows, batch;  // rows of the stack
  BlockGrid grid;
  bool channels_last, zero_tail;
  FastDiv d1, d2, block;  // block: vectors of a whole block
  int64_t stride_n, stride_y, stride_x, stride_c;
  int height, width;
  int origin_x, step_x;  // grid.offset[1], grid.stride[1] in vectors (they differ from pixels in NCHW only)
};

struct Spot {
  bool inside;     // on the plane
  int64_t offset;  // in vectors
};

// Where vector v of block b lies.
__device__ __forceinline__ Spot locate(const CopyArgs& a, const BlockIndex& b, uint32_t v) {
  uint32_t t, c0, c1, c2;
  a.d2.divmod(v, &t, &c2);
  a.d1.divmod(t, &c0, &c1);
  const int y = a.grid.offset[0] + b.i * a.grid.stride[0] + static_cast<int>(a.channels_last ? c0 : c1);
  const int x = a.origin_x + b.j * a.step_x + static_cast<int>(a.channels_last ? c1 : c2);
  const int64_t c = a.channels_last ? c2 : c0;
  return {static_cast<unsigned>(y) < static_cast<unsigned>(a.height) &&
              static_cast<unsigned>(x) < static_cast<unsigned>(a.width),
          b.n * a.stride_n + y * a.stride_y + x * a.stride_x + c * a.stride_c};
}

template <class V, bool kGather>
__global__ void __launch_bounds__(kThreads) copy_kernel(const CopyArgs a) {
  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(a.count, min(a.capacity, a.rows));
  const uint32_t block = a.block.divisor;
  const int64_t total = static_cast<int64_t>(kGather && a.zero_tail ? a.rows : count) * block;
  constexpr int kChunk = kThreads * kUnroll;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * kChunk; chunk < total;
       chunk += static_cast<int64_t>(gridDim.x) * kChunk) {
    const int64_t first_slot = chunk / block;
    const uint32_t first = static_cast<uint32_t>(chunk - first_slot * block) + threadIdx.x;
    V value[kUnroll];
    V* target[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      target[u] = nullptr;
      const int64_t at = chunk + threadIdx.x + u * kThreads;
      if (at >= total) continue;
      uint32_t skip, v;
      a.block.divmod(first + u * kThreads, &skip, &v);
      const int64_t slot = first_slot + skip;
      BlockIndex b;
      const bool known = slot < count && load_block(a.indices, slot, a.batch, a.grid, &b);
      const Spot spot = known ? locate(a, b, v) : Spot{false, 0};
      V* stack = reinterpret_cast<V*>(a.blocks) + at;
      V* plane = reinterpret_cast<V*>(a.plane) + spot.offset;
      if (kGather) {
        value[u] = V{};
        if (spot.inside) value[u] = *plane;
        target[u] = stack;
      } else if (spot.inside) {
        value[u] = *stack;
        target[u] = plane;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (target[u]) *target[u] = value[u];
  }
}

__device__ __forceinline__ void atomic_add(float* p, float v) { atomicAdd(p, v); }
__device__ __forceinline__ void atomic_add(__half* p, __half v) { atomicAdd(p, v); }
__device__ __forceinline__ void atomic_add(__nv_bfloat16* p, __nv_bfloat16 v) { atomicAdd(p, v); }

template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T v[kVec];
};

template <class T, int kVec, bool kAtomic>
__global__ void __launch_bounds__(kThreads) add_kernel(const CopyArgs a) {
  using V = Pack<T, kVec>;
  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(a.count, min(a.capacity, a.rows));
  const uint32_t block = a.block.divisor;
  const int64_t total = static_cast<int64_t>(count) * block;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < total;
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t slot = at / block;
    BlockIndex b;
    if (!load_block(a.indices, slot, a.batch, a.grid, &b)) continue;
    const Spot spot = locate(a, b, static_cast<uint32_t>(at - slot * block));
    if (!spot.inside) continue;
    const V value = reinterpret_cast<const V*>(a.blocks)[at];
    V* plane = reinterpret_cast<V*>(a.plane) + spot.offset;
    if (kAtomic) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) atomic_add(&plane->v[e], value.v[e]);
    } else {
      V sum = *plane;
#pragma unroll
      for (int e = 0; e < kVec; ++e)
        sum.v[e] = static_cast<T>(static_cast<float>(sum.v[e]) + static_cast<float>(value.v[e]));
      *plane = sum;
    }
  }
}

struct OverlapArgs {
  void* plane;
  const void* blocks;
  const int32_t *block_map, *count;
  int capacity, rows, batch, channels;
  BlockGrid grid;
  int64_t plane_stride[4], blocks_stride[4];
  int height, width;
};

// First and one past the last grid position whose block covers coordinate v.
__device__ __forceinline__ void covering(const BlockGrid& g, int dim, int v, int* first, int* last) {
  const int t = v - g.offset[dim];
  *last = t < 0 ? 0 : min(t / g.stride[dim] + 1, g.count[dim]);
  const int s = t - g.size[dim] + 1;
  *first = s <= 0 ? 0 : (s + g.stride[dim] - 1) / g.stride[dim];
}

// One warp a pixel, lanes over channels; blocks are added in raster order, in float32, and rounded once.
template <class T>
__global__ void __launch_bounds__(kThreads) overlap_kernel(const OverlapArgs a) {
  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(a.count, min(a.capacity, a.rows));
  const int64_t pixels = static_cast<int64_t>(a.batch) * a.height * a.width;
  const int lane = threadIdx.x % 32;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; p < pixels;
       p += static_cast<int64_t>(gridDim.x) * (kThreads / 32)) {
    const int x = static_cast<int>(p % a.width), y = static_cast<int>(p / a.width % a.height);
    const int n = static_cast<int>(p / a.width / a.height);
    int i0, i1, j0, j1;
    covering(a.grid, 0, y, &i0, &i1);
    covering(a.grid, 1, x, &j0, &j1);
    T* out = static_cast<T*>(a.plane) + n * a.plane_stride[0] + y * a.plane_stride[2] + x * a.plane_stride[3];
    const int32_t* map = a.block_map + static_cast<int64_t>(n) * a.grid.count[0] * a.grid.count[1];
    for (int c = lane; c - lane < a.channels; c += 32) {
      float sum = 0;
      bool touched = false;
      for (int i = i0; i < i1; ++i) {
        for (int j = j0; j < j1; ++j) {
          const int slot = __ldg(map + static_cast<int64_t>(i) * a.grid.count[1] + j);
          if (slot < 0 || slot >= count || c >= a.channels) continue;
          if (!touched) sum = static_cast<float>(out[c * a.plane_stride[1]]);
          touched = true;
          const int by = y - a.grid.offset[0] - i * a.grid.stride[0], bx = x - a.grid.offset[1] - j * a.grid.stride[1];
          sum += static_cast<float>(static_cast<const T*>(a.blocks)[slot * a.blocks_stride[0] + c * a.blocks_stride[1] +
                                                                    by * a.blocks_stride[2] + bx * a.blocks_stride[3]]);
        }
      }
      if (touched) out[c * a.plane_stride[1]] = static_cast<T>(sum);
    }
  }
}

// One side of a transposed copy. For the stack n is the slot and (y, x) lie within the block.
struct Side {
  char* data;
  int64_t stride_n, stride_c, stride_y, stride_x;  // elements
};

constexpr int kTilePixels = 256;
constexpr int kTileWords = 32;  // 128 bytes of channels

struct TransposeArgs {
  Side pixel_major, channel_major;     // channel stride 1; pixels next to each other
  bool plane_is_pixel_major, vectors;  // vectors: 16-byte accesses are aligned on the pixel-major side
  const int32_t *indices, *count;
  int capacity, rows, batch, channels, height, width;
  BlockGrid grid;
  int area, pieces, piece_pixels, chunks;  // a block = pieces of pixels x chunks of channels
  FastDiv block_width;
  bool zero_tail;
};

template <class T, bool kGather>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const TransposeArgs a) {
  constexpr int kPerWord = 4 / sizeof(T);
  constexpr int kTileChannels = kTileWords * kPerWord;
  __shared__ uint32_t tile[kTilePixels][kTileWords + 1];  // the odd pitch keeps both directions free of conflicts
  __shared__ int64_t pixel_offset[kTilePixels], channel_offset[kTilePixels];
  grid_dependency_wait();
  grid_dependency_release();
  const int count = clamped_count(a.count, min(a.capacity, a.rows));
  const int64_t per_block = static_cast<int64_t>(a.pieces) * a.chunks;
  const int64_t total = (kGather && a.zero_tail ? a.rows : count) * per_block;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kWarps = kThreads / 32;

  for (int64_t t = blockIdx.x; t < total; t += gridDim.x) {
    const int slot = static_cast<int>(t / per_block), within = static_cast<int>(t % per_block);
    const int first_pixel = within / a.chunks * a.piece_pixels, c0 = within % a.chunks * kTileChannels;
    const int pixels = min(a.piece_pixels, a.area - first_pixel), channels = min(kTileChannels, a.channels - c0);
    BlockIndex b = {0, 0, 0};
    const bool known = slot < count && load_block(a.indices, slot, a.batch, a.grid, &b);
    if (!kGather && !known) continue;

    __syncthreads();  // the tile before this one has been read
    for (int p = threadIdx.x; p < pixels; p += kThreads) {
      uint32_t row, column;
      a.block_width.divmod(first_pixel + p, &row, &column);
      const int y = a.grid.offset[0] + b.i * a.grid.stride[0] + static_cast<int>(row);
      const int x = a.grid.offset[1] + b.j * a.grid.stride[1] + static_cast<int>(column);
      const bool inside = known && static_cast<unsigned>(y) < static_cast<unsigned>(a.height) &&
                          static_cast<unsigned>(x) < static_cast<unsigned>(a.width);
      const Side& plane = a.plane_is_pixel_major ? a.pixel_major : a.channel_major;
      const Side& stack = a.plane_is_pixel_major ? a.channel_major : a.pixel_major;
      const int64_t on_plane =
          inside ? b.n * plane.stride_n + y * plane.stride_y + x * plane.stride_x : static_cast<int64_t>(-1);
      const int64_t on_stack = slot * stack.stride_n + row * stack.stride_y + column * stack.stride_x;
      pixel_offset[p] = a.plane_is_pixel_major ? on_plane : on_stack;
      channel_offset[p] = a.plane_is_pixel_major ? on_stack : on_plane;
    }
    __syncthreads();

    T* const pixel_side = reinterpret_cast<T*>(a.pixel_major.data) + c0;
    T* const channel_side = reinterpret_cast<T*>(a.channel_major.data) + c0 * a.channel_major.stride_c;
    // A tile goes pixel-major -> shared -> channel-major when the reading side is the pixel-major one, else backwards.
    const bool from_pixels = a.plane_is_pixel_major == kGather;
    for (int half = 0; half < 2; ++half) {
      const bool load = half == 0;
      if (from_pixels == load) {  // this half works on the pixel-major side
        if (a.vectors) {
          for (int e = threadIdx.x; e < pixels * 8; e += kThreads) {
            const int p = e / 8, w = e % 8 * 4;
            if (w * kPerWord >= channels) continue;
            uint4* at = reinterpret_cast<uint4*>(pixel_side + pixel_offset[p] + w * kPerWord);
            uint32_t* s = &tile[p][w];
            if (load) {
              const uint4 v = pixel_offset[p] < 0 ? uint4{} : *at;
              s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
            } else if (pixel_offset[p] >= 0) {
              *at = uint4{s[0], s[1], s[2], s[3]};
            }
          }
        } else {
          for (int p = warp; p < pixels; p += kWarps) {
            for (int c = lane; c < channels; c += 32) {
              T* at = pixel_side + pixel_offset[p] + c;
              T* s = reinterpret_cast<T*>(tile[p]) + c;
              if (load)
                *s = pixel_offset[p] < 0 ? T{} : *at;
              else if (pixel_offset[p] >= 0)
                *at = *s;
            }
          }
        }
      } else {  // the channel-major side: lanes over pixels
        for (int w = warp; w * kPerWord < channels; w += kWarps) {
          T* const row = channel_side + static_cast<int64_t>(w) * kPerWord * a.channel_major.stride_c;
          for (int p = lane; p < pixels; p += 32) {
            const int64_t offset = channel_offset[p];
            T word[kPerWord];
            if (load) {
#pragma unroll
              for (int h = 0; h < kPerWord; ++h)
                word[h] = offset < 0 || w * kPerWord + h >= channels ? T{} : row[offset + h * a.channel_major.stride_c];
              tile[p][w] = *reinterpret_cast<uint32_t*>(word);
            } else if (offset >= 0) {
              *reinterpret_cast<uint32_t*>(word) = tile[p][w];
#pragma unroll
              for (int h = 0; h < kPerWord; ++h)
                if (w * kPerWord + h < channels) row[offset + h * a.channel_major.stride_c] = word[h];
            }
          }
        }
      }
      if (load) __syncthreads();
    }
  }
}

// ------------------------------------------------------------------ host side

// Widest vector (in bytes) that never straddles an edge or an alignment boundary.
int vector_bytes(const BlockCopyParams& p, bool channels_last) {
  const int64_t item = dtype_size(p.plane.dtype);
  const TensorView& t = p.plane;
  const BlockGrid& g = p.active.grid;
  for (int64_t bytes = 16; bytes > item; bytes /= 2) {
    const int64_t v = bytes / item;
    const auto whole = [&](int64_t x) { return x % v == 0; };
    bool fits = t.stride[channels_last ? 1 : 3] == 1 && whole(t.stride[0]) && whole(t.stride[2]) &&
                reinterpret_cast<uintptr_t>(t.data) % bytes == 0 &&
                reinterpret_cast<uintptr_t>(p.blocks.data) % bytes == 0;
    fits = fits && (channels_last ? whole(t.size[1]) && whole(t.stride[3])
                                  : whole(t.stride[1]) && whole(t.size[3]) && whole(g.size[1]) && whole(g.stride[1]) &&
                                        whole(g.offset[1]));
    if (fits) return static_cast<int>(bytes);
  }
  return static_cast<int>(item);
}

CopyArgs copy_args(const BlockCopyParams& p, bool channels_last, int64_t vector) {
  const TensorView& t = p.plane;
  const BlockGrid& g = p.active.grid;
  CopyArgs a = {};
  a.plane = static_cast<char*>(t.data), a.blocks = static_cast<char*>(p.blocks.data);
  a.indices = p.active.indices, a.count = p.active.count;
  a.capacity = static_cast<int>(p.active.capacity), a.rows = static_cast<int>(p.blocks.size[0]);
  a.batch = static_cast<int>(t.size[0]);
  a.grid = g;
  a.channels_last = channels_last, a.zero_tail = p.zero_tail;
  const int64_t in_x = channels_last ? 1 : vector;
  a.d1 = FastDiv(channels_last ? g.size[1] : g.size[0]);
  a.d2 = FastDiv(channels_last ? t.size[1] / vector : g.size[1] / vector);
  a.block = FastDiv(t.size[1] * g.size[0] * g.size[1] / vector);
  a.stride_n = t.stride[0] / vector, a.stride_y = t.stride[2] / vector;
  a.stride_x = channels_last ? t.stride[3] / vector : (vector == 1 ? t.stride[3] : 1);
  a.stride_c = channels_last ? (vector == 1 ? t.stride[1] : 1) : t.stride[1] / vector;
  a.height = static_cast<int>(t.size[2]), a.width = static_cast<int>(t.size[3] / in_x);
  a.origin_x = static_cast<int>(g.offset[1] / in_x), a.step_x = static_cast<int>(g.stride[1] / in_x);
  return a;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Kernel, class Args>
cudaError_t launch(const DeviceInfo& device, Kernel kernel, int64_t ctas, int per_sm, cudaStream_t stream,
                   const Args& args) {
  const int64_t most = static_cast<int64_t>(device.sm_count) * per_sm;
  return launch_dependent(device, kernel, dim3(static_cast<unsigned>(ctas < most ? ctas : most)), dim3(kThreads), 0,
                          stream, args);
}

template <class V>
cudaError_t launch_copy(const BlockCopyParams& p, const DeviceInfo& device, bool channels_last, int64_t vector,
                        cudaStream_t stream) {
  const CopyArgs a = copy_args(p, channels_last, vector);
  const int64_t ctas = ceil_div(p.blocks.size[0] * a.block.divisor, kThreads * kUnroll);
  return p.direction == CopyDirection::kGather ? launch(device, copy_kernel<V, true>, ctas, 8, stream, a)
                                               : launch(device, copy_kernel<V, false>, ctas, 8, stream, a);
}

template <class T>
cudaError_t launch_add(const BlockCopyParams& p, const DeviceInfo& device, bool channels_last, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  if (p.active.grid.overlaps() && !p.atomic) {
    OverlapArgs a = {p.plane.data,
                     p.blocks.data,
                     p.active.block_map,
                     p.active.count,
                     static_cast<int>(p.active.capacity),
                     static_cast<int>(p.blocks.size[0]),
                     static_cast<int>(p.plane.size[0]),
                     static_cast<int>(p.plane.size[1]),
                     p.active.grid,
                     {},
                     {},
                     static_cast<int>(p.plane.size[2]),
                     static_cast<int>(p.plane.size[3])};
    for (int d = 0; d < 4; ++d) a.plane_stride[d] = p.plane.stride[d], a.blocks_stride[d] = p.blocks.stride[d];
    const int64_t pixels = p.plane.size[0] * p.plane.size[2] * p.plane.size[3];
    return launch(device, overlap_kernel<T>, ceil_div(pixels, kThreads / 32), 8, stream, a);
  }
  const bool wide = vector_bytes(p, channels_last) == 16;
  const CopyArgs a = copy_args(p, channels_last, wide ? kVec : 1);
  auto kernel = wide ? (p.atomic ? add_kernel<T, kVec, true> : add_kernel<T, kVec, false>)
                     : (p.atomic ? add_kernel<T, 1, true> : add_kernel<T, 1, false>);
  return launch(device, kernel, ceil_div(p.blocks.size[0] * a.block.divisor, kThreads), 8, stream, a);
}

template <class T>
cudaError_t launch_transpose(const BlockCopyParams& p, const DeviceInfo& device, bool plane_is_pixel_major,
                             cudaStream_t stream) {
  const auto side = [](const TensorView& t) {
    return Side{static_cast<char*>(t.data), t.stride[0], t.stride[1], t.stride[2], t.stride[3]};
  };
  const TensorView& pixel_major = plane_is_pixel_major ? p.plane : p.blocks;
  TransposeArgs a = {};
  a.pixel_major = side(pixel_major);
  a.channel_major = side(plane_is_pixel_major ? p.blocks : p.plane);
  a.plane_is_pixel_major = plane_is_pixel_major;
  constexpr int64_t kVec = 16 / sizeof(T);
  a.vectors = reinterpret_cast<uintptr_t>(pixel_major.data) % 16 == 0 && pixel_major.size[1] % kVec == 0 &&
              pixel_major.stride[0] % kVec == 0 && pixel_major.stride[2] % kVec == 0 &&
              pixel_major.stride[3] % kVec == 0;
  a.indices = p.active.indices, a.count = p.active.count;
  a.capacity = static_cast<int>(p.active.capacity), a.rows = static_cast<int>(p.blocks.size[0]);
  a.batch = static_cast<int>(p.plane.size[0]), a.channels = static_cast<int>(p.plane.size[1]);
  a.height = static_cast<int>(p.plane.size[2]), a.width = static_cast<int>(p.plane.size[3]);
  a.grid = p.active.grid;
  a.area = a.grid.size[0] * a.grid.size[1];
  a.pieces = static_cast<int>(ceil_div(a.area, kTilePixels));
  a.piece_pixels = static_cast<int>(ceil_div(a.area, a.pieces));
  a.chunks = static_cast<int>(ceil_div(a.channels, kTileWords * 4 / static_cast<int64_t>(sizeof(T))));
  a.block_width = FastDiv(a.grid.size[1]);
  a.zero_tail = p.zero_tail;
  const int64_t tiles = p.blocks.size[0] * a.pieces * a.chunks;
  return p.direction == CopyDirection::kGather ? launch(device, transpose_kernel<T, true>, tiles, 5, stream, a)
                                               : launch(device, transpose_kernel<T, false>, tiles, 5, stream, a);
}

cudaError_t dispatch(const BlockCopyParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool blocks_channels_last = p.blocks.stride[1] == 1;
  if (p.add) {
    switch (p.plane.dtype) {
      case DType::kF32:
        return launch_add<float>(p, device, blocks_channels_last, stream);
      case DType::kF16:
        return launch_add<__half>(p, device, blocks_channels_last, stream);
      default:
        return launch_add<__nv_bfloat16>(p, device, blocks_channels_last, stream);
    }
  }
  const int64_t item = dtype_size(p.plane.dtype);
  const bool transposed = blocks_channels_last ? p.plane.stride[3] == 1 && p.plane.size[1] > 1
                                               : p.plane.stride[1] == 1 && p.plane.stride[3] != 1;
  if (transposed && item == 4) return launch_transpose<uint32_t>(p, device, !blocks_channels_last, stream);
  if (transposed && item == 2) return launch_transpose<uint16_t>(p, device, !blocks_channels_last, stream);
  const int bytes = vector_bytes(p, blocks_channels_last);
  switch (bytes) {
    case 16:
      return launch_copy<uint4>(p, device, blocks_channels_last, bytes / item, stream);
    case 8:
      return launch_copy<uint64_t>(p, device, blocks_channels_last, bytes / item, stream);
    case 4:
      return launch_copy<uint32_t>(p, device, blocks_channels_last, bytes / item, stream);
    case 2:
      return launch_copy<uint16_t>(p, device, blocks_channels_last, bytes / item, stream);
    default:
      return launch_copy<uint8_t>(p, device, blocks_channels_last, bytes / item, stream);
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_block_copy_cuda(const sbnet::BlockCopyParams* params, void* stream) {
  using namespace sbnet;
  const char* op = params->direction == CopyDirection::kGather ? "sparse_gather" : "sparse_scatter";
  SBNET_TRY(validate(*params));
  for (int d = 0; d < 4; ++d)
    if (params->plane.size[d] == 0 && d != 1 && params->direction == CopyDirection::kScatter) return ok_status();
  if (params->blocks.size[0] == 0 || params->plane.size[1] == 0) return ok_status();
  DeviceInfo device;
  SBNET_TRY(current_device(op, &device));
  SBNET_CUDA_TRY(op, dispatch(*params, device, static_cast<cudaStream_t>(stream)));
  return ok_status();
}

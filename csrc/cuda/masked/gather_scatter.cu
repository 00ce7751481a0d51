// sparse_gather and sparse_scatter on CUDA: copies between blocks of a plane and rows of a packed stack.
//
//   copy_kernel     any layouts; walks the stack linearly in vectors of up to 16 bytes
//   add_kernel      scatter-add, plain or atomic
//   overlap_kernel  scatter-add of overlapping blocks without atomics: each pixel sums the blocks over it
//
// blocks_transpose.cu has the copies between channels_last and NCHW.
//
// Rows of the index list that are no block of the grid read as zeros (gather) or are skipped (scatter).
#include "cuda/by_dtype.cuh"
#include "cuda/masked/gather_scatter.cuh"

namespace sbnet {
namespace {

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
          const int slot = map[static_cast<int64_t>(i) * a.grid.count[1] + j];
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

cudaError_t dispatch(const BlockCopyParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool blocks_channels_last = p.blocks.stride[1] == 1;
  if (p.add) {
    return by_dtype(p.plane.dtype,
                    [&](auto t) { return launch_add<decltype(t)>(p, device, blocks_channels_last, stream); });
  }
  const int64_t item = dtype_size(p.plane.dtype);
  const bool transposed = blocks_channels_last ? p.plane.stride[3] == 1 && p.plane.size[1] > 1
                                               : p.plane.stride[1] == 1 && p.plane.stride[3] != 1;
  if (transposed && (item == 4 || item == 2)) return launch_block_transpose(p, device, !blocks_channels_last, stream);
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

// reduce_mask on CUDA: pool_kernel writes one byte a block, compact_kernel turns the bytes into the list and the map.
//
// No atomics, no flags that must be reset and no look-back: each CTA of compact_kernel counts the bytes before its own
// range by itself. That repeats reads (a few KB from L2) but leaves no state, fixes the order and never waits.
#include "core/lists/reduce_mask.h"
#include "cuda/lists/mask.cuh"

namespace sbnet {
namespace {

constexpr int kPoolThreads = 256;
constexpr int kCompactThreads = 512;

struct PoolArgs {
  const void* mask;
  int64_t stride_n, stride_h, stride_w;  // elements
  int height, width;
  BlockGrid grid;
  int blocks;  // of the whole batch
  FastDiv grid_columns, grid_rows, row_loads;
  int loads;  // in a block
  int lanes;  // threads that share a block: a power of two up to 32, or the whole CTA
  double tol;
  uint8_t* active;  // [blocks]
};

template <class T, int kVec, bool kAverage>
__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const PoolArgs a) {
  __shared__ double warp_sums[kPoolThreads / 32];
  grid_dependency_release();
  grid_dependency_wait();
  const int lane = threadIdx.x % a.lanes;
  const int groups = kPoolThreads / a.lanes;
  for (int first = blockIdx.x * groups; first < a.blocks; first += gridDim.x * groups) {
    const int b = first + threadIdx.x / a.lanes;
    double sum = 0;
    bool any = false;
    if (b < a.blocks) {
      uint32_t t, n, i, j;
      a.grid_columns.divmod(b, &t, &j);
      a.grid_rows.divmod(t, &n, &i);
      const int y0 = a.grid.offset[0] + static_cast<int>(i) * a.grid.stride[0];
      const int x0 = a.grid.offset[1] + static_cast<int>(j) * a.grid.stride[1];
      const T* image = static_cast<const T*>(a.mask) + n * a.stride_n;
#pragma unroll 4
      for (int load = lane; load < a.loads; load += a.lanes) {
        uint32_t row, column;
        a.row_loads.divmod(load, &row, &column);
        const int y = y0 + static_cast<int>(row), x = x0 + static_cast<int>(column) * kVec;
        // A vector lies wholly inside or outside: the launcher vectorises only where it does.
        if (static_cast<unsigned>(y) < static_cast<unsigned>(a.height) &&
            static_cast<unsigned>(x) < static_cast<unsigned>(a.width)) {
          const auto p =
              *reinterpret_cast<const Pack<T, kVec>*>(image + y * a.stride_h + (kVec == 1 ? x * a.stride_w : x));
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            if (kAverage)
              sum += static_cast<double>(static_cast<float>(p.v[e]));
            else
              any |= above(p.v[e], a.tol);
          }
        }
      }
    }
    if (kAverage) {
      for (int step = min(a.lanes, 32) / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      if (a.lanes > 32) {
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
        for (int w = 0; w < kPoolThreads / 32; ++w) sum += warp_sums[w];
        __syncthreads();
      }
      any = above(static_cast<float>(sum / (static_cast<double>(a.grid.size[0]) * a.grid.size[1])), a.tol);
    } else if (a.lanes > 32) {
      any = __syncthreads_or(any);
    } else {
      const unsigned ballot = __ballot_sync(0xffffffff, any);
      const unsigned mine = a.lanes == 32 ? ~0u : ((1u << a.lanes) - 1) << (threadIdx.x % 32 / a.lanes * a.lanes);
      any = ballot & mine;
    }
    if (lane == 0 && b < a.blocks) a.active[b] = any;
  }
}

struct CompactArgs {
  const uint8_t* active;          // [blocks]
  int blocks, capacity, per_cta;  // per_cta: a multiple of 16
  FastDiv grid_columns, grid_rows;
  int32_t *indices, *count, *total, *block_map;
};

__device__ __forceinline__ int sum_over_cta(int v, int* scratch) {
  v = __reduce_add_sync(0xffffffff, v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  int sum = 0;
  for (int w = 0; w < kCompactThreads / 32; ++w) sum += scratch[w];
  __syncthreads();
  return sum;
}

__device__ __forceinline__ void store_row(int32_t* indices, int64_t row, int n, int i, int j) {
  indices[row * 3] = n;
  indices[row * 3 + 1] = i;
  indices[row * 3 + 2] = j;
}

__global__ void __launch_bounds__(kCompactThreads) compact_kernel(const CompactArgs a) {
  __shared__ int scratch[kCompactThreads / 32];
  grid_dependency_wait();
  grid_dependency_release();
  const int begin = min(static_cast<int64_t>(blockIdx.x) * a.per_cta, static_cast<int64_t>(a.blocks));
  const int end = min(static_cast<int64_t>(begin) + a.per_cta, static_cast<int64_t>(a.blocks));
  int before = 0;
  for (int v = threadIdx.x; v < begin / 16; v += kCompactThreads) {
    const uint4 bytes = reinterpret_cast<const uint4*>(a.active)[v];
    before += __dp4a(bytes.x, 0x01010101u, 0u) + __dp4a(bytes.y, 0x01010101u, 0u) + __dp4a(bytes.z, 0x01010101u, 0u) +
              __dp4a(bytes.w, 0x01010101u, 0u);
  }
  before = sum_over_cta(before, scratch);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = begin; first < end; first += kCompactThreads) {
    const int b = first + threadIdx.x;
    const bool inside = b < end, active = inside && a.active[b];
    const unsigned ballot = __ballot_sync(0xffffffff, active);
    if (lane == 0) scratch[warp] = __popc(ballot);
    __syncthreads();
    int slot = before + __popc(ballot & ((1u << lane) - 1)), sum = 0;
    for (int w = 0; w < kCompactThreads / 32; ++w) {
      if (w < warp) slot += scratch[w];
      sum += scratch[w];
    }
    __syncthreads();
    if (active && slot < a.capacity) {
      uint32_t t, n, i, j;
      a.grid_columns.divmod(b, &t, &j);
      a.grid_rows.divmod(t, &n, &i);
      store_row(a.indices, slot, n, i, j);
    } else if (inside && !active) {
      // The rows past the total are filled from the end: the q-th inactive block owns row blocks-1-q.
      const int row = a.blocks - 1 - (b - slot);
      if (row < a.capacity) store_row(a.indices, row, -1, -1, -1);
    }
    if (inside) a.block_map[b] = active && slot < a.capacity ? slot : -1;
    before += sum;
  }
  for (int64_t row = a.blocks + static_cast<int64_t>(blockIdx.x) * kCompactThreads + threadIdx.x; row < a.capacity;
       row += static_cast<int64_t>(gridDim.x) * kCompactThreads)
    store_row(a.indices, row, -1, -1, -1);
  if (end == a.blocks && (begin < end || blockIdx.x == 0) && threadIdx.x == 0) {
    *a.total = before;
    *a.count = min(before, a.capacity);
  }
}

template <class T>
cudaError_t launch_pool(const ReduceMaskParams& p, const DeviceInfo& device, PoolArgs a, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const auto whole = [](int64_t v) { return v % kVec == 0; };
  const bool vectorised = p.stride[2] == 1 && whole(p.stride[0]) && whole(p.stride[1]) && whole(p.size[2]) &&
                          whole(p.grid.size[1]) && whole(p.grid.stride[1]) && whole(p.grid.offset[1]) &&
                          reinterpret_cast<uintptr_t>(p.mask) % 16 == 0;
  const int row_loads = p.grid.size[1] / (vectorised ? kVec : 1);
  const int64_t loads = static_cast<int64_t>(row_loads) * p.grid.size[0];
  a.row_loads = FastDiv(row_loads);
  a.loads = static_cast<int>(loads);
  a.lanes = 1;
  while (a.lanes < 32 && a.lanes * 2 < loads) a.lanes *= 2;
  if (loads > 1024) a.lanes = kPoolThreads;
  const int groups = kPoolThreads / a.lanes;
  const int grid = static_cast<int>(
      min(static_cast<int64_t>(device.sm_count) * 8, (static_cast<int64_t>(a.blocks) + groups - 1) / groups));
  auto kernel = vectorised ? (p.avgpool ? pool_kernel<T, kVec, true> : pool_kernel<T, kVec, false>)
                           : (p.avgpool ? pool_kernel<T, 1, true> : pool_kernel<T, 1, false>);
  return launch_dependent(device, kernel, dim3(grid), dim3(kPoolThreads), 0, stream, a);
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_reduce_mask_cuda(const sbnet::ReduceMaskParams* params, void* workspace, void* stream_handle) {
  using namespace sbnet;
  const ReduceMaskParams& p = *params;
  constexpr const char* kOp = "reduce_mask";
  SBNET_TRY(validate(p));
  DeviceInfo device;
  SBNET_TRY(current_device(kOp, &device));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int blocks = static_cast<int>(p.size[0] * p.grid.count[0] * p.grid.count[1]);
  uint8_t* active = static_cast<uint8_t*>(workspace);
  SBNET_CHECK(static_cast<int64_t>(p.grid.size[0]) * p.grid.size[1] <= INT32_MAX / 2,
              "%s: grid: expected blocks of at most 2^30 pixels, got %dx%d", kOp, p.grid.size[0], p.grid.size[1]);

  const FastDiv columns(p.grid.count[1]), rows(p.grid.count[0]);
  if (blocks > 0) {
    PoolArgs a = {};
    a.mask = p.mask;
    a.stride_n = p.stride[0], a.stride_h = p.stride[1], a.stride_w = p.stride[2];
    a.height = static_cast<int>(p.size[1]), a.width = static_cast<int>(p.size[2]);
    a.grid = p.grid;
    a.blocks = blocks;
    a.grid_columns = columns, a.grid_rows = rows;
    a.tol = p.tol;
    a.active = active;
    SBNET_CUDA_TRY(kOp,
                   by_mask_dtype(p.mask_dtype, [&](auto t) { return launch_pool<decltype(t)>(p, device, a, stream); }));
  }
  CompactArgs c = {active,  blocks,     static_cast<int>(p.capacity), 0, columns, rows, p.indices, p.count,
                   p.total, p.block_map};
  const int ctas = max(1, min(device.sm_count, (blocks + kCompactThreads - 1) / kCompactThreads));
  c.per_cta = ((blocks + ctas - 1) / ctas + 15) / 16 * 16;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, compact_kernel, dim3(ctas), dim3(kCompactThreads), 0, stream, c));
  return ok_status();
}

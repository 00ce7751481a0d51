// Products with block-sparse weights in blocks of 8 for few rows (decoding): float16, bfloat16; every GPU since sm_80.
//
// All is about reading the weights once, at the rate of memory. A CTA keeps a chunk of the input features of all rows
// in shared memory; each of its warps follows the entries of one output block, four blocks of weights a step.
//
//   warps 0-15    entries two rings ahead, weights by cp.async a ring ahead, ldmatrix, mma.sync
//   warps 16-19   chunks of x, into two buffers; all of them stay where two hold them
//
// Where outputs are few, the steps of one are dealt out among several warps, whose sums meet in shared memory in a
// fixed order.
#include <algorithm>
#include <climits>

#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/mma.cuh"
#include "cuda/weights/matmul_portable.cuh"
#include "cuda/weights/tile.cuh"

namespace sbnet {
namespace portable {
namespace {

constexpr int kWarps = 16, kLoaders = 4, kThreads = (kWarps + kLoaders) * 32;
constexpr int kStages = 8, kStage = 4 * 8 * 8 * 2, kRing = kStages * kStage;  // of a warp
constexpr int kRings = kWarps * kRing, kControl = kRings + 16;                // zeros; then barriers, then x
constexpr int kInput = kRings + 128;

struct FewArgs {
  MatmulArgs matmul;
  int sets, log_parts;  // of kWarps warps; how many of these share an output block
  int chunk, chunks;    // input features in a buffer; buffers' worth of them
};

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(bar) : "memory");
}
// When all of this thread's copies so far have arrived.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
  } while (!done);
}

// Of the warps that multiply.
__device__ __forceinline__ void sync_warps() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory"); }

struct Barriers {  // of two buffers
  uint32_t full, empty;
  __device__ __forceinline__ explicit Barriers(uint32_t base) : full(base + kControl), empty(full + 16) {}
};

// Chunks of x, for every set of the CTA: rows of chunk * 2 bytes, zeros beyond the rows and the features.
template <class T, int kTiles>
__device__ __forceinline__ void load_input(const FewArgs& a, uint32_t base) {
  constexpr int kRows = kTiles * 16;
  const BlocksparseMatmulParams& p = a.matmul.p;
  const Barriers bars(base);
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - kWarps, words = a.chunk / 8;
  const int64_t rows = row_count(p.x, p.active);
  const int in_features = static_cast<int>(p.in_features());
  const T* const x = static_cast<const T*>(p.x.data);
  int step = 0;
  for (int set = blockIdx.x; set < a.sets; set += gridDim.x) {
    for (int chunk = 0; chunk < a.chunks; ++chunk, ++step) {
      const int buffer = step & 1, first = chunk * a.chunk;
      if (step >= 2) barrier_wait(bars.empty + 8 * buffer, (step / 2 - 1) & 1);
      for (int row = warp; row < kRows; row += kLoaders) {
        const int64_t at = offset_of_row(p.x, p.active, row, rows);
        const T* from = x + max(at, int64_t{0}) + first + lane * 8;
        uint32_t to = base + kInput + ((buffer * kRows + row) * words + (lane ^ (row & 7))) * 16;
        const int end = at < 0 ? 0 : in_features;
#pragma unroll 4
        for (int f = first + lane * 8; f < first + a.chunk; f += 256, from += 256, to += 512)
          cp_async_16(to, f < end ? from : x, f < end);
      }
      barrier_arrive_after_copies(bars.full + 8 * buffer);
    }
    if (a.chunks <= 2) break;  // they stay
  }
}

template <class T, bool kTransposed, int kTiles>
__device__ __forceinline__ void multiply(const FewArgs& a, unsigned char* shared, uint32_t base) {
  constexpr int kRows = kTiles * 16, kNowhere = INT_MAX;
  const BlocksparseMatmulParams& p = a.matmul.p;
  const Barriers bars(base);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const int parts = 1 << a.log_parts, part = warp & (parts - 1), outputs = static_cast<int>(p.out_blocks());
  const T* const weight = static_cast<const T*>(p.weight) + (lane & 7) * 8;
  const uint32_t ring = base + warp * kRing + lane * 16, zeros = base + kRings;
  const int64_t rows = row_count(p.x, p.active);
  int before = 0;  // chunks of the sets before

  for (int set = blockIdx.x; set < a.sets; set += gridDim.x) {
    const int own = set * (kWarps >> a.log_parts) + (warp >> a.log_parts);
    const bool mine = own < outputs;
    EntryList entries(a.matmul, mine ? own : 0);
    if (!mine) entries.count = 0;
    const int steps = ((entries.count + 3) / 4 - part + parts - 1) >> a.log_parts;
    // The entries of a ring's steps, s0 and on: lane 4 u + e has entry e of step s0 + u, which is step
    // (s0 + u) * parts + part of all. One load for all: a warp that waits for one load waits for those after it as
    // well.
    const auto entries_of = [&](int s0) { return entries[(((s0 + lane / 4) << a.log_parts) + part) * 4 + lane % 4]; };
    // Lane l copies row l % 8 of block l / 8.
    const auto load = [&](int u, int2 ahead) {
      const int entry = __shfl_sync(~0u, ahead.x, u * 4 + lane / 8),
                block = __shfl_sync(~0u, ahead.y, u * 4 + lane / 8);
      cp_async_16(ring + u * kStage, weight + (entry < 0 ? 0 : int64_t{block} * 64), entry >= 0);
      cp_async_commit();
    };
    int2 now = entries_of(0), next = entries_of(kStages), after = entries_of(2 * kStages);
#pragma unroll
    for (int u = 0; u < kStages; ++u) load(u, now);

    float sums[kTiles][4] = {};
    int chunk = 0, first = 0;  // the chunk at hand, its first feature
    const auto wait_chunk = [&] {
      const int at = a.chunks <= 2 ? chunk : before + chunk;
      barrier_wait(bars.full + 8 * (at & 1), at / 2 & 1);
    };
    const auto leave_chunk = [&] {
      if (a.chunks > 2) barrier_arrive(bars.empty + 8 * ((before + chunk) & 1));
      ++chunk, first += a.chunk;
    };
    // Adds the products of two blocks: `at` is where this lane's one lies in the chunk, negative for none.
    const auto add = [&](int at, uint32_t low, uint32_t high) {
      const int buffer = (a.chunks <= 2 ? chunk : before + chunk) & 1;
      const uint32_t input = base + kInput + (buffer * kRows + lane % 16) * a.chunk * 2;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t x[4];
        load_matrix_x4(at < 0 ? zeros : input + t * 32 * a.chunk + (at / 8 ^ (lane & 7)) * 16, x);
        mma_16x8<T>(sums[t], x, low, high);
      }
    };
    wait_chunk();
    for (int s0 = 0; s0 < steps; s0 += kStages) {
#pragma unroll
      for (int u = 0; u < kStages; ++u) {
        if (s0 + u >= steps) break;
        cp_async_wait<kStages - 1>();
        __syncwarp();
        uint32_t w[4];
        if constexpr (kTransposed)
          load_matrix_x4(ring + u * kStage, w);
        else
          load_matrix_x4_transposed(ring + u * kStage, w);
        // Lanes name the rows of 8x8 matrices of x: rows 0-7 and 8-15 of a pair's first block, then of its second.
        int at[2];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int entry = __shfl_sync(~0u, now.x, u * 4 + pair * 2 + lane / 16);
          at[pair] = entry < 0 ? kNowhere : entry * 8 - first;
        }
        for (;;) {
#pragma unroll
          for (int pair = 0; pair < 2; ++pair) {
            const bool in = static_cast<unsigned>(at[pair]) < static_cast<unsigned>(a.chunk);
            // Weights of blocks of another chunk may be anything, not only finite numbers.
            const uint32_t there = __ballot_sync(~0u, in);
            add(in ? at[pair] : -1, there & 1 ? w[2 * pair] : 0, there >> 16 ? w[2 * pair + 1] : 0);
          }
          if (!__any_sync(~0u, max(at[0], at[1]) >= a.chunk) || chunk + 1 == a.chunks) break;
          leave_chunk();
          at[0] -= a.chunk, at[1] -= a.chunk;
          wait_chunk();
        }
        load(u, next);
      }
      now = next, next = after, after = entries_of(s0 + 3 * kStages);
    }
    cp_async_wait<0>();
    while (chunk + 1 < a.chunks) {  // all warps free all chunks
      leave_chunk();
      if (a.chunks > 2) wait_chunk();
    }
    leave_chunk();
    before += a.chunks;

    if (parts > 1) {
      const auto slot = [&](int of, int e) { return reinterpret_cast<float4*>(shared + of * kRing) + e * 32 + lane; };
      __syncwarp();
      if (part > 0)
#pragma unroll
        for (int e = 0; e < kTiles; ++e) *slot(warp, e) = make_float4(sums[e][0], sums[e][1], sums[e][2], sums[e][3]);
      sync_warps();
      if (part == 0)
        for (int other = 1; other < parts; ++other)
#pragma unroll
          for (int e = 0; e < kTiles; ++e) {
            const float4 v = *slot(warp + other, e);
            sums[e][0] += v.x, sums[e][1] += v.y, sums[e][2] += v.z, sums[e][3] += v.w;
          }
      sync_warps();  // the rings are free again
    }
    if (part > 0 || !mine) continue;

    const int64_t k = int64_t{own} * 8 + lane % 4 * 2, out_features = p.out_features();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float bias = k + e < out_features ? bias_of<T>(p, k + e) : 0.f;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) sums[t][e] += bias, sums[t][2 + e] += bias;
    }
    activate(p.activation, p.activation_param, sums);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t to = offset_of_row(p.y, p.active, t * 16 + half * 8 + lane / 4, rows);
        if (to < 0) continue;
        T* y = static_cast<T*>(p.y.data) + to;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (k + e < out_features) y[(k + e) * p.y.stride[1]] = from_float<T>(sums[t][half * 2 + e]);
      }
  }
}

template <class T, bool kTransposed, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) matmul_few_kernel(const FewArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    *reinterpret_cast<uint4*>(shared + kRings) = make_uint4(0, 0, 0, 0);
    const Barriers bars(base);
    for (int i = 0; i < 2; ++i) {
      barrier_init(bars.full + 8 * i, kLoaders * 32);
      barrier_init(bars.empty + 8 * i, kWarps * 32);
    }
  }
  __syncthreads();
  grid_dependency_wait();
  if (threadIdx.x < kWarps * 32)
    multiply<T, kTransposed, kTiles>(a, shared, base);
  else
    load_input<T, kTiles>(a, base);
}

template <class T, bool kTransposed, int kTiles>
Status launch(const MatmulArgs& matmul, const DeviceInfo& device, cudaStream_t stream) {
  constexpr int kRows = kTiles * 16;
  constexpr auto kKernel = matmul_few_kernel<T, kTransposed, kTiles>;
  const BlocksparseMatmulParams& p = matmul.p;
  int limit = 0;
  SBNET_CUDA_TRY(kMatmulOp, cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index));
  const int64_t in = p.in_features(), most = (limit - kInput) / 2 / (kRows * 2) / 64 * 64;
  FewArgs a = {matmul};
  a.chunks = static_cast<int>((in + most - 1) / most);
  a.chunk = static_cast<int>(((in + a.chunks - 1) / a.chunks + 63) / 64 * 64);
  const int outputs = static_cast<int>(p.out_blocks());
  // As many warps to an output block as let the CTAs end first.
  double best = 0;
  for (int log_parts = 0; 1 << log_parts <= kWarps; ++log_parts) {
    const int sets = ((outputs << log_parts) + kWarps - 1) / kWarps;
    const double time = static_cast<double>((sets + device.sm_count - 1) / device.sm_count) / (1 << log_parts);
    if (log_parts && time >= best) continue;
    best = time, a.sets = sets, a.log_parts = log_parts;
  }
  const int bytes = kInput + std::min(a.chunks, 2) * kRows * a.chunk * 2;
  SBNET_TRY(allow_shared<kKernel>(kMatmulOp, device, limit));
  const dim3 grid(static_cast<unsigned>(std::min(a.sets, device.sm_count)));
  SBNET_CUDA_TRY(kMatmulOp, launch_dependent(device, kKernel, grid, dim3(kThreads), bytes, stream, a));
  return ok_status();
}

}  // namespace

Status launch_matmul_few(const MatmulArgs& a, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t rows = row_capacity(a.p.x, a.p.active);
  const auto by_rows = [&](auto t, auto transposed) {
    using T = decltype(t);
    if (rows <= 16) return launch<T, transposed(), 1>(a, device, stream);
    if (rows <= 32) return launch<T, transposed(), 2>(a, device, stream);
    return launch<T, transposed(), 4>(a, device, stream);
  };
  const auto by_direction = [&](auto t) {
    return a.p.transposed ? by_rows(t, std::true_type()) : by_rows(t, std::false_type());
  };
  return a.p.x.dtype == DType::kBF16 ? by_direction(__nv_bfloat16()) : by_direction(__half());
}

}  // namespace portable
}  // namespace sbnet

// Attention of listed rows to listed keys, without a bias: of a plane's active pixels to those of another (PVT,
// SegFormer), or of packed tokens up to each image's length. Rows lie anywhere and are gathered; products are WGMMA.
//
// A CTA has 64 rows a warpgroup, for one head of an image. Tiles of 128 keys and values come into a ring, one tile
// ahead: K0, V0, K1, V1, ... All threads gather them, or, of tokens that follow one another, one thread asks for boxes.
// What hides a warpgroup's softmax are the other warpgroups of the multiprocessor, which has two or three CTAs: a
// second tile of scores under way would take the registers of one, a warp of its own for the copies a fifth of them.
#include "cuda/sm90/attention/launch.cuh"
#include "cuda/sm90/attention/listed.h"
#include "cuda/sm90/attention/ptx.cuh"
#include "cuda/sm90/conv/ptx.cuh"

namespace sbnet::sm90 {
namespace {

constexpr int kDim = 64, kRowBytes = kDim * 2;

template <class T_, int kWarpgroups_, int kKeys_, int kStages_, int kCtas_, bool kBoxes_>
struct Config {
  using T = T_;
  static constexpr bool kBoxes = kBoxes_;                                   // of keys that follow one another
  static constexpr int kKeys = kKeys_, kStages = kStages_, kCtas = kCtas_;  // kCtas: of a multiprocessor
  static constexpr int kStageBytes = kKeys * kRowBytes;
  static constexpr int kWarpgroups = kWarpgroups_, kThreads = 128 * kWarpgroups, kRows = 64 * kWarpgroups;
  static constexpr int kPass = kThreads / 8;  // rows that are copied at once, 16 bytes a thread
  static constexpr int kRing = kRows * kRowBytes, kBarriers = kRing + kStages * kStageBytes;
  static constexpr int kPositions = kBarriers + 8 + 16 * kStages, kJob = kPositions + kRows * 4, kBytes = kJob + 16;
  static_assert(kStages % 2 == 0, "keys and values of a tile lie side by side");
  static_assert(kCtas * (kBytes + 1024) <= 228 * 1024);
};

struct ListedMaps {
  CUtensorMap k, v;
};

// Of an entry: which position it is. Of one that points past the end, a number that is none: see is_position().
__device__ __forceinline__ uint32_t position(const ListedRows& r, int n, int at) {
  return r.order ? *reinterpret_cast<const uint32_t*>(r.order + n * r.step + at) : at;
}
__device__ __forceinline__ bool is_position(const ListedRows& r, uint32_t at) {
  return at < static_cast<uint32_t>(r.positions);
}
__device__ __forceinline__ int entries(const ListedRows& r, int n) {
  return r.lengths ? min(load_int(r.lengths + n), r.capacity) : r.capacity;
}

// What a CTA computes: rows first ... of an image, of which so many are there; none behind an image's own.
struct Job {
  int n = -1, head, first, rows;
};
// Jobs that have rows come first, so that none waits for those that have none. All lanes of a warp call.
template <int kRows>
__device__ __forceinline__ Job job_of(const ListedAttention& a) {
  const int lane = threadIdx.x & 31;
  int rest = blockIdx.x;
  for (int idle = 0; idle <= static_cast<int>(a.clear); ++idle)
    for (int64_t base = 0; base < a.batch; base += 32) {
      const int n = static_cast<int>(base) + lane, length = n < a.batch ? max(entries(a.rows, n), 0) : 0;
      const int some = (length + kRows - 1) / kRows;
      const int tiles = n >= a.batch ? 0 : idle ? static_cast<int>(a.tiles) - some : some;
      int sum = tiles * a.heads;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      const uint32_t reach = __ballot_sync(~0u, sum > rest);
      if (reach) {
        const int from = __ffs(reach) - 1, of = __shfl_sync(~0u, tiles, from);
        rest -= __shfl_sync(~0u, sum, from) - of * a.heads;
        const int first = (rest % of + (idle ? __shfl_sync(~0u, some, from) : 0)) * kRows;
        return {static_cast<int>(base) + from, rest / of, first, __shfl_sync(~0u, length, from) - first};
      }
      rest -= __shfl_sync(~0u, sum, 31);
    }
  return {};
}

// Where the 16-byte word `word` of a row of a tile lies.
__device__ __forceinline__ uint32_t word_of(int row, int word) { return row * kRowBytes + ((word ^ (row & 7)) << 4); }

template <class T>
__device__ __forceinline__ T* channels_of(const ListedTensor& t, int n, int head) {
  return static_cast<T*>(t.data) + n * t.batch_stride + head * t.head_stride;
}

// What a thread copies of keys and values: word threadIdx.x % 8 of every kPass-th row.
template <class C>
struct Gather {
  using T = typename C::T;
  const ListedAttention& a;
  const ListedMaps& maps;
  const volatile Job& job;  // in shared memory: scores need the registers
  int keys;
  uint32_t base;
  uint32_t own[C::kKeys / C::kPass] = {};  // positions of the next tile's; looked at when they are needed

  __device__ __forceinline__ void read(int k0) {
#pragma unroll
    for (int i = 0; !C::kBoxes && i < C::kKeys / C::kPass; ++i) {
      const int at = k0 + i * C::kPass + threadIdx.x / 8;
      own[i] = at < keys ? position(a.keys, job.n, at) : ~0u;
    }
  }
  __device__ __forceinline__ void push(const ListedTensor& t, int dim, uint32_t slot, uint32_t parity) {
    const uint32_t full = base + C::kBarriers + 8 + 8 * slot, to = base + C::kRing + slot * C::kStageBytes;
    const int word = threadIdx.x & 7;
    const T* from = channels_of<T>(t, job.n, job.head / a.heads_per_kv) + word * 8;
    mbar_wait(full + 8 * C::kStages, parity);
#pragma unroll
    for (int i = 0; i < C::kKeys / C::kPass; ++i) {
      const bool there = word * 8 < dim && is_position(a.keys, own[i]);
      cp_async<16>(to + word_of(i * C::kPass + threadIdx.x / 8, word), from + (there ? size_t{t.stride} * own[i] : 0),
                   there ? 16 : 0);
    }
    cp_async_arrive(full);
  }
  // The tile from k0 on, of which `own` is known, into a stage and the next; parity: of the barriers that these are
  // free.
  __device__ __forceinline__ void operator()(int k0, uint32_t slot, uint32_t parity) {
    if (k0 >= keys) return;
    if constexpr (C::kBoxes) {
      if (threadIdx.x) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t full = base + C::kBarriers + 8 + 8 * (slot + i);
        mbar_wait(full + 8 * C::kStages, parity);
        mbar_expect(full, C::kStageBytes);
        tma_load(base + C::kRing + (slot + i) * C::kStageBytes, i ? &maps.v : &maps.k, full, 0, k0, 0,
                 job.head / a.heads_per_kv, job.n);
      }
      return;
    }
    push(a.k, a.dim, slot, parity);
    push(a.v, a.value_dim, slot + 1, parity);
    read(k0 + C::kKeys);
  }
};

template <class C>
__device__ __forceinline__ void attend(const ListedAttention& a, const ListedMaps& maps, uint8_t* shared, uint32_t base,
                                       const Job& job, int keys) {
  using T = typename C::T;
  using attention::descriptor, attention::multiply_rows, attention::pin_all;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wg = warp / 4, thread = threadIdx.x & 127;
  const int word = thread & 7;
  const uint32_t queries_full = base + C::kBarriers, full = queries_full + 8, empty = full + 8 * C::kStages;
  int* positions = reinterpret_cast<int*>(shared + C::kPositions);  // where a row's results go, -1: nowhere
  Gather<C> gather = {a, maps, job, keys, base};
  gather.read(0);
  {
    const int n = job.n, first = job.first, rows = job.rows;
    const T* q = channels_of<T>(a.q, n, job.head) + word * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = wg * 64 + i * 16 + thread / 8, at = first + row;
      const uint32_t from = row < rows ? position(a.rows, n, at) : ~0u;
      const bool found = is_position(a.rows, from), there = found && word * 8 < a.dim;
      cp_async<16>(base + word_of(row, word), q + (there ? size_t{a.q.stride} * from : 0), there ? 16 : 0);
      if (word == 0) positions[row] = a.clear && at < a.rows.capacity ? at : found ? static_cast<int>(from) : -1;
    }
    cp_async_arrive(queries_full);
  }
  gather(0, 0, 1);
  const uint32_t queries = base + wg * 64 * kRowBytes;
  const uint32_t q_operand = (queries & 0x3FFFF) >> 4, ring = ((base + C::kRing) & 0x3FFFF) >> 4;
  float O[kDim / 2], max0 = -INFINITY, max1 = -INFINITY, sum0 = 0.f, sum1 = 0.f;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) O[i] = 0.f;
  uint32_t slot = 0, phase = 0;
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) mbar_arrive(empty + 8 * slot);
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  };
  mbar_wait(queries_full, 0);
  if (C::kBoxes) fence_async_proxy();  // products read queries that threads have copied
#pragma unroll 1
  for (int k0 = 0; k0 < keys; k0 += C::kKeys) {
    float S[C::kKeys / 2];
    mbar_wait(full + 8 * slot, phase);
    mbar_wait(full + 8 * (slot + 1), phase);
    if constexpr (!C::kBoxes) {
      // Products read what threads have copied. Once a tile, before the next one's copies: it waits for all under way.
      fence_async_proxy();
    } else if (k0 + C::kKeys > keys) {
      // Values past the sequence's own end may be anything, NaN too, which 0 * v would keep. Each warpgroup writes all
      // of the zeros, before its own products.
      for (int at = (keys - k0) * 8 + thread; at < C::kKeys * 8; at += 128)
        store_shared(base + C::kRing + (slot + 1) * C::kStageBytes + at * 16, 0.f, 0.f, 0.f, 0.f);
      fence_async_proxy();
      bar_sync(1 + wg, 128);
    }
    const bool wraps = slot + 2 == C::kStages;
    gather(k0 + C::kKeys, wraps ? 0 : slot + 2, wraps ? phase : phase ^ 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<T, C::kKeys>(S, descriptor(q_operand + k * 2), descriptor(ring + slot * (C::kStageBytes >> 4) + k * 2), k);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all(S);
    release();
    if (k0 + C::kKeys > keys) {
#pragma unroll
      for (int i = 0; i < C::kKeys / 2; ++i)
        if (k0 + (i >> 2) * 8 + (lane & 3) * 2 + (i & 1) >= keys) S[i] = -INFINITY;
    }
    float x0 = fmaxf(S[0], S[1]), x1 = fmaxf(S[2], S[3]);
#pragma unroll
    for (int i = 4; i < C::kKeys / 2; i += 4)
      x0 = fmaxf(x0, fmaxf(S[i], S[i + 1])), x1 = fmaxf(x1, fmaxf(S[i + 2], S[i + 3]));
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
    // The maximum may lag by 2^8: it cancels, and O is rarely scaled.
    if (__any_sync(~0u, (x0 - max0) * a.scale > 8.f || (x1 - max1) * a.scale > 8.f)) {
      const float n0 = fmaxf(max0, x0), n1 = fmaxf(max1, x1);
      const float scale0 = exp2_approx((max0 - (n0 == -INFINITY ? 0.f : n0)) * a.scale);
      const float scale1 = exp2_approx((max1 - (n1 == -INFINITY ? 0.f : n1)) * a.scale);
      max0 = n0, max1 = n1, sum0 *= scale0, sum1 *= scale1;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) O[i] *= i & 2 ? scale1 : scale0;
    }
    const float b0 = max0 == -INFINITY ? 0.f : max0 * a.scale, b1 = max1 == -INFINITY ? 0.f : max1 * a.scale;
    uint32_t P[C::kKeys / 4];
    float u0 = 0.f, u1 = 0.f;
#pragma unroll
    for (int i = 0; i < C::kKeys / 2; i += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) S[i + k] = exp2_approx(fmaf(S[i + k], a.scale, k & 2 ? -b1 : -b0));
      sum0 += S[i], u0 += S[i + 1], sum1 += S[i + 2], u1 += S[i + 3];
      P[i / 2] = pack<T>(S[i], S[i + 1]), P[i / 2 + 1] = pack<T>(S[i + 2], S[i + 3]);
    }
    sum0 += u0, sum1 += u1;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k)
      multiply_rows<T, kDim>(O, P + 4 * k, descriptor(ring + slot * (C::kStageBytes >> 4) + k * 128));
    wgmma_commit();
    wgmma_wait<0>();
    pin_all(O), pin_all(P);
    release();
  }
  sum0 += __shfl_xor_sync(~0u, sum0, 1), sum1 += __shfl_xor_sync(~0u, sum1, 1);
  sum0 += __shfl_xor_sync(~0u, sum0, 2), sum1 += __shfl_xor_sync(~0u, sum1, 2);
  const int n = job.n, head = job.head, first = job.first, rows = job.rows;
  const int own = warp * 16 + (lane >> 2);  // of this thread's rows the first; the second is 8 below
  const bool some0 = sum0 != 0.f && own < rows, some1 = sum1 != 0.f && own + 8 < rows;
  if (a.lse && (lane & 3) == 0) {
    float* lse = a.lse + (int64_t{n} * a.heads + head) * a.rows.capacity + first;
    constexpr float kLn2 = 0.693147181f;
    if (first + own < a.rows.capacity) lse[own] = some0 ? (max0 * a.scale + __log2f(sum0)) * kLn2 : -INFINITY;
    if (first + own + 8 < a.rows.capacity) lse[own + 8] = some1 ? (max1 * a.scale + __log2f(sum1)) * kLn2 : -INFINITY;
  }
  const float r0 = 1.f / sum0, r1 = 1.f / sum1;
  const auto result = [&](int i) {  // behind a sequence O may be NaN
    return i & 2 ? pack<T>(some1 ? O[i] * r1 : 0.f, some1 ? O[i + 1] * r1 : 0.f)
                 : pack<T>(some0 ? O[i] * r0 : 0.f, some0 ? O[i + 1] * r0 : 0.f);
  };
  bar_sync(1 + wg, 128);  // nobody reads the warpgroup's queries any more: results take their place
  const uint32_t to = queries + ((warp & 3) * 16 + (lane & 15)) * kRowBytes;
#pragma unroll
  for (int i = 0; i < kDim / 8; i += 2)
    stmatrix(to + (((i + (lane >> 4)) ^ (lane & 7)) << 4), result(4 * i), result(4 * i + 2), result(4 * i + 4),
             result(4 * i + 6));
  __syncwarp();
  if (word * 8 >= a.value_dim) return;
  T* out = channels_of<T>(a.out, n, head) + word * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = warp * 16 + i * 4 + lane / 8, at = positions[row];
    if (at >= 0)
      *reinterpret_cast<uint4*>(out + size_t{a.out.stride} * static_cast<uint32_t>(at)) =
          *reinterpret_cast<const uint4*>(shared + word_of(row, word));
  }
}

// Zeros for rows that no image has.
template <class C>
__device__ __forceinline__ void clear(const ListedAttention& a, const Job& job) {
  using T = typename C::T;
  const int word = threadIdx.x & 7;
  T* out = channels_of<T>(a.out, job.n, job.head) + word * 8;
  for (int at = job.first + threadIdx.x / 8; at < min(job.first + C::kRows, a.rows.capacity); at += C::kPass) {
    if (word * 8 < a.value_dim)
      *reinterpret_cast<uint4*>(out + size_t{a.out.stride} * static_cast<uint32_t>(at)) = make_uint4(0, 0, 0, 0);
    if (a.lse && word == 0) a.lse[(int64_t{job.n} * a.heads + job.head) * a.rows.capacity + at] = -INFINITY;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    listed_attention_kernel(const __grid_constant__ ListedMaps maps, const __grid_constant__ ListedAttention a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = smem_address(shared), barriers = base + C::kBarriers;
  if (threadIdx.x == 0) {
    mbar_init(barriers, C::kThreads);
    for (int i = 0; i < C::kStages; ++i) {
      mbar_init(barriers + 8 + 8 * i, C::kBoxes ? 1 : C::kThreads);
      mbar_init(barriers + 8 + 8 * (C::kStages + i), 4 * C::kWarpgroups);
    }
    fence_mbar_init();
  }
  __syncthreads();
  grid_dependency_wait();
  grid_dependency_release();
  const Job job = job_of<C::kRows>(a);
  if (job.n < 0) return;
  if (job.rows <= 0) return clear<C>(a, job);
  Job& held = *reinterpret_cast<Job*>(shared + C::kJob);
  if (threadIdx.x == 0) held = job;
  __syncthreads();
  attend<C>(a, maps, shared, base, held, entries(a.keys, job.n));
}

template <class C>
Status launch(ListedAttention a, const ListedMaps& maps, const DeviceInfo& device, cudaStream_t stream) {
  a.tiles = (a.rows.capacity + C::kRows - 1) / C::kRows;
  const int64_t ctas = size_product({a.tiles, a.heads, a.batch});
  SBNET_CHECK(ctas <= INT32_MAX, "%s: q: expected fewer than 2^31 tiles of rows, got %lld", a.op,
              static_cast<long long>(ctas));
  SBNET_TRY(allow_shared<listed_attention_kernel<C>>(a.op, device, C::kBytes));
  SBNET_CUDA_TRY(a.op, launch_dependent(device, listed_attention_kernel<C>, dim3(static_cast<unsigned>(ctas)),
                                        dim3(C::kThreads), C::kBytes, stream, maps, a));
  return ok_status();
}

// Tiles of 128 rows read keys half as often; those of 64 leave fewer multiprocessors idle.
template <class T, bool kBoxes>
Status launch_of(const ListedAttention& a, const ListedMaps& maps, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t tiles = size_product({(a.rows.capacity + 127) / 128, a.heads, a.batch});
  return tiles * 2 >= device.sm_count * 3 ? launch<Config<T, 2, 128, 6, 2, kBoxes>>(a, maps, device, stream)
                                          : launch<Config<T, 1, 128, 4, 3, kBoxes>>(a, maps, device, stream);
}
template <bool kBoxes>
Status launch_of(DType dtype, const ListedAttention& a, const ListedMaps& maps, const DeviceInfo& device,
                 cudaStream_t stream) {
  return dtype == DType::kF16 ? launch_of<__half, kBoxes>(a, maps, device, stream)
                              : launch_of<__nv_bfloat16, kBoxes>(a, maps, device, stream);
}

}  // namespace

bool listed_attention_takes(const WindowAttentionParams& p) {
  return p.q.dtype != DType::kF32 && p.windows == 1 && p.listed_rows.order && p.listed_keys.order && !p.bias.data &&
         !p.row_table && !p.scales.data && !p.k_fill && !p.v_fill && p.normalize == 0.f && p.scale > 0.f &&
         p.dim <= kDim && p.value_dim <= kDim;
}

Status listed_attention(const WindowAttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const auto tensor = [&](const TensorView& t, int64_t start, int32_t dim) {
    const auto* data = static_cast<const uint8_t*>(t.data) + start * dtype_size(t.dtype);
    return ListedTensor{const_cast<uint8_t*>(data), t.stride[0], dim, static_cast<uint32_t>(p.stride(t))};
  };
  const auto listed = [](const WindowAttentionParams::Listed& l, int32_t pixels) {
    const int32_t capacity = static_cast<int32_t>(l.capacity < pixels ? l.capacity : pixels);
    return ListedRows{l.order, l.lengths, l.capacity, capacity, pixels};
  };
  ListedAttention a = {"window_attention"};
  a.q = tensor(p.q, p.starts[0], p.dim), a.k = tensor(p.k, p.starts[1], p.dim);
  a.v = tensor(p.v, p.starts[2], p.value_dim), a.out = tensor(p.out, 0, p.value_dim);
  a.rows = listed(p.listed_rows, p.queries()), a.keys = listed(p.listed_keys, p.pixels_of_keys());
  a.batch = p.q.size[0], a.heads = p.heads, a.heads_per_kv = 1, a.dim = p.dim, a.value_dim = p.value_dim;
  a.scale = p.scale * 1.44269504f;
  return launch_of<false>(p.q.dtype, a, {}, device, stream);
}

bool listed_attention_takes(const AttentionParams& p) {
  const AttentionRule& r = p.layout.rule;
  const auto fits = [](const AttentionTensor& t) { return t.stride > 0 && t.stride < UINT32_MAX; };
  return p.dtype != DType::kF32 && p.head_dim <= kDim && p.q_lengths && !p.layout.rows && !p.layout.masks &&
         r.diagonal == kNoDiagonal && r.stride == 0 && r.phases == 1 && p.dropout.p == 0 && p.scale > 0.f &&
         fits(p.q) && fits(p.k) && fits(p.v) && fits(p.out);
}

Status listed_attention(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const auto tensor = [](const AttentionTensor& t) {
    return ListedTensor{t.data, t.batch_stride, t.head_stride, static_cast<uint32_t>(t.stride)};
  };
  ListedAttention a = {"block_attention"};
  a.q = tensor(p.q), a.k = tensor(p.k), a.v = tensor(p.v), a.out = tensor(p.out);
  a.rows = {nullptr, p.q_lengths, p.q_length, p.q_length, p.q_length};
  a.keys = {nullptr, p.k_lengths, p.k_length, p.k_length, p.k_length};
  a.batch = p.batch, a.heads = p.heads, a.heads_per_kv = p.heads / p.kv_heads, a.dim = a.value_dim = p.head_dim;
  a.lse = p.lse, a.scale = p.scale * 1.44269504f, a.clear = true;
  const auto boxes = [&](const AttentionTensor& t) {  // TMA's strides are not 0, and below 2^40 bytes
    const auto fits = [](int64_t stride, int64_t count) {
      return count <= 1 || (stride > 0 && stride < (int64_t{1} << 39) / count);
    };
    return fits(t.batch_stride, p.batch) && fits(t.head_stride, p.kv_heads) && fits(t.stride, p.k_length);
  };
  if (p.head_dim != kDim || p.k_length == 0 || !boxes(p.k) || !boxes(p.v))
    return launch_of<false>(p.dtype, a, {}, device, stream);
  ListedMaps maps;
  SBNET_TRY(attention::position_map(&maps.k, a.op, "k", p, p.k, p.kv_heads, p.k_length, 128));
  SBNET_TRY(attention::position_map(&maps.v, a.op, "v", p, p.v, p.kv_heads, p.k_length, 128));
  return launch_of<true>(p.dtype, a, maps, device, stream);
}

}  // namespace sbnet::sm90

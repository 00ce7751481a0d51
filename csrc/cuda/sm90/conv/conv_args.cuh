// What the Hopper convolution kernels share: the arguments that describe list, output and epilogue, and the device code
// that depends on nothing else.
#pragma once
#include <type_traits>

#include "core/masked/conv.h"
#include "cuda/common.cuh"
#include "cuda/sm90/ptx.cuh"

namespace sbnet::sm90 {

constexpr int kSharedLimit = 227 * 1024;  // bytes of shared memory a CTA may have

struct Plane {  // channel-last: channels are adjacent
  void* data;
  int64_t n, y, x;  // strides in elements
};

struct CommonArgs {
  Plane y, residual;      // residual.data null for none
  const void* bias;       // [K] of T or float, or null
  const uint4* weight;    // if the consumers are to copy it, or null
  const int32_t* blocks;  // [capacity, 3] (n, i, j)
  const int32_t* count;
  const int32_t *fringe, *fringe_count;  // linear pixel indices to zero, or null
  int capacity, fringe_capacity;
  int N, H, W, K;  // of y
  int grid_h, grid_w, block_h, block_w;
  FastDiv plane_h, plane_w;
  Activation activation;
  float gate[6];       // silu, gelu: see gate_of()
  float low, slope;    // what relu and none raise their sums to; leaky_relu's slope
  const void* slopes;  // [K] of T or float, instead of slope, or null
  bool bias_f32, slopes_f32;
  bool after;    // the residual is added to what the activation gives: adds_after()
  bool settled;  // core/settled.h
};

// ---------------------------------------------------------------- the start of a kernel
// A CTA's shared memory, and which of its threads this is.
struct Cta {
  uint32_t smem;
  int warp, lane;
  __device__ __forceinline__ explicit Cta(const uint8_t* shared)
      : smem(smem_address(shared)),
        warp(__shfl_sync(0xffffffff, threadIdx.x >> 5, 0)),
        lane(static_cast<int>(threadIdx.x & 31)) {}
  // The barriers from `first` to `end`, of arrivals(at) each, dealt out to `warps` warps. Then comes __syncthreads().
  template <class F>
  __device__ __forceinline__ void init_barriers(int first, int end, int warps, const F& arrivals) const {
    if (lane != 0) return;
    for (int at = first + 8 * warp; at < end; at += 8 * warps) mbar_init(smem + at, arrivals(at));
    fence_mbar_init();
  }
  // Those of two rings, at C's offsets, by one thread: arrivals (full, empty) of a patch's stage and of the weights'.
  template <class C, int kPatches, int kWeights>
  __device__ __forceinline__ void init_rings(int2 patch, int2 weight) const {
    for (int i = 0; i < kPatches; ++i)
      mbar_init(smem + C::kPatchFull + 8 * i, patch.x), mbar_init(smem + C::kPatchEmpty + 8 * i, patch.y);
    for (int i = 0; i < kWeights; ++i)
      mbar_init(smem + C::kWeightFull + 8 * i, weight.x), mbar_init(smem + C::kWeightEmpty + 8 * i, weight.y);
    fence_mbar_init();
  }
};

// ---------------------------------------------------------------- the launch ahead
// Weights, lists and counts may be read from here on; feature maps only after grid_dependency_wait().
__device__ __forceinline__ void await_settled(const CommonArgs& a) {
  if (!a.settled) grid_dependency_wait();
}
// One warp of every CTA. The next launch may start when this one's wait is over, no earlier: so a kernel's start says
// that the launch before last is complete, and its CTAs do not take the place of those that have work.
__device__ __forceinline__ void take_turn() {
  grid_dependency_wait();
  grid_dependency_release();
}

// ---------------------------------------------------------------- the list of blocks
// Row `row` of the list; n < 0 past the list's end. Loaded speculatively, before the count is known.
__device__ __forceinline__ int4 load_row(const CommonArgs& a, uint32_t row) {
  int4 r = make_int4(-1, 0, 0, 0);
  if (row < static_cast<uint32_t>(a.capacity)) {
    const int32_t* p = a.blocks + static_cast<int64_t>(row) * 3;
    r.x = load_int(p), r.y = load_int(p + 1), r.z = load_int(p + 2);
  }
  return r;
}
// A part of that block, which begins (dy, dx) into it, as (n, y, x, 0) of the output plane. n < 0: nothing there.
__device__ __forceinline__ int4 unit_of_block(const CommonArgs& a, int4 block, bool counted, int dy, int dx) {
  const bool valid = counted && static_cast<uint32_t>(block.x) < static_cast<uint32_t>(a.N) &&
                     static_cast<uint32_t>(block.y) < static_cast<uint32_t>(a.grid_h) &&
                     static_cast<uint32_t>(block.z) < static_cast<uint32_t>(a.grid_w);
  int4 unit =
      valid ? make_int4(block.x, block.y * a.block_h + dy, block.z * a.block_w + dx, 0) : make_int4(-1, 0, 0, 0);
  if (unit.y >= a.H || unit.z >= a.W) unit.x = -1;  // a block may reach over the edge of the plane
  return unit;
}

// ---------------------------------------------------------------- weights
// TMA takes some ten cycles for a row of less than 64 channels: where the weights stay in shared memory, the consumers
// copy such rows themselves. A word is 16 bytes; the swizzle is WGMMA's.
inline bool weights_by_hand(int64_t channels) { return channels % 64 != 0; }
__device__ __forceinline__ void put_weights(uint8_t* slab, int row, int word, uint4 v) {
  *reinterpret_cast<uint4*>(slab + row * 128 + ((word ^ (row & 7)) << 4)) = v;
}

// ---------------------------------------------------------------- epilogue
__device__ __forceinline__ bool is_max(Activation a) { return a <= Activation::kRelu; }
// v sigmoid(v P(v^2)), with a polynomial P, here times -log2(e): silu is P = 1, gelu to 1e-6 the odd part of the logit
// of the normal distribution as far as 5.5. One formula: what a kernel repeats for each of its sums has to stay short,
// or it runs at the speed at which instructions come. (Six activations there made a 1x1 layer of 40 us one of 250.)
__device__ __forceinline__ bool is_gated(Activation a) { return a == Activation::kSilu || a == Activation::kGelu; }
constexpr float kGateReach = 5.5f * 5.5f;  // P is constant from there on
inline void gate_of(Activation activation, float (&gate)[6]) {
  constexpr float kGelu[6] = {1.59574533f,      0.0727311075f, -0.000115584393f,
                              -9.45642314e-05f, 5.599838e-06f, -1.13298967e-07f};
  constexpr float kToPowersOfTwo = -1.44269504f;
  for (int k = 0; k < 6; ++k)
    gate[k] = kToPowersOfTwo * (activation == Activation::kGelu ? kGelu[k] : k == 0 ? 1.f : 0.f);
}
template <int V>
__device__ __forceinline__ void apply_gate(const CommonArgs& a, float (&v)[V]) {
#pragma unroll
  for (int e = 0; e < V; ++e) {
    const float square = fminf(v[e] * v[e], kGateReach);
    float p = a.gate[5];
#pragma unroll
    for (int k = 4; k >= 0; --k) p = fmaf(p, square, a.gate[k]);
    v[e] = __fdividef(v[e], 1.f + exp2_approx(v[e] * p));
  }
}

// Of kernels that decline slopes a channel.
struct NoSlopes {
  __device__ __forceinline__ NoSlopes next(int) const { return {}; }
};

// Activations in place; NaN passes through. slopes(e): of v[e]'s channel, read here,
// so that kernels hold no slopes while they sum.
template <int V, class Slopes = NoSlopes>
__device__ __forceinline__ void activate(const CommonArgs& a, float (&v)[V], Slopes slopes = {}) {
  if (is_max(a.activation)) {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = max_nan(v[e], a.low);
  } else if (a.activation == Activation::kRelu6) {
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = min_nan(max_nan(v[e], 0.f), 6.f);
  } else if (a.activation == Activation::kLeakyRelu) {
    if constexpr (!std::is_same_v<Slopes, NoSlopes>) {
      if (a.slopes) {
#pragma unroll
        for (int e = 0; e < V; ++e) v[e] = v[e] > 0.f ? v[e] : v[e] * slopes(e);
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = v[e] > 0.f ? v[e] : v[e] * a.slope;
  } else if (is_gated(a.activation)) {
    apply_gate(a, v);
  } else {  // hardswish
#pragma unroll
    for (int e = 0; e < V; ++e) v[e] = v[e] * min_nan(max_nan(v[e] + 3.f, 0.f), 6.f) * (1.f / 6.f);
  }
}

// Of `channels` values of T or float, or null; 0 past the end.
template <class T>
__device__ __forceinline__ float load_bias(const void* bias, bool is_f32, int channel, int channels) {
  if (!bias || channel >= channels) return 0.f;
  if (is_f32) return load_float(static_cast<const float*>(bias) + channel);
  return unpack<T>(load_half(static_cast<const T*>(bias) + channel)).x;
}
template <class T>
__device__ __forceinline__ float load_bias(const CommonArgs& a, int channel) {
  return load_bias<T>(a.bias, a.bias_f32, channel, a.K);
}

// Slopes for sums as finish_sums has them: channels that are rows of the product, from this lane's on, ...
template <class T>
struct RowSlopes {
  const CommonArgs& a;
  int channel;
  __device__ __forceinline__ float operator()(int e) const {
    return load_bias<T>(a.slopes, a.slopes_f32, channel + (e & 2 ? 8 : 0), a.K);
  }
};
// ... and columns, from the tile's first on, of which `next(j)` are those of its j-th 16 channels.
template <class T>
struct ColumnSlopes {
  const CommonArgs& a;
  int channel;
  __device__ __forceinline__ ColumnSlopes next(int j) const { return {a, channel + j * 16}; }
  __device__ __forceinline__ float operator()(int e) const {
    const int at = channel + (e >> 2) * 8 + (threadIdx.x & 3) * 2 + (e & 1);
    return load_bias<T>(a.slopes, a.slopes_f32, at, a.K);
  }
};

// A bool that the compiler may know.
template <bool kValue>
struct Known {
  __device__ constexpr operator bool() const { return kValue; }
};

// In the place of a bool `simple` that is false: the activation is one of apply_gate().
struct Gated : Known<false> {};

// Is the end of a sum a maximum, which rounding first does not change?
__device__ __forceinline__ bool ends_in_max(const CommonArgs& a) { return is_max(a.activation) && !a.after; }

// Eight sums v of a thread become four packed outputs: + what `packed` holds, if that is a residual, before or after
// the activation; rounding. simple: ends_in_max().
template <class T, class Simple, class Residual, class Slopes = NoSlopes>
__device__ __forceinline__ void finish_sums(const CommonArgs& a, Simple simple, Residual residual, float (&v)[8],
                                            uint32_t low, uint32_t (&packed)[4], Slopes slopes = {}) {
  const auto add = [&] {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 f = unpack<T>(packed[e]);
      v[2 * e] += f.x, v[2 * e + 1] += f.y;
    }
  };
  const bool after = !simple && a.after;  // the activation stands here once: see apply_gate()
  if (residual && !after) add();
  if constexpr (std::is_same_v<Simple, Gated>)
    apply_gate(a, v);
  else if (!simple)
    activate(a, v, slopes);
  if (residual && after) add();
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    packed[e] = pack<T>(v[2 * e], v[2 * e + 1]);
    if (simple) packed[e] = max_pair<T>(packed[e], low);
  }
}

// Specialised per (activation, residual) where speed counts: per-element branches cost several times as much.
template <class F>
__device__ __forceinline__ void for_epilogue(const CommonArgs& a, F&& run) {
  const bool residual = a.residual.data != nullptr;
  if (is_gated(a.activation))
    run(Gated(), residual);
  else if (!ends_in_max(a))
    run(Known<false>(), residual);
  else if (residual)
    run(Known<true>(), Known<true>());
  else
    run(Known<true>(), Known<false>());
}

// A warpgroup's 64 output channels x kPixels of sums become its staged output, a warp's 16 channels x 16 pixels at a
// time. `lane_row` is this lane's row for the first of them, `step` the bytes to the next; residuals lie where outputs
// go. Within for_epilogue.
template <class T, int kPixels, class Simple, class Residual, class Sums, class Slopes = NoSlopes>
__device__ __forceinline__ void finish_channels(const CommonArgs& a, Simple simple, Residual residual, const Sums& acc,
                                                float bias0, float bias1, uint32_t lane_row, int step, uint32_t low,
                                                Slopes slopes = {}) {
#pragma unroll
  for (int j = 0; j < kPixels / 16; ++j) {
    const uint32_t row = lane_row + j * step;
    float v[8];
    uint32_t packed[4];
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = acc[j * 8 + e] + (e & 2 ? bias1 : bias0);
    if (residual) ldmatrix_trans(row, packed);
    finish_sums<T>(a, simple, residual, v, low, packed, slopes);
    stmatrix_trans(row, packed[0], packed[1], packed[2], packed[3]);
  }
}
template <class T, int kPixels = 128, int kSums, class Slopes = NoSlopes>
__device__ __forceinline__ void finish_tile(const CommonArgs& a, const float (&acc)[kSums], float bias0, float bias1,
                                            uint32_t lane_row, int step, Slopes slopes = {}) {
  const uint32_t low = pack<T>(a.low, a.low);
  for_epilogue(a, [&](auto simple, auto residual) {
    finish_channels<T, kPixels>(a, simple, residual, acc, bias0, bias1, lane_row, step, low, slopes);
  });
}

// A warp's 16 pixels x 8 * kGroups (at most 64) output channels of sums, bias and all, become its staged output, rows
// of 128 bytes, kSlabs to a pixel, of which these are number `slab`; residuals lie where outputs go.
template <class T, int kGroups, int kSlabs = 1, class Simple, class Residual, class Slopes = NoSlopes>
__device__ __forceinline__ void finish_rows(const CommonArgs& a, Simple simple, Residual residual, const float* sums,
                                            uint32_t staging, int slab = 0, Slopes slopes = {}) {
  const uint32_t low = pack<T>(a.low, a.low);
  const int lane = threadIdx.x & 31, i8 = lane & 7, mat = lane >> 3, row = ((mat & 1) * 8 + i8) * kSlabs + slab;
#pragma unroll
  for (int j = 0; j < kGroups / 2; ++j) {
    const uint32_t at = staging + row * 128 + (((j * 2 + (mat >> 1)) ^ (row & 7)) << 4);
    float v[8];
    uint32_t packed[4];
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = sums[j * 8 + e];
    if (residual) ldmatrix(at, packed);
    finish_sums<T>(a, simple, residual, v, low, packed, slopes.next(j));
    stmatrix(at, packed[0], packed[1], packed[2], packed[3]);
  }
}

// ---------------------------------------------------------------- fringe
// kWarps (one or two) warps of every CTA, an even one first: zero the K channels of the listed pixels, eight lanes to a
// pixel. The pixels are dealt out one to each team before any gets a second: a short list must not become the launch's
// longest job.
template <class T, int kWarps = 2>
__device__ void zero_fringe(const CommonArgs& a) {
  grid_dependency_wait();
  const int lane = threadIdx.x & 31, member = lane & 7,
            count = min(max(load_int(a.fringe_count), 0), a.fringe_capacity);
  const int team = (blockIdx.x * kWarps + threadIdx.x / 32 % kWarps) * 4 + lane / 8, teams = gridDim.x * kWarps * 4;
  for (int64_t base = 0; base < count; base += teams * 8) {
    const int64_t at = base + member * teams + team;
    int64_t offset = -1;
    if (at < count) {
      uint32_t line, x, n, y;
      const int pixel = load_int(a.fringe + at);
      a.plane_w.divmod(pixel, &line, &x);
      a.plane_h.divmod(line, &n, &y);
      if (pixel >= 0 && n < static_cast<uint32_t>(a.N)) offset = n * a.y.n + y * a.y.y + x * a.y.x;
    }
    for (int m = 0; m < 8; ++m) {
      const int64_t to = __shfl_sync(0xffffffff, offset, m, 8);
      if (to < 0) continue;
      uint4* p = reinterpret_cast<uint4*>(static_cast<T*>(a.y.data) + to);
      for (int c = member; c < a.K / 8; c += 8) p[c] = make_uint4(0, 0, 0, 0);
    }
  }
}

}  // namespace sbnet::sm90

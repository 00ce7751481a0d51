// The consumers of the fused bottleneck block: a tile from its patch to its output.
#pragma once
#include "cuda/sm90/conv/bottleneck_load.cuh"

namespace sbnet::sm90::bottleneck_detail {

// The slabs of weights as a warp reads them: in order, and handed back, in a ring, once the products have read them.
template <int kN>
struct Weights {
  const Args& a;
  const uint32_t smem;
  int stage = 0, phase = 0;  // of the next slab
  int oldest = 0, held = 0;  // slabs that products under way read, from stage `oldest` on

  __device__ __forceinline__ uint32_t await() {  // the next slab, as an operand
    if (!Widths<kN>::kByHand || !a.resident) mbar_wait(smem + kWFull + 8 * stage, phase);
    const uint32_t operand = wgmma_operand(stage_at<kN>(a, smem, stage));
    if (++stage == a.stages) stage = 0, phase ^= !a.resident;
    return operand;
  }
  __device__ __forceinline__ void release(int slabs) {
    if (a.resident) return;
    for (; slabs; --slabs) {
      if (threadIdx.x % 32 == 0) mbar_arrive(smem + kWEmpty + 8 * oldest);
      if (++oldest == a.stages) oldest = 0;
    }
  }
  // The products since the last call read `slabs` slabs; those before are complete after it.
  __device__ __forceinline__ void commit(int slabs) {
    wgmma_commit();
    wgmma_wait<1>();
    release(held);
    held = slabs;
  }
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    release(held);
    held = 0;
  }
  __device__ __forceinline__ void skip(int slabs) {
    for (; slabs; --slabs) {
      await();
      __syncwarp();
      release(1);
    }
  }
};

// The bias of a lane's channels of 16.
struct Bias {
  float2 low, high;
  __device__ __forceinline__ explicit Bias(const float* of16)
      : low(reinterpret_cast<const float2*>(of16)[threadIdx.x & 3]),
        high(reinterpret_cast<const float2*>(of16)[4 + (threadIdx.x & 3)]) {}
};

// 16 pixels x 16 channels of a warp's sums, + bias, + what `packed` holds if that is a residual, activation, as pairs.
template <class T, class Simple, class Residual>
__device__ __forceinline__ void finish_pairs(const Args& a, Simple simple, Residual residual, const float* acc,
                                             const Bias& b, uint32_t (&packed)[4]) {
  float v[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = acc[e] + (e < 4 ? (e & 1 ? b.low.y : b.low.x) : (e & 1 ? b.high.y : b.high.x));
  finish_sums<T>(a, simple, residual, v, pack<T>(a.low, a.low), packed);
}

// Of 16 channels, from 16 * group on, those past the width become 0: they are sums of products with zeros, which are
// NaN where h1 or x is infinite, and would be factors of every output.
template <int kN>
__device__ __forceinline__ void zero_past_width(const Args& a, int group, uint32_t (&packed)[4]) {
  if (Widths<kN>::kFlat || a.width >= group * 16 + 16) return;
  packed[2] = packed[3] = 0;
  if (a.width <= group * 16) packed[0] = packed[1] = 0;
}

// run(simple): see finish_sums.
template <class F>
__device__ __forceinline__ void by_activation(const Args& a, F&& run) {
  if (is_max(a.activation))
    run(Known<true>());
  else if (is_gated(a.activation))
    run(Gated());
  else
    run(Known<false>());
}

// What a thread is and where its team's memory lies.
template <int kN>
struct Place {
  static constexpr int kTeam = Widths<kN>::kTeam;
  int lane, w4, team, part;  // a team's warpgroups are its parts
  int mat, row;              // stmatrix: which of its matrices, which of 64 pixels
  uint32_t h;                // h1, then h2
  __device__ __forceinline__ Place(const Args& a, uint32_t smem) {
    const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0);
    lane = threadIdx.x & 31, w4 = warp & 3, team = (warp >> 2) / kTeam, part = (warp >> 2) % kTeam;
    mat = lane >> 3, row = w4 * 16 + (mat & 1) * 8 + (lane & 7);
    h = smem + a.h_at + team * Widths<kN>::kSlabs * kSlice;
  }
  __device__ __forceinline__ void sync_team() const { bar_sync(2 + team, kTeam * 128); }
};

// A lane's pixels of the patch, 64 at a time: y << 16 | x << 8 | in which of 3x3 cells.
template <int kN>
struct Around {
  static constexpr int kGroups = 2 / Widths<kN>::kTeam;
  uint32_t pixels[kGroups][2];
  __device__ __forceinline__ explicit Around(const Place<kN>& at) {
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const int pixel = (i / 2 + at.part) * 64 + at.w4 * 16 + i % 2 * 8 + at.lane / 4;
      const int y = pixel / kPatchSide, x = pixel % kPatchSide;
      const int cell = (y == 0 ? 0 : y == 9 ? 6 : 3) + (x == 0 ? 0 : x == 9 ? 2 : 1);
      pixels[i / 2][i % 2] = y << 16 | x << 8 | cell;
      pin(pixels[i / 2][i % 2]);
    }
  }
  // Is the pixel of a tile one that h1 is computed of? A cell above or left of the plane has no bit.
  __device__ __forceinline__ bool keep(const Args& a, const int4& unit, int g, int e) const {
    const uint32_t pixel = pixels[g][e];
    const int y = unit.y + static_cast<int>(pixel >> 16) - 1, x = unit.z + static_cast<int>(pixel >> 8 & 255) - 1;
    return unit.w >> (pixel & 15) & 1 && y < a.H && x < a.W;
  }
};

template <class T, int kN>
__device__ __forceinline__ void compute_h1(const Args& a, const Place<kN>& at, const Around<kN>& around,
                                           Weights<kN>& weights, const float* bias, const int4& unit, uint32_t patch,
                                           uint32_t full, int phase) {
  constexpr int kGroups = Around<kN>::kGroups;
  float acc[kGroups][kN / 2];
  for (int c = 0; c < a.slices; ++c) {
    mbar_wait(full + 8 * c, phase);
    const uint32_t dw = weights.await(), dx = wgmma_operand(patch + c * kSlice + at.part * 64 * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        wgmma<T, kN>(acc[g], wgmma_layout(1024) | (dx + g * 64 * 8 + k * 2), wgmma_layout(1024) | (dw + k * 2), c | k);
    weights.commit(1);
  }
  weights.finish();
  uint32_t to[kGroups];  // 0: past the patch
  bool keep[kGroups][2];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int pixel = (g + at.part) * 64 + at.row;
    to[g] = pixel < kPatchPixels ? at.h + pixel * 128 : 0;
    keep[g][0] = around.keep(a, unit, g, 0), keep[g][1] = around.keep(a, unit, g, 1);
  }
  by_activation(a, [&](auto simple) {
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      const Bias b(bias + j * 16);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if ((g + at.part) * 64 + at.w4 * 16 >= kPatchPixels) continue;
        uint32_t packed[4];
        finish_pairs<T>(a, simple, Known<false>(), acc[g] + j * 8, b, packed);
        zero_past_width<kN>(a, j, packed);
        if (!keep[g][0]) packed[0] = packed[2] = 0;
        if (!keep[g][1]) packed[1] = packed[3] = 0;
        const uint32_t word = (j & 3) * 2 + (at.mat >> 1);
        stmatrix(to[g] ? swizzled(to[g] + j / 4 * kSlice, word) : weights.smem + kNowhere, packed[0], packed[1],
                 packed[2], packed[3]);
      }
    }
  });
  fence_async_proxy();
  at.sync_team();
}

// Each part of a team its share of the channels. `dh`: h1, as an operand.
template <class T, int kN>
__device__ __forceinline__ void compute_h2(const Args& a, const Place<kN>& at, Weights<kN>& weights, const float* bias,
                                           uint32_t dh) {
  using W = Widths<kN>;
  constexpr int kShare = kN / W::kTeam;
  float acc[kShare / 2];
#pragma unroll
  for (int s = 0; s < W::kTapSlabs; ++s) {
    const uint32_t dw = weights.await() + at.part * kShare * 8;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < W::kSlabSteps; ++k) {
      const int step = s * W::kSlabSteps + k, tap = step / W::kSteps, in = step % W::kSteps;
      const uint32_t pixels = dh + in / 4 * (kSlice / 16) + (tap / 3 * kPatchSide + tap % 3) * 8 + in % 4 * 2;
      if (tap < 9)
        wgmma<T, kShare>(acc, wgmma_layout(kPatchSide * 128) | pixels, wgmma_layout(1024) | (dw + k * 2), step);
    }
    if (s % W::kGroup == W::kGroup - 1) weights.commit(W::kGroup);
  }
  weights.finish();
  at.sync_team();  // all have read h1
  by_activation(a, [&](auto simple) {
#pragma unroll
    for (int j = 0; j < kShare / 16; ++j) {
      uint32_t packed[4];
      const int group = at.part * (kShare / 16) + j;
      finish_pairs<T>(a, simple, Known<false>(), acc + j * 8, Bias(bias + group * 16), packed);
      zero_past_width<kN>(a, group, packed);
      stmatrix(swizzled(at.h + group / 4 * kSlice + at.row * 128, (group & 3) * 2 + (at.mat >> 1)), packed[0],
               packed[1], packed[2], packed[3]);
    }
  });
  fence_async_proxy();
  at.sync_team();
}

// 64 channels at a time, a team's parts by turns. y takes x's place in the patch, from where a warp stores its two rows
// of eight pixels. `dh`: h2, as an operand; `empty`: the barrier of the patch's first slice.
template <class T, int kN>
__device__ __forceinline__ void compute_y(const Args& a, const Place<kN>& at, Weights<kN>& weights, uint8_t* shared,
                                          const int4& unit, uint32_t patch, uint32_t dh, uint32_t empty) {
  using W = Widths<kN>;
  const float* bias = reinterpret_cast<const float*>(shared + kBias3At);
  // In the patch's first slice: a lane's row of each matrix, and the words of 16 bytes that it stores.
  uint32_t matrix[4], word[4];
  T* out[4];
  const int first_y = unit.y + at.w4 * 2, first_x = unit.z + at.lane / 8;
  T* const first = static_cast<T*>(a.y.data) + unit.x * a.y.n + first_y * a.y.y + first_x * a.y.x + at.lane % 8 * 8;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int down = e / 2, right = e % 2 * 4;
    matrix[e] = swizzled(patch + ((at.row / 8 + 1) * kPatchSide + at.row % 8 + 1) * 128, e * 2 + (at.mat >> 1));
    word[e] = swizzled(patch + ((at.w4 * 2 + down + 1) * kPatchSide + at.lane / 8 + right + 1) * 128, at.lane % 8);
    pin(matrix[e], word[e]);
    const bool there = unit.x >= 0 && first_y + down < a.H && first_x + right < a.W;
    out[e] = there ? first + down * a.y.y + right * a.y.x : nullptr;
  }
  for (int q = at.part; q < a.slices; q += W::kTeam) {
    float acc[32];
    uint32_t dw[W::kSlabs], packed[4][4];
#pragma unroll
    for (int l = 0; l < W::kSlabs; ++l) dw[l] = weights.await() + at.part * 64 * 8;
    __syncwarp();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < W::kSteps; ++k)
      wgmma<T, 64>(acc, wgmma_layout(1024) | (dh + k / 4 * (kSlice / 16) + k % 4 * 2),
                   wgmma_layout(1024) | (dw[k / 4] + k % 4 * 2), k);
    wgmma_commit();
    weights.held = W::kSlabs;
    weights.finish();

    const uint32_t flip = (q & 1) * 64, slice = q * kSlice;  // a slice's 100 rows turn the swizzle by half
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix((matrix[j] ^ flip) + slice, packed[j]);
    by_activation(a, [&](auto simple) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        finish_pairs<T>(a, simple, Known<true>(), acc + j * 8, Bias(bias + q * 64 + j * 16), packed[j]);
    });
#pragma unroll
    for (int j = 0; j < 4; ++j)
      stmatrix((matrix[j] ^ flip) + slice, packed[j][0], packed[j][1], packed[j][2], packed[j][3]);
    __syncwarp();
    uint4 line[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      line[e] = *reinterpret_cast<const uint4*>(shared + ((word[e] ^ flip) + slice - weights.smem));
    fence_async_proxy();  // what was written here comes before the next patch; ahead of the stores, which take long
    __syncwarp();
    if (at.lane == 0) mbar_arrive(empty + 8 * q);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (out[e] && q * 64 + at.lane % 8 * 8 < a.K) store_words(out[e] + q * 64, line[e]);
  }
  if (W::kTeam > 1) {
    if (a.slices % 2 && at.part) weights.skip(W::kSlabs);
    at.sync_team();  // all have read h2
  }
}

template <class T, int kN>
__device__ __forceinline__ void consume(const Args& a, uint32_t smem, uint8_t* shared, const int4* units) {
  const int consumers = a.teams * Widths<kN>::kTeam * 128;
  float* bias1 = reinterpret_cast<float*>(shared + kBias1At);
  float* bias2 = reinterpret_cast<float*>(shared + kBias2At);
  float* bias3 = reinterpret_cast<float*>(shared + kBias3At);
  await_settled(a);
  for (int i = threadIdx.x; i < kN; i += consumers) {
    bias1[i] = load_bias<T>(a.bias1, a.bias_f32, i, a.width);
    bias2[i] = load_bias<T>(a.bias2, a.bias_f32, i, a.width);
  }
  for (int i = threadIdx.x; i < a.slices * 64; i += consumers) bias3[i] = load_bias<T>(a, i);
  if (Widths<kN>::kByHand && a.resident) copy_weights(a, shared, consumers);
  grid_dependency_wait();
  fence_async_proxy();
  bar_sync(1, consumers);

  const Place<kN> at(a, smem);
  const Around<kN> around(at);
  Weights<kN> weights{a, smem};
  int buffer = at.team, phase = 0;
  for (;;) {
    mbar_wait(smem + kTileFull + 8 * buffer, phase);
    const int4 unit = units[buffer];
    if (unit.w & kLast) {
      if (!a.resident && unit.w & kOthersGoOn) weights.skip(a.weights);
      break;
    }
    const uint32_t patch = patch_at(a, smem, buffer), slices = 8 * buffer * kMaxSlices;
    compute_h1<T>(a, at, around, weights, bias1, unit, patch, smem + kXFull + slices, phase);
    uint32_t dh = wgmma_operand(at.h);
    pin(dh);  // or every tap's descriptor becomes a register
    compute_h2<T>(a, at, weights, bias2, dh);
    compute_y<T>(a, at, weights, shared, unit, patch, dh, smem + kXEmpty + slices);
    if ((buffer += a.teams) >= a.buffers) buffer -= a.buffers, phase ^= 1;
  }
}

}  // namespace sbnet::sm90::bottleneck_detail

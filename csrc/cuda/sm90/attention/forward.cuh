// The forward kernel of block-sparse attention. A warpgroup owns 64 queries; a tile of keys is gathered from pieces of
// 16 to 128 keys that may lie anywhere, a TMA box each, so that small blocks feed full WGMMAs.
//
// A CTA, one per SM, has kGroups groups that work on their own: a producer warp and kWarpgroups warpgroups that share
// the group's tiles of keys and values. Tiles of queries are claimed from a counter. One ring of stages carries K0, K1,
// V0, K2, V1, ..., the order of use: S of tile n is issued ahead of P V of tile n-1, and the softmax runs beneath that.
// Tiles of keys that need the mask come first; the others run untested.
//
//   warps 0 ...   producers, one for each group
//   warps 4 ...   warpgroups
#pragma once
#include "cuda/sm90/attention/forward_load.cuh"
#include "cuda/sm90/attention/groups.cuh"
#include "cuda/sm90/attention/visible.cuh"

namespace sbnet::sm90::attention {

template <class C>
__device__ __forceinline__ void consume_forward(const ForwardArgs& a, const ForwardMaps& maps,
                                                const ForwardShared<C>& s, int group, int consumer) {
  using T = typename C::T;
  constexpr int kDim = C::kDim, kKeys = C::kKeys, kWarpgroups = C::kWarpgroups;
  const int wg = consumer % kWarpgroups, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  // This thread: queries row and row + 8 of the tile; keys 8n + 2 (lane % 4) and the next.
  const int row = wg * 64 + warp * 16 + (lane >> 2);
  const uint32_t ring = (s.ring & 0x3FFFF) >> 4;
  float S[kKeys / 2], O[kDim / 2];
  uint32_t P[kKeys / 4];
  uint32_t slot = 0, phase = 0, q_slot = 0, q_phase = 0;
  int q_done = -1;
  if (C::kTurns && wg == kWarpgroups - 1) bar_arrive(1 + group * kWarpgroups, 256);
  auto advance = [&] {
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  };
  auto release = [&](uint32_t stage) {
    __syncwarp();  // every lane has read the stage's entries
    if (lane == 0) mbar_arrive(s.empty + 8 * stage);
  };
  while (true) {
    mbar_wait(s.q_full + 8 * q_slot, q_phase);
    const int4 t = s.tiles[q_slot];
    if (t.w < 0) break;
    const uint32_t queries = s.q + q_slot * C::kQueryBytes + wg * 8192, q_operand = (queries & 0x3FFFF) >> 4;
    const Plane at = plane_at(a, t.y);
    const int phases = a.layout.rule.phases;
    const int k_end = phase_length(a.k_lengths, at.b, a.k_length, phases, at.j);
    float max0 = -INFINITY, max1 = -INFINITY, sum0 = 0.f, sum1 = 0.f;
    const int q0 = t.x + row;

    auto issue_scores = [&] {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        wgmma<T, kKeys>(S, descriptor(q_operand + (k / 4) * (C::kQueries * 8) + k % 4 * 2),
                        descriptor(ring + slot * (C::kTileBytes >> 4) + (k / 4) * (kKeys * 8) + k % 4 * 2), k);
      wgmma_commit();
    };
    auto issue_values = [&](uint32_t stage) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        multiply_rows<T, kDim>(O, P + 4 * k, descriptor(ring + stage * (C::kTileBytes >> 4) + k * 128, kKeys * 128));
      wgmma_commit();
    };
    // Which keys of a tile this thread's queries see: a word per query and 32 keys, shifted right by 2 (lane % 4), so
    // that tests of it are constant. Integers only: S stays where WGMMA put it.
    uint32_t seen[2][kKeys / 32];
    auto see = [&](uint32_t stage) {
      const uint32_t* words = s.entries + stage * C::kMostBoxes;
      const int piece = 1 << a.log_piece;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int q = q0 + r * 8;
        const KeyRange range = key_range(a.layout.rule, q, k_end);
        auto keys_from = [&](int column) -> uint32_t {
          const uint32_t word = words[column >> a.log_piece];
          const int key = static_cast<int>(word >> kEntryShift << a.log_piece) + (column & (piece - 1));
          const int from = max(range.first - key, 0);
          uint32_t m = bit_run(from, word >> (wg * 4 + warp) & 1 ? max(range.last - key + 1 - from, 0) : 0);
          m = within_rule(a.layout, a.stride_period, q, key, m);
          if (a.layout.masks && m) m = within_masks(a.layout, a.layout.heads > 1 ? at.h : 0, q, key, m);
          return m;
        };
#pragma unroll
        for (int w = 0; w < kKeys / 32; ++w) {
          uint32_t m = keys_from(w * 32);
          if (a.log_piece == 4) m = (m & 0xFFFF) | keys_from(w * 32 + 16) << 16;
          seen[r][w] = m >> (lane & 3) * 2;
        }
      }
    };
    auto mask = [&] {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i)
        if (!(seen[i >> 1 & 1][i >> 4] & (1u << ((i >> 2 & 3) * 8 + (i & 1))))) S[i] = -INFINITY;
    };
    // Leaves exponentials in S; true, for the whole warp, where O must be scaled by scale0 and scale1.
    float scale0, scale1;
    auto softmax = [&]() -> bool {
      float x0 = fmaxf(S[0], S[1]), x1 = fmaxf(S[2], S[3]), y0 = fmaxf(S[4], S[5]), y1 = fmaxf(S[6], S[7]);
#pragma unroll
      for (int i = 8; i < kKeys / 2; i += 8) {
        x0 = fmaxf(x0, fmaxf(S[i], S[i + 1])), x1 = fmaxf(x1, fmaxf(S[i + 2], S[i + 3]));
        y0 = fmaxf(y0, fmaxf(S[i + 4], S[i + 5])), y1 = fmaxf(y1, fmaxf(S[i + 6], S[i + 7]));
      }
      x0 = fmaxf(x0, y0), x1 = fmaxf(x1, y1);
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 1)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 1));
      x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, 2)), x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, 2));
      // The maximum may lag by 2^8: it cancels, and O is rarely scaled.
      const bool grow = __any_sync(~0u, (x0 - max0) * a.scale > 8.f || (x1 - max1) * a.scale > 8.f);
      if (grow) {
        const float n0 = fmaxf(max0, x0), n1 = fmaxf(max1, x1);
        scale0 = exp2_approx((max0 - (n0 == -INFINITY ? 0.f : n0)) * a.scale);
        scale1 = exp2_approx((max1 - (n1 == -INFINITY ? 0.f : n1)) * a.scale);
        max0 = n0, max1 = n1, sum0 *= scale0, sum1 *= scale1;
      }
      const float b0 = max0 == -INFINITY ? 0.f : max0 * a.scale, b1 = max1 == -INFINITY ? 0.f : max1 * a.scale;
      float s0 = 0.f, s1 = 0.f, u0 = 0.f, u1 = 0.f;
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
        for (int k = 0; k < 4; ++k) S[i + k] = exp2_approx(fmaf(S[i + k], a.scale, k & 2 ? -b1 : -b0));
        s0 += S[i], u0 += S[i + 1], s1 += S[i + 2], u1 += S[i + 3];
      }
      sum0 += s0 + u0, sum1 += s1 + u1;
      return grow;
    };
    uint32_t drop[2] = {0, 0};
    auto choose = [&](uint32_t stage) {  // the weights of this tile that are dropped
      const uint32_t* words = s.entries + stage * C::kMostBoxes;
      Dropper(a.dropout).of_queries<kKeys>(
          t.y, q0, lane,
          [&](int column) {
            return static_cast<int>(words[column >> a.log_piece] >> kEntryShift << a.log_piece) +
                   (column & ((1 << a.log_piece) - 1));
          },
          drop);
    };
    auto convert = [&] {
      if constexpr (C::kDropout) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i)
          if (drop[i >> 1 & 1] >> (i / 4 * 2 + (i & 1)) & 1) S[i] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
    };
    // Twice, with and without the mask: a branch that touches S here would make ptxas spill.
    auto step = [&](auto masked) {
      mbar_wait(s.full + 8 * slot, phase);
      if (C::kTurns) bar_sync(1 + group * kWarpgroups + wg, 256);
      issue_scores();
      const uint32_t keys = slot;
      advance();
      mbar_wait(s.full + 8 * slot, phase);
      issue_values(slot);
      if (C::kTurns) bar_arrive(1 + group * kWarpgroups + (wg + 1) % kWarpgroups, 256);
      wgmma_wait<1>();
      pin_all(S);
      if constexpr (decltype(masked)::value) see(keys), mask();
      if constexpr (C::kDropout) choose(keys);
      release(keys);
      const bool grow = softmax();
      pin_all(S);  // the exponentials run beneath P V, not after it
      wgmma_wait<0>();
      pin_all(O), pin_all(P);
      release(slot);
      advance();
      if (grow) {
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) O[i] *= i & 2 ? scale1 : scale0;
      }
      convert();
    };
    auto free_queries = [&] {  // the tile before has left
      if (leader && q_done >= 0) {
        tma_store_wait_read();
        mbar_arrive(s.q_empty + 8 * q_done);
      }
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) O[i] = 0.f;
    };
    if (t.w > 0) {
      mbar_wait(s.full + 8 * slot, phase);
      issue_scores();
      free_queries();
      wgmma_wait<0>();
      pin_all(S);
#pragma unroll
      for (int w = 0; w < kKeys / 32; ++w) seen[0][w] = seen[1][w] = ~0u;
      if (t.z > 0) see(slot);
      mask();
      const int key = static_cast<int>(s.entries[slot * C::kMostBoxes] >> kEntryShift << a.log_piece);
      const int tail = k_end - key, tile_end = 1 << a.log_piece;
      if constexpr (C::kDropout) choose(slot);
      release(slot);
      advance();
      if (a.k_lengths && tail < tile_end && key < a.k_length) {
        // Values past the sequence's own end may be anything, NaN too, which 0 * v would keep. Each warpgroup writes
        // all of the zeros, before its own products.
        const bool wraps = t.w > 1 && slot + 1 == C::kStages;
        const uint32_t stage = t.w == 1 ? slot : wraps ? 0 : slot + 1;
        mbar_wait(s.full + 8 * stage, t.w > 1 && wraps ? phase ^ 1 : phase);
        for (int d = 0; d < C::kChunks; ++d)
          for (int at_row = max(tail, 0) * 8 + (threadIdx.x & 127); at_row < tile_end * 8; at_row += 128)
            store_shared(s.ring + stage * C::kTileBytes + d * kKeys * 128 + at_row * 16, 0.f, 0.f, 0.f, 0.f);
        fence_async_proxy();
        bar_sync(8 + consumer, 128);
      }
      softmax();
      convert();
      int n = 1;
#pragma unroll 1
      for (; n < t.z; ++n) step(std::true_type());
#pragma unroll 1
      for (; n < t.w; ++n) step(std::false_type());
      mbar_wait(s.full + 8 * slot, phase);
      issue_values(slot);
      sum0 += __shfl_xor_sync(~0u, sum0, 1), sum1 += __shfl_xor_sync(~0u, sum1, 1);
      sum0 += __shfl_xor_sync(~0u, sum0, 2), sum1 += __shfl_xor_sync(~0u, sum1, 2);
      wgmma_wait<0>();
      pin_all(O), pin_all(P);
      release(slot);
      advance();
    } else {
      free_queries();
    }

    const int q_end = phase_length(a.q_lengths, at.b, a.q_length, phases, at.j);
    const bool some0 = sum0 > 0.f && q0 < q_end, some1 = sum1 > 0.f && q0 + 8 < q_end;
    if (a.lse && (lane & 3) == 0) {
      const int rows = a.q_length / phases;
      float* lse = a.lse + static_cast<int64_t>(t.y / phases) * a.q_length + at.j;
      constexpr float kLn2 = 0.693147181f;
      if (q0 < rows) lse[int64_t{q0} * phases] = some0 ? (max0 * a.scale + __log2f(sum0)) * kLn2 : -INFINITY;
      if (q0 + 8 < rows) lse[int64_t{q0 + 8} * phases] = some1 ? (max1 * a.scale + __log2f(sum1)) * kLn2 : -INFINITY;
    }
    const float kept = C::kDropout ? a.dropout.scale : 1.f;
    const float r0 = some0 ? kept / sum0 : 0.f, r1 = some1 ? kept / sum1 : 0.f;
    if (a.q_lengths) {  // past the sequence's own end O may be NaN
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i)
        if (!(i & 2 ? some1 : some0)) O[i] = 0.f;
    }
    bar_sync(8 + consumer, 128);
    const uint32_t to = queries + (warp * 16 + (lane & 15)) * 128;
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2)
      stmatrix(to + (n / 8) * (C::kQueries * 128) + (((n % 8 + (lane >> 4)) ^ (lane & 7)) << 4),
               pack<T>(O[4 * n] * r0, O[4 * n + 1] * r0), pack<T>(O[4 * n + 2] * r1, O[4 * n + 3] * r1),
               pack<T>(O[4 * n + 4] * r0, O[4 * n + 5] * r0), pack<T>(O[4 * n + 6] * r1, O[4 * n + 7] * r1));
    fence_async_proxy();
    bar_sync(8 + consumer, 128);
    if (leader) {
      for (int d = 0; d < C::kChunks; ++d)
        tma_store(&maps.out, queries + d * C::kQueries * 128, d * 64, t.x + wg * 64, at.j, at.h, at.b);
      tma_store_commit();
      if (C::kQueryStages == 1) {
        tma_store_wait_read();
        mbar_arrive(s.q_empty + 8 * q_slot);
      }
    }
    if (C::kQueryStages > 1) q_done = static_cast<int>(q_slot);
    if (++q_slot == C::kQueryStages) q_slot = 0, q_phase ^= 1;
  }
  if (leader) tma_store_wait_read();
}

namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ ForwardArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  run_groups<C, ForwardShared<C>>(
      shared,
      [](const auto& s) {
        for (int i = 0; i < C::kQueryStages; ++i)
          mbar_init(s.q_full + 8 * i, 1), mbar_init(s.q_empty + 8 * i, C::kWarpgroups);
      },
      [&](const auto& s, int group, int consumer) { consume_forward<C>(a, maps, s, group, consumer); },
      [&](const auto& s) { produce_forward<C>(a, maps, s); });
}

}  // namespace
}  // namespace sbnet::sm90::attention

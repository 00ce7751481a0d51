// The backward kernels of block-sparse attention. A warpgroup owns 64 keys and keeps their dK and dV in registers; what
// is computed is transposed, its rows are keys:
//
//   S' = K Q^T, dP' = V dO^T               from shared memory
//   P' = exp2(S' - lse2), dS' = P' (dP' - delta)
//   dV += P' dO, dK += dS' Q               P' and dS' stay in registers
//   dQ += dS K                             dS goes through shared memory; the sums over keys are made in the L2
//
// Or in two passes, the same bits at every run: the first leaves dQ out, the second makes it with the roles exchanged,
// where a warpgroup owns 64 queries and meets keys: read "key" as "query" there.
//
// A CTA, one per SM, has kGroups groups that work on their own: a producer warp and kWarpgroups warpgroups that share a
// tile of 64 keys each, and the tiles that it meets. Tiles of keys are claimed from a counter. The ring carries Q0,
// dO0, Q1, dO1, ...
//
//   warps 0 ...   producers, one for each group
//   warps 4 ...   warpgroups
#pragma once
#include "cuda/sm90/attention/backward_load.cuh"
#include "cuda/sm90/attention/groups.cuh"
#include "cuda/sm90/attention/visible.cuh"

namespace sbnet::sm90::attention {

template <class C>
__device__ __forceinline__ void consume_backward(const BackwardArgs& a, const BackwardMaps& maps,
                                                 const BackwardShared<C>& s, int group, int consumer) {
  using T = typename C::T;
  constexpr int kDim = C::kDim, kMet = C::kMet, kWarpgroups = C::kWarpgroups, kOwn = C::kOwn, kChunks = C::kChunks;
  constexpr bool kQueries = C::kQueries, kAdds = C::kAdds;
  const int wg = consumer % kWarpgroups, warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  // This thread: keys row and row + 8 of the tile; queries 8n + 2 (lane % 4) and the next.
  const int row = wg * 64 + warp * 16 + (lane >> 2);
  const uint32_t staging = s.scores + C::kBuffers * C::kScoreBytes + wg * 16384 + warp * 4096;
  // Operands, all from one base: shared addresses / 16.
  constexpr uint32_t kSecond = C::kOwnBytes >> 4, kRing = 2 * kSecond, kTile = C::kTileBytes >> 4;
  constexpr uint32_t kScores = kRing + C::kStages * kTile;
  const uint32_t base = (s.own & 0x3FFFF) >> 4, own = base + wg * 512;
  float dK[kDim / 2], dV[kDim / 2], S[kMet / 2], dP[kMet / 2], dQ[32];
  uint32_t P[kMet / 4], dS[kMet / 4];
  uint32_t slot = 0, phase = 0, own_phase = 0, buffer = 0;
  const int phases = a.layout.rule.phases;
  auto advance = [&] {
    if (++slot == C::kStages) slot = 0, phase ^= 1;
  };
  auto group_sync = [&] { bar_sync(1 + group, kWarpgroups * 128); };
  auto release = [&](uint32_t stage) {
    __syncwarp();
    if (lane == 0) mbar_arrive(s.empty + 8 * stage);
  };
  // Rows past a sequence's own end may be anything, NaN too, which 0 * x would keep. Each warpgroup writes all of the
  // zeros, before its own products.
  auto clear_rows = [&](uint32_t to, int from, int rows) {
    for (int d = 0; d < kChunks; ++d)
      for (int i = max(from, 0) * 8 + (threadIdx.x & 127); i < rows * 8; i += 128)
        store_shared(to + d * rows * 128 + i * 16, 0.f, 0.f, 0.f, 0.f);
    fence_async_proxy();
    bar_sync(8 + consumer, 128);
  };
  while (true) {
    mbar_wait(s.own_full, own_phase);
    own_phase ^= 1;
    const int4 t = *s.tile;
    if (t.w < 0) break;
    const HeadPlane at = head_plane(t.y, kQueries ? a.heads : a.kv_heads, phases);
    const int q_end = phase_length(a.q_lengths, at.b, a.q_length, phases, at.j);
    const int k_end = phase_length(a.k_lengths, at.b, a.k_length, phases, at.j);
    const bool ragged = a.q_lengths || a.k_lengths;
    const int own_end = kQueries ? q_end : k_end, met_end = kQueries ? k_end : q_end;
    if (ragged && t.x + kOwn > own_end)
      for (int which = 0; which < 2; ++which) clear_rows(s.own + which * C::kOwnBytes, own_end - t.x, kOwn);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dK[i] = dV[i] = 0.f;

    auto issue_scores = [&] {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        wgmma<T, kMet>(S, descriptor(own + (k / 4) * (kOwn * 8) + k % 4 * 2),
                       descriptor(base + slot * kTile + kRing + (k / 4) * (kMet * 8) + k % 4 * 2), k);
      wgmma_commit();
    };
    auto issue_score_grads = [&](uint32_t stage) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        wgmma<T, kMet>(dP, descriptor(own + kSecond + (k / 4) * (kOwn * 8) + k % 4 * 2),
                       descriptor(base + stage * kTile + kRing + (k / 4) * (kMet * 8) + k % 4 * 2), k);
      wgmma_commit();
    };
    auto issue_query_grads = [&](int piece) {  // 64 queries x 64 of D
      const int v = wg * C::kPieces + piece, r = v / kChunks, c = v % kChunks;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4 * kWarpgroups; ++k)
        multiply_rows<T>(
            dQ,
            descriptor(base + buffer * (C::kScoreBytes >> 4) + r * 512 + kScores + (k / 4) * (kMet * 8) + k % 4 * 2),
            descriptor(base + c * (kOwn * 8) + k * 128), k);
      wgmma_commit();
    };
    auto add_query_grads = [&](int piece, int2 word) {
      const int v = wg * C::kPieces + piece, r = v / kChunks, c = v % kChunks;
      const int64_t cell = int64_t{word.y} * (a.padded >> 6) + (word.x >> kEntryShift) * C::kMetCells + r;
      float* to = a.sums + (cell * kChunks + c) * 4096 + warp * 1024;
      if constexpr (C::kPass == Pass::kVector) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          add_global(to + i * 128 + lane * 4, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
      } else {
        if (lane == 0) tma_store_wait_read();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i)
          store_shared(staging + i * 512 + lane * 16, dQ[4 * i], dQ[4 * i + 1], dQ[4 * i + 2], dQ[4 * i + 3]);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
          bulk_add(to, staging, 4096);
          tma_store_commit();
        }
      }
    };
    float lse0 = 0.f, lse1 = 0.f, delta0 = 0.f, delta1 = 0.f;
    if constexpr (kQueries) {
      const int64_t i = int64_t{t.y} * a.padded + t.x + row;
      lse0 = a.lse2[i], lse1 = a.lse2[i + 8], delta0 = a.delta[i], delta1 = a.delta[i + 8];
    }
#pragma unroll 1
    for (int n = 0; n < t.w; ++n) {
      mbar_wait(s.full + 8 * slot, phase);
      const int2 word = s.words[slot];
      const bool masked = word.x & kMaskedEntry;
      const int column0 = (word.x >> kEntryShift) * kMet;
      const bool past_end = ragged && column0 + kMet > met_end;
      // What this thread sees: a word per key and 32 queries, shifted right by 2 (lane % 4), so that tests of it are
      // constant. Made before any product is under way: no register that WGMMA writes is touched by it.
      uint32_t seen[2][kMet / 32];
      if (masked) {
        const HeadPlane of = head_plane(word.y, a.heads, phases);
        SeenWords<kQueries> words(a.layout, a.stride_period, of.b, of.h, q_end, k_end);
#pragma unroll
        for (int w = 0; w < kMet / 32; ++w) {
          const bool met = word.x >> (wg * C::kMetCells + w / 2) & 1;
          words.see(met, t.x + row, column0 + 32 * w, lane, seen[0][w], seen[1][w]);
        }
      }
      uint32_t drop[2] = {0, 0};
      if constexpr (C::kDropout) {
        const Dropper dropper(a.dropout);
        if constexpr (kQueries)
          dropper.of_queries<kMet>(word.y, t.x + row, lane, [&](int column) { return column0 + column; }, drop);
        else
          dropper.of_keys(word.y, t.x + row, column0, lane, drop);
      }
      if (past_end) clear_rows(s.ring + slot * C::kTileBytes, met_end - column0, kMet);
      issue_scores();
      const uint32_t first = slot;
      advance();
      const uint32_t second = slot;
      mbar_wait(s.full + 8 * second, phase);
      if (past_end) clear_rows(s.ring + second * C::kTileBytes, met_end - column0, kMet);
      issue_score_grads(second);
      wgmma_wait<1>();
      pin_all(S);
      if (masked) {
#pragma unroll
        for (int i = 0; i < kMet / 2; ++i)
          if (!(seen[i >> 1 & 1][i >> 4] & (1u << ((i >> 2 & 3) * 8 + (i & 1))))) S[i] = -INFINITY;
      }
      const auto kept = [&](int bit, int r, float v) { return drop[r] >> bit & 1 ? 0.f : v; };
      const uint32_t lse = s.rows + first * C::kRowBytes + (lane & 3) * 8;
      const uint32_t delta = s.rows + second * C::kRowBytes + (lane & 3) * 8;
#pragma unroll
      for (int i = 0; i < kMet / 8; ++i) {
        const float2 l = kQueries ? make_float2(lse0, lse1) : load_shared_pair(lse + i * 32);
        S[4 * i] = exp2_approx(fmaf(S[4 * i], a.scale_log2, -l.x));
        S[4 * i + 1] = exp2_approx(fmaf(S[4 * i + 1], a.scale_log2, kQueries ? -l.x : -l.y));
        S[4 * i + 2] = exp2_approx(fmaf(S[4 * i + 2], a.scale_log2, kQueries ? -l.y : -l.x));
        S[4 * i + 3] = exp2_approx(fmaf(S[4 * i + 3], a.scale_log2, -l.y));
        if constexpr (C::kDropout && !kQueries) {
          P[2 * i] = pack<T>(kept(2 * i, 0, S[4 * i]), kept(2 * i + 1, 0, S[4 * i + 1]));
          P[2 * i + 1] = pack<T>(kept(2 * i, 1, S[4 * i + 2]), kept(2 * i + 1, 1, S[4 * i + 3]));
        } else if constexpr (!kQueries) {
          P[2 * i] = pack<T>(S[4 * i], S[4 * i + 1]), P[2 * i + 1] = pack<T>(S[4 * i + 2], S[4 * i + 3]);
        }
      }
      if constexpr (kQueries) {
        wgmma_wait<0>();
      } else {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kMet / 16; ++k)
          multiply_rows<T, kDim>(dV, P + 4 * k, descriptor(base + second * kTile + kRing + k * 128, kMet * 128));
        wgmma_commit();
        wgmma_wait<1>();
      }
      pin_all(dP);
#pragma unroll
      for (int i = 0; i < kMet / 8; ++i) {
        const float2 l = kQueries ? make_float2(delta0, delta1) : load_shared_pair(delta + i * 32);
        if constexpr (C::kDropout) {
#pragma unroll
          for (int e = 0; e < 4; ++e) dP[4 * i + e] = kept(2 * i + (e & 1), e >> 1, dP[4 * i + e] * a.dropout.scale);
        }
        const float2 p0 = C::kRounded ? unpack<T>(P[2 * i]) : make_float2(S[4 * i], S[4 * i + 1]);
        const float2 p1 = C::kRounded ? unpack<T>(P[2 * i + 1]) : make_float2(S[4 * i + 2], S[4 * i + 3]);
        dS[2 * i] = pack<T>(p0.x * (dP[4 * i] - l.x), p0.y * (dP[4 * i + 1] - (kQueries ? l.x : l.y)));
        dS[2 * i + 1] = pack<T>(p1.x * (dP[4 * i + 2] - (kQueries ? l.y : l.x)), p1.y * (dP[4 * i + 3] - l.y));
      }
      if constexpr (kQueries) release(second);
      if constexpr (kAdds) {
        if (C::kBuffers == 1) group_sync();  // everyone is done with the last dS
        const uint32_t to = s.scores + buffer * C::kScoreBytes + wg * (kMet * 128) +
                            ((lane >> 4) * 8 + (lane & 7)) * 128 + (((2 * warp + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
#pragma unroll
        for (int j = 0; j < kMet / 16; ++j)
          stmatrix_trans(to + j * 2048, dS[4 * j], dS[4 * j + 1], dS[4 * j + 2], dS[4 * j + 3]);
        fence_async_proxy();
        group_sync();
        issue_query_grads(0);
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kMet / 16; ++k)
        multiply_rows<T, kDim>(dK, dS + 4 * k, descriptor(base + first * kTile + kRing + k * 128, kMet * 128));
      wgmma_commit();
      advance();
      if constexpr (!kQueries) {
        wgmma_wait<1>();  // dV, and the first piece of dQ
        if constexpr (kAdds) pin_all(dQ);
        pin_all(P), pin_all(dV);
        release(second);
      }
      if constexpr (kAdds) add_query_grads(0, word);
      if constexpr (kAdds && C::kPieces == 2) {
        issue_query_grads(1);
        wgmma_wait<0>();
        pin_all(dQ), pin_all(dS), pin_all(dK);
        release(first);
        add_query_grads(1, word);
      } else {
        wgmma_wait<0>();
        pin_all(dS), pin_all(dK);
        release(first);
      }
      if (C::kBuffers == 2) buffer ^= 1;
    }

    // dK and dV over K and V.
    group_sync();  // everyone is done with those
    const uint32_t offset = wg * 8192 + (warp * 16 + (lane & 15)) * 128;
#pragma unroll
    for (int n = 0; n < kDim / 8; n += 2) {
      const uint32_t to = s.own + offset + (n / 8) * (kOwn * 128) + (((n % 8 + (lane >> 4)) ^ (lane & 7)) << 4);
      const float* k = dK + 4 * n;
      stmatrix(to, pack<T>(k[0] * a.scale, k[1] * a.scale), pack<T>(k[2] * a.scale, k[3] * a.scale),
               pack<T>(k[4] * a.scale, k[5] * a.scale), pack<T>(k[6] * a.scale, k[7] * a.scale));
      if constexpr (!kQueries) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = C::kDropout ? dV[4 * n + i] * a.dropout.scale : dV[4 * n + i];
        stmatrix(to + C::kOwnBytes, pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
      }
    }
    fence_async_proxy();
    bar_sync(8 + consumer, 128);
    if (leader) {
      for (int which = 0; which < (kQueries ? 1 : 2); ++which)
        for (int d = 0; d < kChunks; ++d)
          tma_store(&maps.grad[which], s.own + which * C::kOwnBytes + wg * 8192 + d * kOwn * 128, d * 64, t.x + wg * 64,
                    at.j, at.h, at.b);
      tma_store_commit();
      tma_store_wait_read();
      mbar_arrive(s.own_empty);
    }
  }
  if (lane == 0) tma_store_wait_all();
}

namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attention_backward_kernel(const __grid_constant__ BackwardMaps maps, const __grid_constant__ BackwardArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  run_groups<C, BackwardShared<C>>(
      shared, [](const auto& s) { mbar_init(s.own_full, 1), mbar_init(s.own_empty, C::kWarpgroups); },
      [&](const auto& s, int group, int consumer) { consume_backward<C>(a, maps, s, group, consumer); },
      [&](const auto& s) { produce_backward<C>(a, maps, s); });
}

}  // namespace
}  // namespace sbnet::sm90::attention

// The consumer warpgroups of the Hopper 3x3 convolution: main loop, partial sums, epilogue.
#pragma once
#include "cuda/sm90/conv3x3_tile.cuh"

namespace sbnet::sm90 {

// Named barriers: 0 is __syncthreads, 1-4 one warpgroup each, 5 and 6 whose turn it is.
constexpr int kBarWarpgroup = 1, kBarTurn = 5;

// `parts` CTAs of the cluster computed some taps each of one tile, and each finishes an equal share of its pixels: all
// send their sums to whose pixels they are, who adds them up, part 0 first. Pixels go by pairs of groups of 8; a pair
// of one part takes 8 KB, [group][thread] of 16 bytes in the order of the registers, and the eight that a CTA receives
// fill exactly its staging memory. The 256 threads of group 0 do this, once per launch at most. Kept small: what runs
// once per launch runs out of a cold instruction cache.
template <class C>
__device__ __forceinline__ void finish_shared(const Args& a, const Maps& maps, const float (&acc)[64], uint32_t smem,
                                              const typename C::Tile& tile, float bias0, float bias1, bool live) {
  using T = typename C::T;
  const int t = threadIdx.x, half = t >> 7, lane = t & 31, w4 = t >> 5 & 3, i8 = lane & 7, mat = lane >> 3;
  const int part = tile.part, pairs = 8 / tile.parts, rank0 = static_cast<int>(cluster_rank()) - part;
  cluster_wait();  // all CTAs have started; every thread arrived when it started itself
  const uint32_t slot = smem + part * pairs * 8192 + t * 16;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int owner = rank0 + j / pairs;
    const uint32_t to = map_to_rank(slot + j % pairs * 8192, owner), bar = map_to_rank(smem + C::kExchangeFull, owner);
    store_async(to, bar, acc[j * 8], acc[j * 8 + 1], acc[j * 8 + 2], acc[j * 8 + 3]);
    store_async(to + 4096, bar, acc[j * 8 + 4], acc[j * 8 + 5], acc[j * 8 + 6], acc[j * 8 + 7]);
  }
  if (t == 0) mbar_expect(smem + C::kExchangeFull, kConsumers * kStaging);
  mbar_wait(smem + C::kExchangeFull, 0);

  const uint32_t own = smem + part * pairs * 8192 + half * 2048;  // a pair that has been read makes room for its result
  for (int j = 0; j < pairs; ++j) {
    const int row = (part * pairs + j) * (C::kCells ? 1 : 2);
    float v[8] = {bias0, bias0, bias1, bias1, bias0, bias0, bias1, bias1};
    if (a.residual.data) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int4 at = tile.unit[C::kSquare ? 0 : C::kCells ? half * 2 + (e >> 2) : half];
        const int y = at.y + row + (C::kCells ? 0 : e >> 2), x = at.z + (C::kSquare ? half * 8 : 0) + (lane & 3) * 2 + (e & 1);
        const int k = tile.k0 + w4 * 16 + (lane >> 2) + (e & 2) * 4;
        if (at.x >= 0 && y < a.H && x < a.W && k < a.K)
          v[e] += unpack<T>(load_half(static_cast<const T*>(a.residual.data) + at.x * a.residual.n + y * a.residual.y +
                                      x * a.residual.x + k)).x;
      }
    }
    float sum[8] = {};
    for (int p = 0; p < tile.parts; ++p) {
      const uint32_t from = smem + (p * pairs + j) * 8192 + t * 16;
      const float4 b = load_shared(from), c = load_shared(from + 4096);
      sum[0] += b.x, sum[1] += b.y, sum[2] += b.z, sum[3] += b.w;
      sum[4] += c.x, sum[5] += c.y, sum[6] += c.z, sum[7] += c.w;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] += sum[e];
    if (is_clamp(a.activation)) activate<true>(a, v);
    else activate<false>(a, v);
    bar_sync(kBarWarpgroup + half, 128);
    stmatrix_trans(own + j * 8192 + (mat >> 1) * 1024 + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4),
                   pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
    fence_async_proxy();
    bar_sync(kBarWarpgroup + half, 128);
    if ((t & 127) == 0 && live) {
#pragma unroll
      for (int u = 0; u < C::kUnitsPerWarpgroup; ++u) {
        const int4 at = tile.unit[C::kSquare ? 0 : half * C::kUnitsPerWarpgroup + u];
        if (at.x >= 0)
          tma_store(&maps.y_pair, own + j * 8192 + u * 1024, tile.k0, at.z + (C::kSquare ? half * 8 : 0), at.y + row, at.x);
      }
    }
  }
  if ((t & 127) == 0) {  // the staging memory is free for whole tiles
    tma_store_commit();
    tma_store_wait_read();
    mbar_arrive(smem + C::kExchangeDone);
  }
}

// Warps 0-15. A warpgroup computes D[64 channels, pixels] += W[64 channels, 64 c of a tap] * X[pixels, 64 c]^T for
// its 128 pixels. All nine taps read one haloed patch in place: tap (r, s) only moves the descriptor.
template <class C>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, const typename C::Tile* tiles) {
  using T = typename C::T;
  const int tid = threadIdx.x & 127, lane = tid & 31, w4 = __shfl_sync(0xffffffff, tid >> 5, 0);
  const int wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0), group = wg / C::kGroup, half = wg % C::kGroup;
  const bool leader = tid == 0, has_residual = a.residual.data != nullptr;
  const uint32_t staging = smem + wg * kStaging, residual_full = smem + C::kResidualFull + 8 * wg;
  const uint32_t weights = wgmma_operand(smem + C::kWeightsAt);
  const uint32_t pixels = wgmma_operand(smem + C::kPatchesAt + half * C::kHalf);
  // Staging holds [pixel][64 channels], 128-byte swizzle; pixels of a unit lie together. stmatrix writes two groups of
  // 8 pixels x 16 channels at once: this lane's row address.
  const int i8 = lane & 7, mat = lane >> 3;
  const uint32_t lane_row =
      staging + (mat >> 1) * (C::kCells ? 8192 : 1024) + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4);
  int residual_phase = 0;

  // Two groups take turns (ping-pong): one's epilogue runs under the other's main loop. A group may start issuing a
  // tile only when the other has issued all of the previous one: a group that is away in its epilogue could miss a
  // whole turn of the rings, and the parities of their barriers would alias.
  if (!C::kResident && group == 1) bar_arrive(kBarTurn, 512);
  grid_dependency_wait();
  for (int i = group;; i += C::kGroups) {
    const int slot = i % C::kTileSlots;
    mbar_wait(smem + C::kTileFull + 8 * slot, (i / C::kTileSlots) & 1);
    const typename C::Tile& tile = tiles[slot];
    const int v0 = tile.v0, v1 = tile.v1, k0 = tile.k0, parts = C::kResident ? 1 : tile.parts;
    if (v1 == 0) break;
    const int4 at = tile.unit[C::kSquare ? 0 : half * C::kUnitsPerWarpgroup];
    bool live = at.x >= 0 && at.z + (C::kSquare ? half * 8 : 0) < a.W;
    if (C::kCells) live = live || tile.unit[half * 2 + 1].x >= 0;
    const int channel = k0 + w4 * 16 + (lane >> 2);
    const float bias0 = load_bias<T>(a, channel), bias1 = load_bias<T>(a, channel + 8);
    auto for_each_unit = [&](auto&& f) {
#pragma unroll
      for (int u = 0; u < C::kUnitsPerWarpgroup; ++u) {
        const int4 p = tile.unit[C::kSquare ? 0 : half * C::kUnitsPerWarpgroup + u];
        f(staging + u * 8192, p.z + (C::kSquare ? half * 8 : 0), p.y, p.x);
      }
    };
    // The leader makes sure that the staging memory is free and fetches the residual into it, under the main loop.
    auto prepare_staging = [&] {
      tma_store_wait_read();
      if (!C::kResident && tile.guard) mbar_wait(smem + C::kExchangeDone, 0);
      if (!has_residual) return;
      mbar_expect(residual_full, kStaging);
      for_each_unit([&](uint32_t to, int x, int y, int n) { tma_load(to, &maps.residual, residual_full, k0, x, y, n); });
    };
    const int prepare_at = parts > 1 ? -1 : tile.guard ? v1 - 1 : min(v0 + 2, v1 - 1);

    float acc[64];  // the first tap overwrites it
    int slice = tile.slice, weight = C::kResident ? 0 : tile.tap % C::kWeightStages;
    int weight_phase = C::kResident ? 0 : tile.tap / C::kWeightStages & 1;
    auto main_loop = [&](auto width) {  // width 0: nothing to compute, but the rings turn on
      constexpr int kWidth = decltype(width)::value;
      int q = v0 % 9, shift = (q / 3 * C::kRowPitch + q % 3) * 8;
      bool new_slice = true;
#pragma unroll 1
      for (int v = v0; v < v1; ++v) {
        if (new_slice) mbar_wait(smem + C::kPatchFull + 8 * (slice % C::kPatchStages), slice / C::kPatchStages & 1);
        mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
        if constexpr (kWidth > 0) {
          const uint32_t dw = weights + weight * (kTap >> 4);
          const uint32_t dp = pixels + slice % C::kPatchStages * (C::kPatchPitch >> 4) + shift;
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < C::kSteps; ++k)
            wgmma<T, kWidth>(acc, wgmma_layout(1024) | (dw + k * 2), wgmma_layout(C::kGroupStride) | (dp + k * 2),
                             (v - v0) | k);
          wgmma_commit();
          wgmma_wait<1>();
        }
        if (lane == 0 && v > v0) {  // the previous tap has been read
          if (!C::kResident) mbar_arrive(smem + C::kWeightEmpty + 8 * (weight ? weight - 1 : C::kWeightStages - 1));
          if (new_slice) mbar_arrive(smem + C::kPatchEmpty + 8 * ((slice - 1) % C::kPatchStages));
        }
        if (leader && v == prepare_at) prepare_staging();
        if (v + 1 == v1) break;
        if (++weight == C::kWeightStages) weight = 0, weight_phase ^= 1;
        new_slice = ++q == 9;
        shift += q == 3 || q == 6 ? (C::kRowPitch - 2) * 8 : 8;
        if (new_slice) q = 0, shift = 0, ++slice;
      }
    };
    if (!C::kResident) bar_sync(kBarTurn + group, 512);
    if (threadIdx.x == 0 && i == 0) SBNET_STAMP(4);
    if (!live) main_loop(std::integral_constant<int, 0>());
    else if (!C::kCells && a.H - at.y <= 8) main_loop(std::integral_constant<int, 64>());
    else main_loop(std::integral_constant<int, 128>());
    if (!C::kResident) bar_arrive(kBarTurn + 1 - group, 512);
    wgmma_wait<0>();
    if (threadIdx.x == 0 && i == 0) SBNET_STAMP(5);
    if (lane == 0) {
      if (!C::kResident) mbar_arrive(smem + C::kWeightEmpty + 8 * weight);
      mbar_arrive(smem + C::kPatchEmpty + 8 * (slice % C::kPatchStages));
    }

    if (!C::kResident && parts > 1) {
      finish_shared<C>(a, maps, acc, smem, tile, bias0, bias1, live);
    } else {
      if (has_residual) mbar_wait(residual_full, residual_phase), residual_phase ^= 1;
      else bar_sync(kBarWarpgroup + wg, 128);
      auto epilogue = [&](auto clamp) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t row = lane_row + j * (C::kCells ? 1024 : 2048);
          float v[8];
#pragma unroll
          for (int e = 0; e < 8; ++e) v[e] = acc[j * 8 + e] + (e & 2 ? bias1 : bias0);
          if (has_residual) {
            uint32_t r[4];
            ldmatrix_trans(row, r);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float2 f = unpack<T>(r[e]);
              v[2 * e] += f.x, v[2 * e + 1] += f.y;
            }
          }
          activate<decltype(clamp)::value>(a, v);
          stmatrix_trans(row, pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
        }
      };
      if (is_clamp(a.activation)) epilogue(std::true_type());
      else epilogue(std::false_type());
      if (threadIdx.x == 0 && i == 0) SBNET_STAMP(7);
      fence_async_proxy();
      bar_sync(kBarWarpgroup + wg, 128);
      if (leader && live) {
        for_each_unit([&](uint32_t from, int x, int y, int n) {
          if (n >= 0) tma_store(&maps.y, from, k0, x, y, n);
        });
        tma_store_commit();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + C::kTileEmpty + 8 * slot);
  }
  if (threadIdx.x == 0) SBNET_STAMP(11);
  if (leader) tma_store_wait_read();
  if (threadIdx.x == 0) SBNET_STAMP(12);
}

}  // namespace sbnet::sm90

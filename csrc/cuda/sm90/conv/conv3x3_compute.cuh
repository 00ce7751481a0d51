// The consumer warpgroups of the Hopper 3x3 convolution: main loop, partial sums, epilogue.
#pragma once
#include "cuda/sm90/conv/conv3x3_load.cuh"

namespace sbnet::sm90 {

// Named barriers: 0 is __syncthreads, 1-4 one warpgroup each, 5 and 6 whose turn it is, 7 all warpgroups, 8 the head
// start.
constexpr int kBarWarpgroup = 1, kBarTurn = 5, kBarAll = 7, kBarHeadStart = 8;

// In a shared tile that nothing follows, the warpgroup that sends its sums away is so many taps ahead of the one that
// waits for the other CTA's: 32 KB travel for 1,700 cycles, under the main loop of the latter.
constexpr int kHeadStart = 5;

// The two CTAs of a cluster computed half of the taps each of the same pixels. Warpgroup h of the pair belongs to CTA h
// in the end: the other CTA sends it its sums (`groups` groups of 8 pixels), into the staging memory of warpgroups 2
// and 3, which have not used theirs yet. Once per launch at most.
template <class C>
__device__ __forceinline__ void send_sums(const float (&acc)[64], uint32_t smem, int groups) {
  const uint32_t peer = cluster_rank() ^ 1;
  cluster_wait();  // the peer has started; every thread arrived when it started itself
  const uint32_t to = map_to_rank(smem + 2 * kStaging + (threadIdx.x & 127) * 16, peer);
  const uint32_t bar = map_to_rank(smem + C::kExchangeFull, peer);
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (g == 8 && groups == 8) break;
    store_async(to + g * 2048, bar, acc[g * 4], acc[g * 4 + 1], acc[g * 4 + 2], acc[g * 4 + 3]);
  }
}
template <class C>
__device__ __forceinline__ void receive_sums(float (&acc)[64], uint32_t smem, int groups) {
  const uint32_t from = smem + 2 * kStaging + (threadIdx.x & 127) * 16;
  if ((threadIdx.x & 127) == 0) mbar_expect(smem + C::kExchangeFull, groups * 2048);
  mbar_wait(smem + C::kExchangeFull, 0);
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (g == 8 && groups == 8) break;
    const float4 v = load_shared(from + g * 2048);
    acc[g * 4] += v.x, acc[g * 4 + 1] += v.y, acc[g * 4 + 2] += v.z, acc[g * 4 + 3] += v.w;
  }
}

// Warps 0-15. A warpgroup computes D[64 channels, pixels] += W[64 channels, 64 c of a tap] * X[pixels, 64 c]^T for
// its 128 pixels. All nine taps read one haloed patch in place: tap (r, s) only moves the descriptor.
template <class C>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, uint8_t* shared,
                        const typename C::Tile* tiles) {
  using T = typename C::T;
  const int tid = threadIdx.x & 127, lane = tid & 31, w4 = __shfl_sync(0xffffffff, tid >> 5, 0);
  const int wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0), group = wg / C::kGroup, half = wg % C::kGroup;
  const bool leader = tid == 0, has_residual = a.residual.data != nullptr;
  const uint32_t staging = smem + wg * kStaging, residual_full = smem + C::kResidualFull + 8 * wg;
  const uint32_t weights = wgmma_operand(smem + C::kWeightsAt);
  const uint32_t patches = wgmma_operand(smem + C::kPatchesAt);
  // Staging holds [pixel][64 channels], 128-byte swizzle; pixels of a unit lie together. stmatrix writes two groups of
  // 8 pixels x 16 channels at once: this lane's row address.
  const int i8 = lane & 7, mat = lane >> 3;
  const uint32_t lane_row =
      staging + (mat >> 1) * (C::kCells ? 8192 : 1024) + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4);
  int residual_phase = 0;

  // Two groups take turns (ping-pong): one's epilogue runs under the other's main loop. A group may start issuing a
  // tile only when the other has issued all of the previous one: a group that is away in its epilogue could miss a
  // whole turn of the rings, and the parities of their barriers would alias.
  if (C::kTurns && group == 1) bar_arrive(kBarTurn, 512);
  await_settled(a);
  if (C::kResident && a.weight) {
#pragma unroll
    for (int i = threadIdx.x; i < 9 * 64 * 8; i += kConsumers * 128) {
      const int word = i % 8, row = i / 8 % 64, q = i / (64 * 8);
      const bool there = row < a.K && word < a.C / 8;
      const uint4* from = a.weight + (row * 9 + C::kernel_tap(q)) * (a.C / 8) + word;
      put_weights(shared + C::kWeightsAt + q * C::kTap, row, word, there ? *from : make_uint4(0, 0, 0, 0));
    }
    fence_async_proxy();
    bar_sync(kBarAll, kConsumers * 128);
  }
  grid_dependency_wait();
  for (int i = group;; i += C::kGroups) {
    const int slot = i % C::kTileSlots;
    mbar_wait(smem + C::kTileFull + 8 * slot, (i / C::kTileSlots) & 1);
    const typename C::Tile& tile = tiles[slot];
    const int v0 = tile.v0, v1 = tile.v1, k0 = tile.k0;
    if (v1 == 0) break;
    // Whole and shared tiles: a half (a strip, a pair of cells) per warpgroup. Narrow ones: half of a half each.
    const Work work = C::kResident ? Work::kWhole : tile.work;
    const bool narrow = work == Work::kNarrow;
    const int side = narrow ? tile.side : half, row0 = narrow ? half * (C::kCells ? 4 : 8) : 0;
    const int4 at = tile.unit[C::kSquare ? 0 : side * C::kUnitsPerWarpgroup];
    bool live = at.x >= 0 && at.z + (C::kSquare ? side * 8 : 0) < a.W && at.y + row0 < a.H;
    if (C::kCells) live = live || tile.unit[side * 2 + 1].x >= 0;
    const bool owner = work == Work::kWhole || half == static_cast<int>(cluster_rank() & 1), finish = live && owner;
    const int channel = k0 + w4 * 16 + (lane >> 2);
    const float bias0 = load_bias<T>(a, channel), bias1 = load_bias<T>(a, channel + 8);
    auto for_each_box = [&](auto&& f) {  // staging address, x, y, n; narrow tiles: a pair of groups of 8 pixels each
#pragma unroll
      for (int u = 0; u < C::kUnitsPerWarpgroup; ++u) {
        const int4 p = tile.unit[C::kSquare ? 0 : side * C::kUnitsPerWarpgroup + u];
        const int x = p.z + (C::kSquare ? side * 8 : 0);
        f(staging + u * 8192, x, p.y + row0, p.x);
        if (!C::kResident && narrow)
          for (int j = 1; j < 4; ++j)
            f(staging + u * 8192 + j * (C::kCells ? 1024 : 2048), x, p.y + row0 + j * (C::kCells ? 1 : 2), p.x);
      }
    };
    // The leader makes sure that the staging memory is free and fetches the residual into it, under the main loop.
    auto prepare_staging = [&] {
      tma_store_wait_read();
      if (!C::kResident && tile.guard) mbar_wait(smem + C::kExchangeDone, 0);
      if (!has_residual || !finish) return;
      mbar_expect(residual_full, narrow ? kStaging / 2 : kStaging);
      const CUtensorMap* map = narrow ? &maps.residual_pair : &maps.residual;
      for_each_box([&](uint32_t to, int x, int y, int n) { tma_load(to, map, residual_full, k0, x, y, n); });
    };
    const int head_start = tile.alone && !owner ? min(v0 + kHeadStart, v1) - 1 : -1;
    const int prepare_at = tile.guard ? v1 - 1 : min(v0 + 2, v1 - 1);
    const uint32_t pixels = patches + ((side * C::kHalf + (narrow ? half * 8 * C::kGroupStride : 0)) >> 4);

    float acc[64];  // the first tap overwrites it
    uint32_t stage = tile.slice % C::kPatchStages, phase = tile.slice / C::kPatchStages & 1;
    uint32_t weight = C::kResident ? 0 : tile.tap % C::kWeightStages;
    uint32_t weight_phase = C::kResident ? 0 : tile.tap / C::kWeightStages & 1;
    uint32_t read_weight = 0,
             read_patch = 0;  // barriers of the stages that the tap before the last one issued has read
    auto release = [&] {
      if (lane != 0) return;
      if (!C::kResident && read_weight) {
        mbar_arrive(read_weight);
      }
      if (read_patch) mbar_arrive(read_patch);
    };
    auto main_loop = [&](auto width) {  // width 0: nothing to compute, but the rings turn on
      constexpr int kWidth = decltype(width)::value;
      const bool await_weights =
          !C::kResident || (i == group && !a.weight);  // resident weights: with the first tile only
      uint32_t q = v0 % 9u;
      mbar_wait(smem + C::kPatchFull + 8 * stage, phase);
      if (await_weights) mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
#pragma unroll 1
      for (int v = v0;;) {
        if constexpr (kWidth > 0) {
          // the tap lies so many pixels of 128 bytes into the patch
          const uint32_t shift = C::kStride == 1 ? q + (q * 11 >> 5) * (C::kRowPitch - 3)
                                                 : (kRightTaps >> q & 1) + (kLowerTaps >> q & 1) * C::kRowPitch;
          const uint32_t dw = weights + weight * (C::kTap >> 4);
          const uint32_t dp = pixels + stage * (C::kPatchPitch >> 4) + shift * 8;
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < C::kSteps; ++k)
            wgmma<T, kWidth>(acc, wgmma_layout(1024) | (dw + k * 2), wgmma_layout(C::kGroupStride) | (dp + k * 2),
                             (v - v0) | k);
          wgmma_commit();
        }
        if (leader && v == prepare_at) prepare_staging();
        if (!C::kResident && v == head_start) bar_arrive(kBarHeadStart, 256);
        // Ask whether the next weights have come while this tap computes, but wait for them only when the previous
        // tap's memory has been given back.
        const uint32_t weight_now = smem + C::kWeightEmpty + 8 * weight;
        const bool more = ++v < v1;
        if (++weight == C::kWeightStages) weight = 0, weight_phase ^= 1;
        const bool ready = !await_weights || mbar_test(smem + C::kWeightFull + 8 * weight, weight_phase);
        if constexpr (kWidth > 0)
          wgmma_wait<1>();
        else
          __syncwarp();  // no lane may miss a turn of the rings, as nothing else keeps them together
        release();
        read_weight = weight_now;
        const bool last = C::kStride == 1 ? q == 8 : kLastTaps >> q & 1;
        read_patch = last || !more ? smem + C::kPatchEmpty + 8 * stage : 0;
        if (!more) break;
        if (++q == 9) q = 0;
        if (last) {
          if (++stage == C::kPatchStages) stage = 0, phase ^= 1;
          mbar_wait(smem + C::kPatchFull + 8 * stage, phase);
        }
        if (!ready) mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
      }
    };
    if (C::kTurns) bar_sync(kBarTurn + group, 512);
    if (!C::kResident && tile.alone && owner) bar_sync(kBarHeadStart, 256);
    if (!live)
      main_loop(std::integral_constant<int, 0>());
    else if (narrow || (!C::kCells && a.H - at.y <= 8))
      main_loop(std::integral_constant<int, 64>());
    else
      main_loop(std::integral_constant<int, 128>());
    if (C::kTurns) bar_arrive(kBarTurn + 1 - group, 512);
    wgmma_wait<0>();
    release();

    if (!C::kResident && work != Work::kWhole) {
      if (live && owner)
        receive_sums<C>(acc, smem, narrow ? 8 : 16);
      else if (live)
        send_sums<C>(acc, smem, narrow ? 8 : 16);
      __syncwarp();
      if (owner && lane == 0) mbar_arrive(smem + C::kExchangeDone);
    }
    if (finish) {
      if (has_residual)
        mbar_wait(residual_full, residual_phase), residual_phase ^= 1;
      else
        bar_sync(kBarWarpgroup + wg, 128);
      finish_tile<T>(a, acc, bias0, bias1, lane_row, C::kCells ? 1024 : 2048, RowSlopes<T>{a, channel});
      fence_async_proxy();
      bar_sync(kBarWarpgroup + wg, 128);
      if (leader) {
        const CUtensorMap* map = narrow ? &maps.y_pair : &maps.y;
        for_each_box([&](uint32_t from, int x, int y, int n) {
          if (n >= 0) tma_store(map, from, k0, x, y, n);
        });
        tma_store_commit();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + C::kTileEmpty + 8 * slot);
  }
  if (leader) tma_store_wait_read();
}

}  // namespace sbnet::sm90

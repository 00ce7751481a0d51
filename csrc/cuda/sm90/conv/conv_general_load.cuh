// The general Hopper convolution: the producer warps.
#pragma once
#include "cuda/mma.cuh"
#include "cuda/sm90/conv/conv_general_plan.cuh"

namespace sbnet::sm90::general {

// How operands come: by TMA, or in copies of so many bytes, or through registers where none is wide enough.
constexpr int kTma = 0, kElements = 2;
template <class F>
__device__ __forceinline__ void for_width(int width, F&& run) {
  if (width == kTma)
    run(std::integral_constant<int, kTma>());
  else if (width == 16)
    run(std::integral_constant<int, 16>());
  else if (width == 8)
    run(std::integral_constant<int, 8>());
  else if (width == 4)
    run(std::integral_constant<int, 4>());
  else
    run(std::integral_constant<int, kElements>());
}

// kN words of 16 bytes into shared memory, `valid` bytes of each from memory and the rest zero; `to` 0: no word.
template <int kWidth, int kN>
__device__ __forceinline__ void copy_words(uint32_t smem, uint8_t* shared, const uint32_t (&to)[kN],
                                           const char* const (&from)[kN], const int (&valid)[kN]) {
  if constexpr (kWidth > kElements) {
#pragma unroll
    for (int i = 0; i < kN; ++i)
#pragma unroll
      for (int at = 0; at < 16; at += kWidth)
        if (to[i]) cp_async<kWidth>(smem + to[i] + at, from[i] + at, min(max(valid[i] - at, 0), kWidth));
  } else {
    uint32_t v[kN][4] = {};  // all on their way before the first is stored
#pragma unroll
    for (int e = 0; e < 8; ++e)
#pragma unroll
      for (int i = 0; i < kN; ++i)
        if (e * 2 < valid[i]) v[i][e / 2] |= load_half(from[i] + e * 2) << e % 2 * 16;
#pragma unroll
    for (int i = 0; i < kN; ++i)
      if (to[i]) *reinterpret_cast<uint4*>(shared + to[i]) = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
  }
}
// The stage whose barrier this is has all that this thread gave to it.
template <class C, int kWidth>
__device__ __forceinline__ void arrive(uint32_t bar) {
  if constexpr (kWidth > kElements && !C::kFloats)
    cp_async_arrive(bar);
  else
    mbar_arrive(bar);
}
// Words of a pixel, or an output channel, that `steps` products of 16 channels read: their binary logarithm.
__device__ __forceinline__ int log_words(int steps) { return steps > 2 ? 3 : steps; }

// Warp 8: patches, one group of taps of 64 channels after the other, zeros outside of the plane. Position p of a patch
// has 128 bytes at p * 128, its 16-byte words swizzled as WGMMA expects.
template <class C, int kWidth>
__device__ void produce_patches(const Args& a, const CUtensorMap* map, uint32_t smem, uint8_t* shared, int lane) {
  grid_dependency_wait();
  const int count = count_of<C>(a);
  const uint32_t tiles = tiles_of(a, count);
  const int patches_at = C::kWeightsAt + a.weight_stages * C::kTap;
  const bool pairs = a.shape == Shape::kCells;
  int stage = 0;
  uint32_t phase = 1;
  for (uint32_t base = 0, made = 0; base < tiles; base += gridDim.x, ++made) {
    const TileShare at(a, base, tiles);
    if (at.tile >= tiles) break;
    const Column column(a, at.column);
    int4* units = reinterpret_cast<int4*>(shared + C::kRecordsAt) + made % kMaxPatchStages * kMaxUnits;
    int4 unit = {};
    if (lane < a.units) unit = locate(a, at.first_unit * a.units + lane, count);
    const int2 slices = at.of(slices_of<C>(a, at.column));
    for (int slice = slices.x; slice < slices.y; ++slice) {
      const Slice own = slice_of<C>(a, slice);
      for (int g = 0; g < a.groups; ++g) {
        const Group group = a.group[g];
        const uint32_t full = smem + C::kPatchFull + 8 * stage, patch = patches_at + stage * a.patch_bytes;
        mbar_wait(smem + C::kPatchEmpty + 8 * stage, phase);
        // The consumers read the record that was here before they gave this stage back.
        if (slice - slices.x + g == 0) {
          if (lane < a.units) units[lane] = unit;
          __syncwarp();
        }
        if (C::kListed && lane == 0)  // who arrives
          reinterpret_cast<int*>(shared + C::kStepsAt)[stage] = own.steps | (slice + 1 < slices.y ? 0 : kLastSlice);
        if constexpr (kWidth == kTma) {
          if (lane == 0) mbar_expect(full, a.positions * 128);
          __syncwarp();
          const int channel = (column.first_input + own.channel) / C::kHalves;
          if (pairs) {  // TMA cannot leave gaps between rows: a box a row
            for (int i = lane; i < a.patch_h * a.units; i += 32) {
              const int row = i / a.units, u = i % a.units;
              const int4 of = units[u];
              tma_load(smem + patch + ((u >> 1) * a.second + (row * 2 + (u & 1)) * a.patch_w) * 128, map, full, channel,
                       of.z + group.x, of.y + group.y + row, of.x);
            }
          } else if (lane < a.units) {
            tma_load(smem + patch + lane * a.second * 128, map, full, channel, unit.z + group.x, unit.y + group.y,
                     unit.x);
          }
        } else {
          constexpr int kN = 4;  // words at a time
          const int log = log_words(own.steps), word = lane & ((1 << log) - 1);
          const int channel = own.channel + word * 8, there = min(max((column.inputs - channel) * 2, 0), 16);
          const char* x = a.x + (column.first_input + channel) * 2;
          if (lane == 0) mbar_arrive(full);  // for the record: copies vouch for themselves alone
#pragma unroll 1
          for (int first = lane >> log; first < a.positions; first += kN * (32 >> log)) {
            uint32_t to[kN];
            const char* from[kN];
            int valid[kN];
#pragma unroll
            for (int i = 0; i < kN; ++i) {
              const int position = first + i * (32 >> log);
              uint32_t row, at, high;
              a.pitch.divmod(position, &row, &at);
              a.patch_rows.divmod(row, &high, &row);
              const bool odd = pairs && static_cast<int>(at) >= a.patch_w;
              const int4 of = units[min(static_cast<int>(pairs ? high * 2 + odd : high), kMaxUnits - 1)];
              const int y = (of.y + static_cast<int>(row)) * a.stride[0] + group.y;
              const int x_at = (of.z + static_cast<int>(odd ? at - a.patch_w : at)) * a.stride[1] + group.x;
              const bool in = position < a.positions && of.w &&
                              static_cast<uint32_t>(y) < static_cast<uint32_t>(a.x_h) &&
                              static_cast<uint32_t>(x_at) < static_cast<uint32_t>(a.x_w);
              to[i] = position < a.positions ? patch + position * 128 + (((word ^ position) & 7) << 4) : 0;
              from[i] =
                  in ? x + of.x * a.x_n + static_cast<int64_t>(y) * a.x_y + static_cast<int64_t>(x_at) * a.x_x : a.x;
              valid[i] = in ? there : 0;
            }
            copy_words<kWidth>(smem, shared, to, from, valid);
          }
          arrive<C, kWidth>(full);
        }
        if (++stage == a.patch_stages) stage = 0, phase ^= 1;
      }
    }
  }
}

// Warp 9: weights, tap by tap of 64 input channels: a row of 128 bytes for each output channel of the tile.
template <class C, int kWidth>
__device__ void produce_weights(const Args& a, const CUtensorMap* map, uint32_t smem, uint8_t* shared, int lane) {
  grid_dependency_wait();
  if (kWidth == kTma && lane != 0) return;
  const uint32_t tiles = tiles_of(a, count_of<C>(a));
  const int taps = a.group[a.groups - 1].end;
  int stage = 0;
  uint32_t phase = 1;
  for (uint32_t base = 0; base < tiles; base += gridDim.x) {
    const TileShare at(a, base, tiles);
    if (at.tile >= tiles) break;
    const Column column(a, at.column);
    const int k0 = column.chunk_k + column.k * C::kOutputs;
    const int2 slices = at.of(slices_of<C>(a, at.column));
    for (int slice = slices.x; slice < slices.y; ++slice) {
      for (int t = 0; t < taps; ++t) {
        const uint32_t full = smem + C::kWeightFull + 8 * stage, slab = C::kWeightsAt + stage * C::kTap;
        mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);
        if constexpr (kWidth == kTma) {
          mbar_expect(full, C::kTap);
          if constexpr (C::kListed)
            tma_load(smem + slab, map, full, 0, (slice * taps + a.tap[t].weight) * C::kOutputs);
          else
            tma_load(smem + slab, map, full, slice * 64 / C::kHalves, a.tap[t].weight, k0);
        } else if (a.merged > 1) {
          // An output channel has weights for its own group's inputs alone, in the same place in every tile: the rest
          // of its row has been zero since zero_weights().
          const int bytes = static_cast<int>(a.group_inputs.divisor) * 2;  // whole copies
#pragma unroll 1
          for (int n = lane; n < C::kOutputs && k0 + n < column.k_end; n += 32) {
            const char* from = a.w + a.tap[t].weight + (k0 + n) * a.w_k;
            const int own = static_cast<int>(a.group_outputs.quotient(n)) * bytes;
#pragma unroll 1
            for (int e = 0; e < bytes; e += C::kFloats ? 4 : kWidth) {
              const uint32_t at = slab + n * 128 + ((((own + e) >> 4 ^ n) & 7) << 4) + ((own + e) & 15);
              if constexpr (C::kFloats)
                *reinterpret_cast<uint32_t*>(shared + at) = round_to_tf32(__float_as_int(load_float(from + e)));
              else if constexpr (kWidth > kElements)
                cp_async<kWidth>(smem + at, from + e, kWidth);
              else
                *reinterpret_cast<uint16_t*>(shared + at) = load_half(from + e);
            }
          }
          arrive<C, kWidth>(full);
        } else {
          constexpr int kN = 4;
          const int log = log_words(slice + 1 < a.slices ? 4 : a.last_steps), word = lane & ((1 << log) - 1);
          const int channel = slice * 64 + word * 8, there = min(max((column.inputs - channel) * 2, 0), 16);
          const char* w = a.w + a.tap[t].weight;
#pragma unroll 1
          for (int first = lane >> log; first < C::kOutputs; first += kN * (32 >> log)) {
            uint32_t to[kN];
            const char* from[kN];
            int valid[kN];
#pragma unroll
            for (int i = 0; i < kN; ++i) {
              const int n = first + i * (32 >> log);
              const bool in = n < C::kOutputs && k0 + n < column.k_end;
              to[i] = n < C::kOutputs ? slab + n * 128 + (((word ^ n) & 7) << 4) : 0;
              from[i] = in ? w + channel * 2 + (k0 + n) * a.w_k : a.w;
              valid[i] = in ? there : 0;
            }
            copy_words<kWidth>(smem, shared, to, from, valid);
          }
          arrive<C, kWidth>(full);
        }
        if (++stage == a.weight_stages) stage = 0, phase ^= 1;
      }
    }
  }
}

// All threads, before any weights: block-diagonal ones are zero where groups meet, in the same places in every tile.
template <class C>
__device__ __forceinline__ void zero_weights(const Args& a, uint8_t* shared) {
  for (int at = threadIdx.x * 16; at < a.weight_stages * C::kTap; at += kThreads * 16)
    *reinterpret_cast<uint4*>(shared + C::kWeightsAt + at) = make_uint4(0, 0, 0, 0);
}

// What the kernel's warps do: 0-7 consume(start of shared memory), 8 and 9 load.
template <class C, class Consume>
__device__ __forceinline__ void run_roles(const Maps& maps, const Args& a, uint8_t* shared, const Consume& consume) {
  const uint32_t smem = smem_address(shared);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxPatchStages; ++i)
      mbar_init(smem + C::kPatchFull + 8 * i, a.x_word ? 33 : 1), mbar_init(smem + C::kPatchEmpty + 8 * i, 8);
    for (int i = 0; i < kMaxWeightStages; ++i)
      mbar_init(smem + C::kWeightFull + 8 * i, a.w_word ? 32 : 1), mbar_init(smem + C::kWeightEmpty + 8 * i, 8);
    mbar_init(smem + C::kSumsReady, 2 << a.log_cluster), mbar_init(smem + C::kSumsFull, 1);
    fence_mbar_init();
  }
  if constexpr (!C::kListed) {
    if (a.merged > 1) zero_weights<C>(a, shared);
  }
  __syncthreads();
  if (a.log_cluster) cluster_arrive();
  // Every role calls grid_dependency_wait() before it touches global memory: so every CTA has waited when it exits.
  if (warp < 8)
    consume(smem);
  else if (warp == 8)
    for_width(a.x_word, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      if constexpr (C::kFloats ? kWidth == kTma : !C::kListed || kWidth == kTma || kWidth == 16)
        produce_patches<C, kWidth>(a, &maps.x, smem, shared, lane);
    });
  else if constexpr (C::kListed)
    produce_weights<C, kTma>(a, &maps.w, smem, shared, lane);
  else
    for_width(a.w_word, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      if constexpr (!C::kFloats || kWidth == kTma || kWidth == 16)
        produce_weights<C, kWidth>(a, &maps.w, smem, shared, lane);
    });
}

}  // namespace sbnet::sm90::general

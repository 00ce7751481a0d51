// The general Hopper convolution: the producer warps.
#pragma once
#include "cuda/sm90/conv/conv_general_plan.cuh"

namespace sbnet::sm90::general {

// A word of 16 bytes into shared memory, the first `valid` from memory and the rest zero, in copies of kUnit bytes.
template <int kUnit>
__device__ __forceinline__ void copy_word(uint8_t* shared, uint32_t to, const char* from, int valid) {
  if constexpr (kUnit > 2) {
#pragma unroll
    for (int at = 0; at < 16; at += kUnit) cp_async<kUnit>(to + at, from + at, min(max(valid - at, 0), kUnit));
  } else {
    uint32_t v[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (e * 2 < valid) v[e / 2] |= load_half(from + e * 2) << e % 2 * 16;
    *reinterpret_cast<uint4*>(shared) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
// The stage whose barrier this is has all that this thread gave to it.
template <int kUnit>
__device__ __forceinline__ void arrive(uint32_t bar) {
  if constexpr (kUnit > 2)
    cp_async_arrive(bar);
  else
    mbar_arrive(bar);
}
template <class F>
__device__ __forceinline__ void for_unit(int bytes, F&& run) {
  if (bytes == 16)
    run(std::integral_constant<int, 16>());
  else if (bytes == 8)
    run(std::integral_constant<int, 8>());
  else if (bytes == 4)
    run(std::integral_constant<int, 4>());
  else
    run(std::integral_constant<int, 2>());
}
// Words of a pixel, or an output channel, that `steps` products of 16 channels read: their binary logarithm.
__device__ __forceinline__ int log_words(int steps) { return steps > 2 ? 3 : steps; }

// Warp 8: patches, one group of taps of 64 channels after the other, zeros outside of the plane. Position p of a patch
// has 128 bytes at p * 128, its 16-byte words swizzled as WGMMA expects.
template <class C, int kUnit>
__device__ void produce_patches(const Args& a, uint32_t smem, uint8_t* shared, int lane) {
  grid_dependency_wait();
  const int count = min(max(load_int(a.count), 0), a.capacity);
  const uint32_t tiles = tiles_of(a, count);
  const int patches_at = C::kWeightsAt + a.weight_stages * C::kTap;
  int stage = 0;
  uint32_t phase = 1;
  for (uint32_t tile = blockIdx.x, made = 0; tile < tiles; tile += gridDim.x, ++made) {
    uint32_t first_unit, column_index;
    a.columns.divmod(tile, &first_unit, &column_index);
    const Column column(a, column_index);
    int4* units = reinterpret_cast<int4*>(shared + C::kRecordsAt) + made % kMaxPatchStages * kMaxUnits;
    int4 unit = {};
    if (lane < a.units) unit = locate(a, first_unit * a.units + lane, count);
    for (int slice = 0; slice < a.slices; ++slice) {
      const int log = log_words(slice + 1 < a.slices ? 4 : a.last_steps), word = lane & ((1 << log) - 1);
      const int channel = slice * 64 + word * 8, valid = min(max((column.inputs - channel) * 2, 0), 16);
      const int first = lane >> log, step = 32 >> log;
      const char* x = a.x + (column.first_input + channel) * 2;
      for (int g = 0; g < a.groups; ++g) {
        const Group group = a.group[g];
        const uint32_t full = smem + C::kPatchFull + 8 * stage, patch = patches_at + stage * a.patch_bytes;
        mbar_wait(smem + C::kPatchEmpty + 8 * stage, phase);
        if (slice + g == 0) {  // the consumers read the record that was here before they gave this stage back
          if (lane < a.units) units[lane] = unit;
          __syncwarp();
        }
        if (lane == 0) mbar_arrive(full);  // for the record: copies vouch for themselves alone
        for (int u = 0; u < a.units; ++u) {
          const int4 of = units[u];
          const int y0 = of.y * a.stride[0] + group.y, x0 = of.z * a.stride[1] + group.x;
          uint32_t row = a.shape == Shape::kCells ? (u >> 1) * a.second + (u & 1) * a.patch_w : u * a.second;
#pragma unroll 1
          for (int i = 0; i < a.patch_h; ++i, row += a.pitch.divisor) {
            const int y = y0 + i * a.stride[0];
            const bool in_row = of.w && static_cast<uint32_t>(y) < static_cast<uint32_t>(a.x_h);
            const char* from = x + of.x * a.x_n + static_cast<int64_t>(y) * a.x_y;
#pragma unroll 4
            for (int j = first; j < a.patch_w; j += step) {
              const uint32_t position = row + j, to = patch + position * 128 + (((word ^ position) & 7) << 4);
              const int at = x0 + j * a.stride[1];
              const bool in = in_row && static_cast<uint32_t>(at) < static_cast<uint32_t>(a.x_w);
              copy_word<kUnit>(shared + to, smem + to, in ? from + static_cast<int64_t>(at) * a.x_x : a.x,
                               in ? valid : 0);
            }
          }
        }
        arrive<kUnit>(full);
        if (++stage == a.patch_stages) stage = 0, phase ^= 1;
      }
    }
  }
}

// Warp 9: weights, tap by tap of 64 input channels: a row of 128 bytes for each output channel of the tile.
template <class C, int kUnit>
__device__ void produce_weights(const Args& a, uint32_t smem, uint8_t* shared, int lane) {
  grid_dependency_wait();
  const uint32_t tiles = tiles_of(a, min(max(load_int(a.count), 0), a.capacity));
  const int taps = a.group[a.groups - 1].end;
  int stage = 0;
  uint32_t phase = 1;
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint32_t first_unit, column_index;
    a.columns.divmod(tile, &first_unit, &column_index);
    const Column column(a, column_index);
    const int k0 = column.chunk_k + column.k * C::kOutputs;
    for (int slice = 0; slice < a.slices; ++slice) {
      const int log = log_words(slice + 1 < a.slices ? 4 : a.last_steps), word = lane & ((1 << log) - 1);
      const int channel = slice * 64 + word * 8, first = lane >> log, step = 32 >> log;
      const int valid = min(max((column.inputs - channel) * 2, 0), 16);
      for (int t = 0; t < taps; ++t) {
        mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);
        const char* w = a.w + a.tap[t].weight;
        const uint32_t slab = C::kWeightsAt + stage * C::kTap;
        if (a.merged == 1) {
          const char* from = w + channel * 2 + (k0 + first) * a.w_k;
#pragma unroll 4
          for (int n = first; n < C::kOutputs; n += step, from += step * a.w_k) {
            const uint32_t to = slab + n * 128 + ((word ^ (n & 7)) << 4);
            const bool in = k0 + n < column.k_end;
            copy_word<kUnit>(shared + to, smem + to, in ? from : a.w, in ? valid : 0);
          }
        } else {  // an output channel has weights for its own group's inputs alone
#pragma unroll 1
          for (int n = first; n < C::kOutputs; n += step) {
            const uint32_t to = slab + n * 128 + ((word ^ (n & 7)) << 4);
            const int own = a.group_outputs.quotient(k0 + n - column.chunk_k) * a.group_inputs.divisor;
            const char* from = w + (k0 + n) * a.w_k;
            if constexpr (kUnit > 2) {
#pragma unroll
              for (int e = 0; e < 8; e += kUnit / 2) {
                const int input = channel + e - own;  // of the group, whose inputs are whole units
                const bool in = k0 + n < column.k_end && static_cast<uint32_t>(input) < a.group_inputs.divisor;
                cp_async<kUnit>(smem + to + e * 2, in ? from + input * 2 : a.w, in ? kUnit : 0);
              }
            } else {
              uint32_t v[4] = {};
#pragma unroll
              for (int e = 0; e < 8; ++e) {
                const int input = channel + e - own;
                if (k0 + n < column.k_end && static_cast<uint32_t>(input) < a.group_inputs.divisor)
                  v[e / 2] |= load_half(from + input * 2) << e % 2 * 16;
              }
              *reinterpret_cast<uint4*>(shared + to) = make_uint4(v[0], v[1], v[2], v[3]);
            }
          }
        }
        arrive<kUnit>(smem + C::kWeightFull + 8 * stage);
        if (++stage == a.weight_stages) stage = 0, phase ^= 1;
      }
    }
  }
}

}  // namespace sbnet::sm90::general

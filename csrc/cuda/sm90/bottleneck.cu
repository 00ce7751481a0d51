// A bottleneck block in one kernel: 1x1 to few channels, 3x3, 1x1 back, shortcut (core/bottleneck.h).
//
// A tile is a cell of 8x8 pixels. Its input patch of 10x10 pixels is loaded once; h1 of the patch and h2 of the cell
// stay in shared memory. Pixels of the patch in blocks that are not active, or outside of the plane, have h1 = 0. So
// 36 % of h1 is computed twice, and two launches, two planes written and read, and two fringes are saved.
//
// Weights come in slabs of 64 input channels (of one tap), in the order of use: weight 0 by slices, weight 1 by taps,
// weight 2 by chunks of 64 outputs. They stay in shared memory if all fit; otherwise they go round a ring.
//
//   warps 0-7    WGMMA and epilogues: a warpgroup half of the patch's pixels, half of h2's channels, every other chunk
//   warp 8       schedule, input patches
//   warp 9       weights
//   warps 10-11  zero the fringe
#include "cuda/sm90/bottleneck.h"
#include "cuda/sm90/bottleneck_load.cuh"

namespace sbnet::sm90 {
namespace {

using namespace neck;

// ---------------------------------------------------------------- consumers
// 16 pixels x 16 channels of a warp's sums, + bias, activation, as packed pairs; `keep`: of this lane's two pixels.
template <class T, class Simple>
__device__ __forceinline__ void finish_pairs(const Args& a, Simple simple, const float* acc, const float* bias,
                                             bool keep0, bool keep1, uint32_t (&packed)[4]) {
  const int t = threadIdx.x & 3;
  const float2 low = *reinterpret_cast<const float2*>(bias + t * 2),
               high = *reinterpret_cast<const float2*>(bias + 8 + t * 2);
  float v[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = acc[e] + (e < 4 ? (e & 1 ? low.y : low.x) : (e & 1 ? high.y : high.x));
  finish_sums<T>(a, simple, Known<false>(), v, pack<T>(a.low, a.low), packed);
  if (!keep0) packed[0] = packed[2] = 0;
  if (!keep1) packed[1] = packed[3] = 0;
}

// run(simple): see finish_sums.
template <class F>
__device__ __forceinline__ void by_activation(const Args& a, F&& run) {
  if (is_max(a.activation))
    run(Known<true>());
  else
    run(Known<false>());
}

// WGMMA steps of 16 channels of slab l of h1 and h2.
template <int kN>
__device__ constexpr int steps(int l) {
  return kN == 32 || (kN == 96 && l) ? 2 : 4;
}

template <class T, int kN>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, uint8_t* shared, const int4* units) {
  constexpr int kHalf = kN / 2, kSlabs = kN > 64 ? 2 : 1;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), w4 = warp & 3, wg = warp >> 2;
  const int i8 = lane & 7, mat = lane >> 3;
  float* bias1 = reinterpret_cast<float*>(shared + kBias1At);
  float* bias2 = reinterpret_cast<float*>(shared + kBias2At);
  float* bias3 = reinterpret_cast<float*>(shared + kBias3At);
  const uint32_t h1 = smem + kControl, h2 = smem + a.h2_at, out = smem + a.out_at + wg * kOut;
  grid_dependency_wait();
  for (int i = threadIdx.x; i < kN; i += kConsumers) {
    bias1[i] = load_bias<T>(a.bias1, a.bias_f32, i, a.width);
    bias2[i] = load_bias<T>(a.bias2, a.bias_f32, i, a.width);
  }
  for (int i = threadIdx.x; i < a.slices * 64; i += kConsumers) bias3[i] = load_bias<T>(a, i);
  bar_sync(1, kConsumers);

  int stage = 0, phase = 0;
  auto await_weights = [&] {
    mbar_wait(smem + kWFull + 8 * stage, phase);
    return wgmma_operand(smem + a.ring_at + stage * a.pitch);
  };
  auto release = [&](uint32_t empty) {
    if (!a.resident && lane == 0) mbar_arrive(empty);
  };
  auto turn = [&] {  // returns the barrier of the stage left
    const uint32_t empty = smem + kWEmpty + 8 * stage;
    if (++stage == (a.resident ? a.weights : a.stages)) stage = 0, phase ^= !a.resident;
    return empty;
  };

  for (int i = 0;; ++i) {
    const int slot = i % kSlots;
    mbar_wait(smem + kTileFull + 8 * slot, (i / kSlots) & 1);
    int4 unit = {};
    if (lane == 0) {
      unit = units[slot];
      mbar_arrive(smem + kTileEmpty + 8 * slot);
    }
    unit = make_int4(__shfl_sync(0xffffffff, unit.x, 0), __shfl_sync(0xffffffff, unit.y, 0),
                     __shfl_sync(0xffffffff, unit.z, 0), __shfl_sync(0xffffffff, unit.w, 0));
    if (unit.w == kLast) break;
    const int buffer = i % a.buffers, x_phase = i / a.buffers & 1;
    const uint32_t patch = smem + a.x_at + buffer * a.slices * kSlice;

    {  // h1: a warpgroup 64 of the patch's pixels
      float acc[kN / 2];
      uint32_t read = 0;
      for (int c = 0; c < a.slices; ++c) {
        mbar_wait(smem + kXFull + 8 * (buffer * kMaxSlices + c), x_phase);
        const uint32_t dw = await_weights(), dx = wgmma_operand(patch + c * kSlice + wg * 64 * 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          wgmma<T, kN>(acc, wgmma_layout(1024) | (dx + k * 2), wgmma_layout(1024) | (dw + k * 2), c | k);
        wgmma_commit();
        wgmma_wait<1>();
        if (read) release(read);
        read = turn();
      }
      wgmma_wait<0>();
      release(read);
      if (wg * 64 + w4 * 16 < kPatchPixels) {
        bool keep[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int pixel = wg * 64 + w4 * 16 + h * 8 + lane / 4, y = pixel / kPatchSide, x = pixel % kPatchSide;
          const int cell = (y == 0 ? 0 : y == 9 ? 6 : 3) + (x == 0 ? 0 : x == 9 ? 2 : 1);
          const int py = unit.y + y - 1, px = unit.z + x - 1;
          keep[h] = unit.w >> cell & 1 && py < a.H && px < a.W;  // a cell above or left of the plane has no bit
        }
        const int row = wg * 64 + w4 * 16 + (mat & 1) * 8 + i8;
        by_activation(a, [&](auto simple) {
#pragma unroll
          for (int j = 0; j < kN / 16; ++j) {
            uint32_t packed[4];
            finish_pairs<T>(a, simple, acc + j * 8, bias1 + j * 16, keep[0], keep[1], packed);
            const uint32_t word = (j & 3) * 2 + (mat >> 1);
            stmatrix(h1 + j / 4 * kH1 + row * 128 + ((word ^ (row & 7)) << 4), packed[0], packed[1], packed[2],
                     packed[3]);
          }
        });
      }
    }
    fence_async_proxy();
    bar_sync(1, kConsumers);

    {  // h2: a warpgroup half of the channels
      float acc[kHalf / 2];
      uint32_t read = 0;
#pragma unroll 1
      for (int q = 0; q < 9; ++q)
#pragma unroll
        for (int l = 0; l < kSlabs; ++l) {
          const uint32_t dw = await_weights() + wg * kHalf * 8;
          const uint32_t dh = wgmma_operand(h1 + l * kH1 + (q / 3 * kPatchSide + q % 3) * 128);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < steps<kN>(l); ++k)
            wgmma<T, kHalf>(acc, wgmma_layout(kPatchSide * 128) | (dh + k * 2), wgmma_layout(1024) | (dw + k * 2),
                            q | l | k);
          wgmma_commit();
          wgmma_wait<1>();
          if (read) release(read);
          read = turn();
        }
      wgmma_wait<0>();
      release(read);
      const int row = w4 * 16 + (mat & 1) * 8 + i8;
      by_activation(a, [&](auto simple) {
#pragma unroll
        for (int j = 0; j < kHalf / 16; ++j) {
          uint32_t packed[4];
          const int group = wg * (kHalf / 16) + j;
          finish_pairs<T>(a, simple, acc + j * 8, bias2 + group * 16, true, true, packed);
          const uint32_t word = (group & 3) * 2 + (mat >> 1);
          stmatrix(h2 + group / 4 * kH2 + row * 128 + ((word ^ (row & 7)) << 4), packed[0], packed[1], packed[2],
                   packed[3]);
        }
      });
    }
    fence_async_proxy();
    bar_sync(1, kConsumers);

    for (int q = 0; q < a.slices; ++q) {  // y: 64 channels at a time, by turns
      const bool mine = (q & 1) == wg;
      uint32_t weights[kSlabs], empty[kSlabs];
#pragma unroll
      for (int l = 0; l < kSlabs; ++l) weights[l] = await_weights(), empty[l] = turn();
      __syncwarp();
      if (!mine) {
#pragma unroll
        for (int l = 0; l < kSlabs; ++l) release(empty[l]);
        continue;
      }
      float acc[32];
      wgmma_fence();
#pragma unroll
      for (int l = 0; l < kSlabs; ++l) {
        const uint32_t dh = wgmma_operand(h2 + l * kH2);
#pragma unroll
        for (int k = 0; k < steps<kN>(l); ++k)
          wgmma<T, 64>(acc, wgmma_layout(1024) | (dh + k * 2), wgmma_layout(1024) | (weights[l] + k * 2), l | k);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int l = 0; l < kSlabs; ++l) release(empty[l]);

      if ((threadIdx.x & 127) == 0) tma_store_wait_read();
      bar_sync(2 + wg, 128);
      const int row = w4 * 16 + (mat & 1) * 8 + i8, pixel = (row / 8 + 1) * kPatchSide + row % 8 + 1;
      const uint32_t from = patch + q * kSlice + pixel * 128, swizzle = from >> 7 & 7;
      const uint32_t low = pack<T>(a.low, a.low);
      by_activation(a, [&](auto simple) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t word = j * 2 + (mat >> 1);
          const float* b = bias3 + q * 64 + j * 16 + (lane & 3) * 2;
          float v[8];
          uint32_t packed[4];
#pragma unroll
          for (int e = 0; e < 8; ++e) v[e] = acc[j * 8 + e] + b[(e / 4) * 8 + (e & 1)];
          ldmatrix(from + ((word ^ swizzle) << 4), packed);
          finish_sums<T>(a, simple, Known<true>(), v, low, packed);
          stmatrix(out + row * 128 + ((word ^ (row & 7)) << 4), packed[0], packed[1], packed[2], packed[3]);
        }
      });
      fence_async_proxy();
      bar_sync(2 + wg, 128);
      if ((threadIdx.x & 127) == 0 && unit.x >= 0) {
        tma_store(&maps.y, out, q * 64, unit.z, unit.y, unit.x);
        tma_store_commit();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + kXEmpty + 8 * buffer);
  }
  if ((threadIdx.x & 127) == 0) tma_store_wait_read();
}

template <class T, int kN>
__global__ void __launch_bounds__(kThreads, 1)
    bottleneck_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  int4* units = reinterpret_cast<int4*>(shared + kUnitsAt);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  grid_dependency_release();
  if (threadIdx.x == 0) prefetch_map(&maps.x), prefetch_map(&maps.w1), prefetch_map(&maps.w2), prefetch_map(&maps.w3);
  if (lane == 0) {
    for (int at = 8 * warp; at < kBarriersEnd; at += 8 * (kThreads / 32)) {
      const bool by_warps = (at >= kXEmpty && at < kWFull) || (at >= kWEmpty && at < kTileFull) || at >= kTileEmpty;
      mbar_init(smem + at, by_warps ? 8 : 1);
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (warp < 8) {
    consume<T, kN>(a, maps, smem, shared, units);
  } else if (warp == 8) {
    produce_patches(a, maps, smem, units);
  } else if (warp == 9) {
    grid_dependency_wait();
    if (lane == 0) {
      const int count = min(max(load_int(a.count), 0), a.capacity),
                total = count * static_cast<int>(a.units_per_block.divisor);
      const int own =
          (total - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
      load_weights<kN>(a, maps, smem, a.resident ? min(own, 1) : own);
    }
  } else {
    grid_dependency_wait();
    if (a.fringe) zero_fringe<T>(a);
  }
}

// ---------------------------------------------------------------- host

template <class T, int kN>
Status launch(const BottleneckParams& p, const Maps& maps, const Args& a, const DeviceInfo& device,
              cudaStream_t stream) {
  constexpr auto kernel = bottleneck_kernel<T, kN>;
  SBNET_TRY(allow_shared<kernel>(kOp, device, kSharedLimit));
  const int64_t tiles = p.active.capacity * a.units_per_block.divisor;
  const unsigned ctas = static_cast<unsigned>(!a.fringe && tiles < device.sm_count ? tiles : device.sm_count);
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, dim3(ctas), dim3(kThreads), a.ring_at + a.stages * a.pitch,
                                       stream, maps, a));
  return ok_status();
}

Status matrix_map(CUtensorMap* m, const TensorView& weight, int rows) {
  const cuuint64_t size[2] = {cuuint64_t(weight.size[1]), cuuint64_t(weight.size[0])}, stride[1] = {size[0] * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(rows)};
  return make_map(m, weight.dtype, "weight", 2, weight.data, size, stride, box);
}

}  // namespace

bool bottleneck_takes(const BottleneckParams& p) {
  const int64_t C = p.x.size[1], width = p.weight[0].size[0];
  if (p.x.dtype != DType::kF16 && p.x.dtype != DType::kBF16) return false;
  if (C % 8 || C > kMaxSlices * 64 || width % 8 || width > kMaxWidth || !p.active.block_map) return false;
  for (const TensorView& w : p.weight)
    if (!weights_packed(w)) return false;
  if (!plane_fits(p.x) || !plane_fits(p.y)) return false;
  for (int d = 0; d < 2; ++d)
    if (p.active.grid.size[d] % 8) return false;
  const int64_t per_block = int64_t{p.active.grid.size[0] / 8} * (p.active.grid.size[1] / 8);
  return p.active.capacity < INT32_MAX && p.fringe.capacity < INT32_MAX && p.active.capacity * per_block < 1 << 30;
}

Status bottleneck(const BottleneckParams& p, const DeviceInfo& device, CUstream_st* stream) {
  Conv2dParams layers[3];
  bottleneck_layers(p, nullptr, layers);
  Args a = {};
  fill_common(layers[2], &a);
  a.bias1 = p.bias[0], a.bias2 = p.bias[1], a.block_map = p.active.block_map;
  lay_out(p, &a);
  SBNET_CHECK(a.stages >= 3, "%s: a plan of %d stages for a bottleneck block; 3 are wanted (a bug)", kOp, a.stages);
  const int per_row = p.active.grid.size[1] / 8;
  a.units_per_block = FastDiv(p.active.grid.size[0] / 8 * per_row), a.units_per_row = FastDiv(per_row);
  a.block_rows = FastDiv(a.block_h), a.block_columns = FastDiv(a.block_w);
  if (p.x.size[0] == 0 || (p.active.capacity == 0 && !a.fringe)) return ok_status();

  const int n = padded(p.weight[0].size[0]);
  Maps maps;
  SBNET_TRY(plane_map(&maps.x, "x", p.x, kPatchSide, kPatchSide));
  SBNET_TRY(plane_map(&maps.y, "out", p.y, 8, 8));
  SBNET_TRY(matrix_map(&maps.w1, p.weight[0], n));
  SBNET_TRY(tap_map(&maps.w2, layers[1], n));
  SBNET_TRY(matrix_map(&maps.w3, p.weight[2], 64));
  auto by_width = [&](auto type) {
    using T = decltype(type);
    return n == 32   ? launch<T, 32>(p, maps, a, device, stream)
           : n == 64 ? launch<T, 64>(p, maps, a, device, stream)
           : n == 96 ? launch<T, 96>(p, maps, a, device, stream)
                     : launch<T, kMaxWidth>(p, maps, a, device, stream);
  };
  return p.x.dtype == DType::kBF16 ? by_width(__nv_bfloat16()) : by_width(__half());
}

}  // namespace sbnet::sm90

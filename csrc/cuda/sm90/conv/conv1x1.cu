// Block-sparse 1x1 convolution for Hopper: y = activation(x w^T + bias + residual) on the active blocks of y.
//
// Stride 1 or 2, or windows of any size that lie side by side, fp16 or bf16 with fp32 sums, channel-last. It is bound
// by memory, so all is about bytes under way. A tile is 64 or 128 pixels (cells of 8x8 or 4x4, of any blocks) x up to
// 256 output channels. One to four warpgroups form a group, 64 channels each of one tile; a CTA holds two groups if it
// has warpgroups for them. Each has a producer warp and a ring of input slices (64 channels of the tile's pixels) of
// its own. A CTA keeps to its output channels, so that their weights stay in shared memory if they fit; otherwise they
// come slice by slice with the input.
//
//   warps 0-15   WGMMA and epilogue
//   warps 16-17  a producer per group: schedule, input
//   warps 18-19  zero the fringe; 18 loads resident weights before
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv1x1_load.cuh"

namespace sbnet::sm90 {
namespace {

using namespace conv1x1_detail;

// Warps 0-15. A warpgroup computes D[64 channels, pixels] = W[64 channels, C] * X[pixels, C]^T.
template <class T, int kPixels>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, uint8_t* shared, const int4* units) {
  const int tid = threadIdx.x & 127, lane = tid & 31, w4 = __shfl_sync(0xffffffff, tid >> 5, 0);
  const int wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0), group = wg / a.wide, member = wg - group * a.wide;
  if (a.weight) {
    await_settled(a);
    const int first = Schedule(a).ktile * a.wide * 64;
#pragma unroll 4
    for (int i = threadIdx.x; i < a.slices * a.slabs * 64 * 8; i += kWarpgroups * 128) {
      const int word = i % 8, row = i / 8 % 64, slab = i / (64 * 8), slice = slab / a.slabs;
      const int k = first + (slab - slice * a.slabs) * 64 + row, c = slice * 8 + word;
      const uint4* from = a.weight + static_cast<int64_t>(k) * (a.C / 8) + c;
      put_weights(shared + a.weights_at + slab * kSlab, row, word,
                  k < a.K && c < a.C / 8 ? *from : make_uint4(0, 0, 0, 0));
    }
    fence_async_proxy();
    bar_sync(1 + kWarpgroups, kWarpgroups * 128);
  }
  if (group >= a.groups) return;
  const bool leader = tid == 0, has_residual = a.residual.data != nullptr;
  constexpr int kStaging = kPixels * 128;
  const uint32_t buffers = smem + kControl + wg * a.buffers * kStaging;
  const uint32_t residual_full = smem + kResidualFull + 16 * wg;
  const uint32_t ring = smem + a.ring_at + group * a.stages * a.stage_bytes;
  const uint32_t slabs = wgmma_operand((a.resident ? smem + a.weights_at : ring + kPixels * 128) + member * kSlab);
  const uint32_t pixels = wgmma_operand(ring);
  const int i8 = lane & 7, mat = lane >> 3;  // stmatrix: two groups of 8 pixels x 16 channels
  const uint32_t lane_row = (mat >> 1) * 1024 + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4);
  const int k0 = (Schedule(a).ktile * a.wide + member) * 64, channel = k0 + w4 * 16 + (lane >> 2);
  const bool idle = k0 >= a.K;  // the last of the channels may leave a warpgroup without any
  grid_dependency_wait();
  const float bias0 = load_bias<T>(a, channel), bias1 = load_bias<T>(a, channel + 8);

  auto tile_full = [&](int i) { return smem + kTileFull + 8 * (group * kTileSlots + i % kTileSlots); };
  auto tile_of = [&](int i) { return units + (group * kTileSlots + i % kTileSlots) * kMaxUnits; };
  // The leader, as soon as it knows of tile i: earlier stores have left the staging memory, the residual goes there.
  auto fetch_residual = [&](int i) {
    tma_store_wait_read();
    if (!has_residual) return;
    const uint32_t full = residual_full + 8 * (i & 1), to = buffers + (i & 1) * kStaging;
    const int4* tile = tile_of(i);
    mbar_expect(full, kStaging);
    for (int u = 0; u < a.units; ++u)
      tma_load(to + u * a.cell, &maps.of[tile[u].w / kFlat].residual, full, k0, tile[u].z, tile[u].y, tile[u].x);
  };

  int stage = 0, phase = 0, fetched = -1;
  for (int i = 0;; ++i) {
    mbar_wait(tile_full(i), (i / kTileSlots) & 1);
    const int4* tile = tile_of(i);
    if (tile[0].w & kEnd) break;
    const uint32_t staging = buffers + (has_residual ? (i & 1) * kStaging : 0);
    if (leader && !idle && fetched < i) fetch_residual(i);
    float acc[64];
    const uint32_t read =
        multiply_slices(a, smem, group, slabs, pixels, a.resident && !a.weight && i == 0, stage, phase,
                        [&](uint64_t w, uint64_t x, int accumulate) { wgmma<T, kPixels>(acc, w, x, accumulate); });
    if (leader && !idle && has_residual && mbar_test(tile_full(i + 1), ((i + 1) / kTileSlots) & 1) &&
        !(tile_of(i + 1)[0].w & kEnd)) {
      fetch_residual(i + 1);
      fetched = i + 1;
    }
    wgmma_wait<0>();
    if (lane == 0) mbar_arrive(read);

    if (!idle) {
      if (has_residual)
        mbar_wait(residual_full + 8 * (i & 1), i / 2 & 1);
      else
        bar_sync(1 + wg, 128);
      finish_tile<T, kPixels>(a, acc, bias0, bias1, staging + lane_row, 2048);
      fence_async_proxy();
      bar_sync(1 + wg, 128);
      if (leader) {
        for (int u = 0; u < a.units; ++u)
          if (tile[u].x >= 0)
            tma_store(&maps.of[tile[u].w / kFlat].y, staging + u * a.cell, k0, tile[u].z, tile[u].y, tile[u].x);
        tma_store_commit();
      }
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + kTileEmpty + 8 * (group * kTileSlots + i % kTileSlots));
  }
  if (leader) tma_store_wait_read();
}

template <class T, int kPixels>
__global__ void __launch_bounds__(kThreads, 1)
    conv1x1_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  init_barriers<kThreads>(a, cta, 4 * a.wide, 4 * a.wide);
  // Every role calls grid_dependency_wait() before it touches feature maps, some in every CTA.
  if (cta.warp < 16) {  // 640 threads start with 96 registers each
    registers_up<112>();
    consume<T, kPixels>(a, maps, cta.smem, shared, units_of(shared));
  } else {
    registers_down<32>();
    if (cta.warp < 18) {
      if (cta.warp - 16 < a.groups) produce(a, maps, cta.smem, units_of(shared), cta.warp - 16);
    } else {
      const bool loads = cta.warp == 18 && cta.lane == 0 && a.resident && !a.weight;
      load_and_clear(a, &maps.w, cta.smem, loads, [&] {
        if (a.fringe) zero_fringe<T>(a);
      });
    }
  }
}

// ---------------------------------------------------------------- host

template <class T, int kPixels>
Status launch(const Plan& plan, const Maps& maps, const Args& a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = conv1x1_kernel<T, kPixels>;
  SBNET_TRY(allow_shared<kernel>(kOp, device, kSharedLimit));
  int64_t columns = plan.ktiles < device.sm_count ? device.sm_count / plan.ktiles : 1;
  if (!a.fringe && plan.tiles < columns) columns = plan.tiles;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, dim3(static_cast<unsigned>(columns * plan.ktiles)),
                                       dim3(kThreads), plan.shared, stream, maps, a));
  return ok_status();
}

bool streams_as_wide(const Conv2dParams& p, const Args& a) {
  return !a.resident && a.wide == kWarpgroups && !p.residual.data && a.C % 64 == 0 && p.weight.size[0] % 256 == 0;
}

}  // namespace

Status conv1x1(const Conv2dParams& given, const DeviceInfo& device, CUstream_st* stream) {
  const Conv2dParams p = as_patches(given);
  if (conv1x1_wide_pays(p, device)) return conv1x1_wide(p, device, stream);
  if (conv1x1_split_takes(p)) return conv1x1_split(p, device, stream);
  Args a = {};
  fill_common(p, &a);
  const Plan cut = plan_launch(p, device, &a);
  // Weights of 256 output channels that come anew for each tile: there the wide kernel's share of them is read ahead,
  // and by two CTAs together.
  if (streams_as_wide(p, a)) return conv1x1_wide(p, device, stream);
  // A slice is given back when the products of the next one have begun: a ring of one would wait for itself.
  SBNET_CHECK(a.stages >= 2, "%s: plan (a bug): expected at least 2 stages for %d input channels, got %d", kOp,
              static_cast<int>(p.x.size[1]), a.stages);
  if (p.x.size[0] == 0 || (cut.tiles == 0 && !a.fringe)) return ok_status();
  if (a.resident && weights_by_hand(a.C)) a.weight = static_cast<const uint4*>(p.weight.data);

  Maps maps = {};
  const int pixels = a.side * a.side;
  SBNET_TRY(input_maps(&maps, p, a));
  SBNET_TRY(box_maps(&maps, &PlaneMaps::y, "out", p.y, a, a.side, pixels));
  if (p.residual.data) SBNET_TRY(box_maps(&maps, &PlaneMaps::residual, "residual", p.residual, a, a.side, pixels));
  SBNET_TRY(weight_map(&maps.w, p));

  const bool bf16 = p.x.dtype == DType::kBF16;
  if (cut.pixels == 128)
    return bf16 ? launch<__nv_bfloat16, 128>(cut, maps, a, device, stream)
                : launch<__half, 128>(cut, maps, a, device, stream);
  return bf16 ? launch<__nv_bfloat16, 64>(cut, maps, a, device, stream)
              : launch<__half, 64>(cut, maps, a, device, stream);
}

}  // namespace sbnet::sm90

// The Hopper 3x3 convolution of stride 2, but for few tiles of many channels (conv3x3.cu).
//
// Two warpgroups to a CTA, each with tiles of its own: a strip of 16x8 or 8x8 pixels x 64 or 128 output channels. One's
// epilogue runs under the other's products. The weights come in rounds, tap after tap of all input channels, for both
// warpgroups and both CTAs of a cluster; each warpgroup has a ring of input patches. The second warpgroup's tiles begin
// and end half a round later than the first one's.
//
//   warps 0-7   WGMMA and epilogue
//   warps 8-9   schedule and input patches of a warpgroup each
//   warp 10     weights
//   warp 11     zeroes the fringe
#include <algorithm>

#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv3x3_stride2_load.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90 {
namespace {

using namespace conv3x3_stride2_detail;

// Warps 0-7. A warpgroup computes D[64 channels, pixels] = W[64 channels, 9 C] * X[pixels, 9 C]^T once or twice. The
// taps of a patch read it in place: tap (r, s) only moves the descriptor.
template <class C>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, const int4* units) {
  using T = typename C::T;
  constexpr int kPartsOfSlab = C::kHeight / 8;
  const int tid = threadIdx.x & 127, lane = tid & 31, w4 = __shfl_sync(0xffffffff, tid >> 5, 0);
  const int wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
  const bool leader = tid == 0, has_residual = a.residual.data != nullptr;
  const Schedule schedule(a);
  const Round round(a);
  const int k0 = schedule.ktile * C::kSlabs * 64, ctas = schedule.ctas;
  const uint32_t staging = smem + C::kStagingAt + wg * 2 * kPart, residual_full = smem + C::kResidualFull + 8 * wg;
  const uint32_t weights = wgmma_operand(smem + C::kWeightsAt);
  const uint32_t patches = wgmma_operand(smem + C::kPatchesAt + wg * C::kPatchStages * C::kPatch);
  // Staging holds [pixel][64 channels], 128-byte swizzle. stmatrix writes two rows of 8 pixels x 16 channels at once:
  // this lane's row address.
  const int i8 = lane & 7, mat = lane >> 3;
  const uint32_t lane_row = staging + (mat >> 1) * 1024 + i8 * 128 + (((w4 * 2 + (mat & 1)) ^ i8) << 4);
  await_settled(a);
  const int all = schedule.tiles(a, count_of(a)), tiles = (all + 1 - wg) / kWarpgroups;
  float bias[2 * C::kSlabs];
#pragma unroll
  for (int e = 0; e < 2 * C::kSlabs; ++e)
    bias[e] = load_bias<T>(a, k0 + w4 * 16 + (lane >> 2) + e * 8 + (e & 2 ? 48 : 0));

  grid_dependency_wait();

  int weight = 0, weight_phase = 0, patch = 0, patch_phase = 0, residual_phase = 0;
  auto advance_weight = [&] {
    if (++weight == C::kWeightStages) weight = 0, weight_phase ^= 1;
  };
  auto release_weight = [&](uint32_t empty) {  // in every CTA that may load into it
    if (lane < ctas) mbar_arrive_at(empty, lane);
  };
  auto skip = [&](int taps) {
    for (; taps > 0; --taps) {
      mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
      __syncwarp();
      release_weight(smem + C::kWeightEmpty + 8 * weight);
      advance_weight();
    }
  };
  auto load_residual = [&](int first, int4 at) {  // this part and the next one, where they will lie as output
    tma_store_wait_read();
    mbar_expect(residual_full, (C::kParts > 1 ? 2 : 1) * kPart);
    for (int part = first; part < first + 2 && part < C::kParts; ++part)
      tma_load(staging + (part & 1) * kPart, &maps.residual, residual_full, k0 + part / kPartsOfSlab * 64, at.z,
               at.y + part % kPartsOfSlab * 8, at.x);
  };

  if (all && wg == 1) skip(round.half);
  for (int i = 0; i < tiles; ++i) {
    mbar_wait(smem + C::kTileFull + 8 * wg, i & 1);
    __syncwarp();  // all have seen this tile's phase before the next may begin
    int4 at = {};
    if (lane == 0) {  // no other lane has to have read it first
      at = units[wg];
      mbar_arrive(smem + C::kTileEmpty + 8 * wg);
    }
    at.x = __shfl_sync(0xffffffff, at.x, 0);
    at.y = __shfl_sync(0xffffffff, at.y, 0);
    at.z = __shfl_sync(0xffffffff, at.z, 0);
    if (at.x < 0) {
      skip(round.taps);
      continue;
    }

    float acc[C::kSlabs][64];  // the first kHeight * 4 of each
    uint32_t q = wg * (a.slices & 1) * kMiddleTap;
    uint32_t read_weight = 0,
             read_patch = 0;  // barriers of the stages that the tap before the last one issued has read
    auto release = [&] {
      if (read_weight) release_weight(read_weight);
      if (read_patch && lane == 0) mbar_arrive(read_patch);
    };
    bool begins = true;  // a patch
#pragma unroll 1
    for (int v = 0; v < round.taps; ++v) {
      if (begins) mbar_wait(smem + C::kPatchFull + 8 * (wg * C::kPatchStages + patch), patch_phase);
      mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
      const int width = kPatchWidth - (kNarrowTaps >> q & 1);
      const uint32_t shift = (kRightTaps >> q & 1) + (kLowerTaps >> q & 1) * width;
      const uint32_t dw = weights + weight * (C::kTap >> 4), dp = patches + patch * (C::kPatch >> 4) + shift * 8;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int h = 0; h < C::kSlabs; ++h)
          wgmma<T, C::kHeight * 8>(acc[h], wgmma_layout(1024) | (dw + h * (kSlab >> 4) + k * 2),
                                   wgmma_layout(width * 128) | (dp + k * 2), v | k);
      wgmma_commit();
      wgmma_wait<1>();
      release();
      read_weight = smem + C::kWeightEmpty + 8 * weight;
      advance_weight();
      begins = kLastTaps >> q & 1;
      read_patch = begins ? smem + C::kPatchEmpty + 8 * (wg * C::kPatchStages + patch) : 0;
      if (begins && ++patch == C::kPatchStages) patch = 0, patch_phase ^= 1;
      if (++q == 9) q = 0;
      if (has_residual && leader && v == 0) load_residual(0, at);
    }
    wgmma_wait<0>();
    release();

    for_epilogue(a, [&](auto simple, auto residual) {
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
        const int slab = part / kPartsOfSlab, rows = part % kPartsOfSlab, buffer = part & 1;
        if (residual) {
          mbar_wait(residual_full, residual_phase);
          if (buffer || C::kParts == 1) residual_phase ^= 1;
        } else {
          if (leader) tma_store_wait_read<C::kParts == 1 ? 0 : 1>();  // who last read this buffer: the store before the
          bar_sync(1 + wg, 128);                                      // last one, or the only one
        }
        finish_channels<T, 64>(a, simple, residual, acc[slab] + rows * 32, bias[slab * 2], bias[slab * 2 + 1],
                               lane_row + buffer * kPart, 2048, pack<T>(a.low, a.low));
        fence_async_proxy();
        bar_sync(1 + wg, 128);
        if (leader) {
          tma_store(&maps.y, staging + buffer * kPart, k0 + slab * 64, at.z, at.y + rows * 8, at.x);
          tma_store_commit();
          if (residual && buffer && part + 1 < C::kParts) load_residual(part + 1, at);
        }
      }
    });
  }
  if (all && all % 2 == wg) skip(wg ? round.taps - round.half : round.half);  // the other's last tile ends later
  if (leader) tma_store_wait_read();
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    conv3x3_stride2_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  int4* units = reinterpret_cast<int4*>(shared + C::kUnitsAt);
  cta.init_barriers(C::kWeightFull, C::kShared, kThreads / 32, [&](int at) {
    const bool of_weights = at >= C::kWeightEmpty && at < C::kPatchFull;
    const bool read = (at >= C::kPatchEmpty && at < C::kTileFull) || (at >= C::kTileEmpty && at < C::kResidualFull);
    return of_weights ? 4 * kWarpgroups << a.log_cluster : read ? 4 : 1;
  });
  __syncthreads();
  if (a.log_cluster) cluster_sync();
  // Every role calls grid_dependency_wait() before it touches feature maps, some in every CTA.
  if (cta.warp < 8) {  // 384 threads start with 168 registers each
    registers_up<216>();
    consume<C>(a, maps, cta.smem, units);
  } else {
    registers_down<40>();
    if (cta.warp < 10)
      produce_patches<C>(a, maps, cta.smem, units, cta.warp - 8);
    else if (cta.warp == 10 && cta.lane == 0)
      produce_weights<C>(a, &maps.w, cta.smem);
    else if (cta.warp == 11) {
      take_turn();
      if (a.fringe) zero_fringe<typename C::T, 1>(a);
    }
  }
}

// ---------------------------------------------------------------- host

int64_t slabs(const Conv2dParams& p) { return (p.weight.size[0] + 63) / 64; }
int strips_per_row(const Conv2dParams& p) {  // that lie inside the plane
  return static_cast<int>((std::min<int64_t>(p.active.grid.size[1], p.y.size[3]) + kStripWidth - 1) / kStripWidth);
}
int strips_per_block(const Conv2dParams& p, int height) {
  return static_cast<int>((std::min<int64_t>(p.active.grid.size[0], p.y.size[2]) + height - 1) / height) *
         strips_per_row(p);
}

template <class C>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t ktiles = slabs(p) / C::kSlabs;
  const int64_t strips = p.active.capacity * strips_per_block(p, C::kHeight);
  if (p.x.size[0] == 0 || (strips == 0 && !has_fringe(p))) return ok_status();

  Maps maps;
  const TensorView& residual = p.residual.data ? p.residual : p.y;
  for (int view = 0; view < 4; ++view)
    SBNET_TRY(plane_map(&maps.x[view], "x", p.x, kPatchWidth - view % 2, C::kHeight + 1 - view / 2, 2, view < 2,
                        view % 2 == 0));
  SBNET_TRY(plane_map(&maps.y, "out", p.y, kStripWidth, 8));
  SBNET_TRY(plane_map(&maps.residual, "residual", residual, kStripWidth, 8));
  SBNET_TRY(tap_map(&maps.w, p, C::kSlabs * 32));

  Args a = {};
  fill_common(p, &a);
  a.slices = static_cast<int>((p.x.size[1] + 63) / 64);
  a.log_cluster = 1;
  a.ktiles = FastDiv(static_cast<int>(ktiles));
  a.units_per_block = FastDiv(strips_per_block(p, C::kHeight));
  a.units_per_row = FastDiv(strips_per_row(p));

  int clusters = 0;
  SBNET_TRY(clusters_that_fit<conv3x3_stride2_kernel<C>>(device, kThreads, C::kShared, &a.log_cluster, &clusters));
  int64_t columns = ktiles < clusters ? clusters / ktiles : 1;
  const int64_t most = (strips + (1 << a.log_cluster) - 1) >> a.log_cluster;
  if (!a.fringe && most < columns) columns = most;
  const ClusterLaunch launch((columns * ktiles) << a.log_cluster, kThreads, C::kShared, a.log_cluster, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, conv3x3_stride2_kernel<C>, maps, a));
  return ok_status();
}

// Wide tiles read the input once for 128 output channels; few tiles share the device better in narrow ones.
int64_t wide_tiles(const Conv2dParams& p, int height) {
  return p.active.capacity * strips_per_block(p, height) * slabs(p) / 2;
}
template <class T, int kHeight>
Status dispatch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const bool few = wide_tiles(p, kHeight) < (kHeight == 16 ? 3 : 1) * device.sm_count;
  if (slabs(p) % 2 || few) return launch<Config<T, kHeight, 1>>(p, device, stream);
  return launch<Config<T, kHeight, 2>>(p, device, stream);
}
template <class T>
Status dispatch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  if (p.active.grid.size[0] % 16 || p.y.size[2] <= 8) return dispatch<T, 8>(p, device, stream);
  return dispatch<T, 16>(p, device, stream);
}

}  // namespace

bool conv3x3_stride2_pays(const Conv2dParams& p, const DeviceInfo& device) {
  if (p.active.grid.size[0] % 16 || p.active.grid.size[1] % 16) return true;
  if (p.x.size[1] <= 64 && p.weight.size[0] <= 64) return true;
  return wide_tiles(p, 16) >= 3 * device.sm_count;
}

Status conv3x3_stride2(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  return p.x.dtype == DType::kBF16 ? dispatch<__nv_bfloat16>(p, device, stream) : dispatch<__half>(p, device, stream);
}

}  // namespace sbnet::sm90

// The Hopper 1x1 convolution where products count, not bytes: many tiles, K a multiple of 256, or of 128 with C >= 384.
// C counts the input channels of every tap where conv_general.cu hands in taps that are far apart.
//
// What limits products is shared memory, 128 bytes a cycle: WGMMA reads (64 + N) * 32 bytes of operands in N / 2
// cycles, 128 a cycle for N = 64, 96 for 128, 80 for 256. A tile is 64 pixels (a cell of 8x8, or four of 4x4) x 128,
// 256 or 512 output channels. One, two or four warpgroups share a tile; two groups of them have tiles of their own, so
// that one's epilogue runs under the other's products (of four warpgroups there is one group, whose warpgroups may be a
// slice or two apart). Weights that fit stay in shared memory. Others come with the input, a slice of 64 input channels
// for both groups and both CTAs of a cluster, round and round; the second group's tiles then begin and end half a round
// later than the first one's. By input channels C and what divides the output channels K:
//
//   weights                                           channels of a warpgroup, warpgroups to a tile
//   stay, C up to 128, K by 512, no residual          128, four: the input is read once
//   stay, C up to 256 (128 with a residual), K by 256 128, two
//   streamed, K by 256                                256, one; with a residual, silu or gelu 128, two: more hide
//                                                     its latency
//   either, K by 128                                  128, one
//
//   warps 0-7 or 0-15   WGMMA and epilogue
//   the next two        schedule, input, streamed weights; resident weights: a warp for each group's tiles
//   the last two        zero the fringe; the first of them loads resident weights before
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv1x1_load.cuh"

namespace sbnet::sm90 {
namespace {

using namespace conv1x1_detail;

// Groups of kWidth warpgroups, 64 pixels x kChannels each, and a warpgroup of others.
template <int kWidth>
constexpr int kGroups = kWidth == 4 ? 1 : 2;
template <int kWidth>
constexpr int kConsumers = kGroups<kWidth> * kWidth * 128;
template <int kWidth>
constexpr int kWideThreads = kConsumers<kWidth> + 128;

// Output channels of a box of weights: streamed ones come as one from each CTA of the cluster.
__host__ __device__ __forceinline__ int weight_rows(const Args& a) {
  return a.resident ? 64 : (a.slabs * 64) >> a.log_cluster;
}

// The producer of streamed weights. Tile m of this CTA is group m % 2's, and under way in half rounds m and m + 1.
__device__ __forceinline__ void produce_streamed(const Args& a, const Maps& maps, uint32_t smem, int4* units) {
  const Schedule at(a);
  const int ctas = 1 << a.log_cluster, rank = blockIdx.x & (ctas - 1), k0 = at.ktile * a.slabs * 64;
  const int share = weight_rows(a);
  Finder finder(a);
  const int lane = finder.lane;
  // The CTAs of a cluster have neighbouring tiles, and as many of them, the last one perhaps of nothing.
  auto tile_of = [&](int m, int r) { return (at.column + at.columns * m) * ctas + r; };
  int first = 0;
  finder.aim(tile_of(finder.ahead(), rank));
  const int total = finder.begin();

  auto announce = [&](int m) {
    if (m >= first + finder.batch()) {  // those under way are still needed
      first = m - 2;
      finder.aim(tile_of(first + finder.ahead(), rank));
      finder.find();
    }
    if (finder.ahead() != m - first) return;
    int4 unit = finder.unit;
    if (tile_of(m, 0) >= total) unit.w = m > 0 && tile_of(m - 1, 0) < total ? kSkipAndEnd : kEnd;
    announce_unit(smem, units, m & 1, m / 2, finder.member, unit);
  };
  int stage = 0, phase = 1;
  announce(0);
  announce(1);
  for (int h = 0;; ++h) {
    const bool ends = h > 0 && tile_of(h - 1, 0) < total, begins = tile_of(h, 0) < total;
    if (!ends && !begins) break;
    const int which = first + finder.ahead(), half = a.slices / 2;
    const bool mine = (ends && which == h - 1) || (begins && which == h);
    auto expect = [&](int stage, int c) {  // one lane: slice c, and its weights
      const uint32_t full = smem + kFull + 8 * stage, to = smem + a.ring_at + stage * a.stage_bytes;
      mbar_expect(full, (ends + begins + a.slabs) * kSlab);
      tma_multicast(to + 2 * kSlab + rank * share * 128, &maps.w, full, c * 64, k0 + rank * share, (1 << ctas) - 1);
    };
    // The first weights set out before the launch ahead has ended.
    const int ahead = h == 0 ? min(half, a.stages) : 0;
    if (h == 0) {
      if (lane == 0)
        for (int c = 0; c < ahead; ++c) expect(c, c);
      grid_dependency_wait();
    }
    for (int c = h & 1 ? half : 0; c < (h & 1 ? a.slices : half); ++c) {
      if (lane == 0 && (h > 0 || c >= ahead)) {
        mbar_wait(smem + kEmpty + 8 * stage, phase);
        expect(stage, c);
      }
      __syncwarp();
      const uint32_t full = smem + kFull + 8 * stage, to = smem + a.ring_at + stage * a.stage_bytes;
      if (mine)
        load_input(a, to + (which & 1) * kSlab + finder.member * a.cell, &maps.of[finder.flat].x, full, c, finder.unit);
      if (++stage == a.stages) stage = 0, phase ^= 1;
    }
    if (begins) announce(h + 2);
  }
  // Never exit while another CTA of the cluster may still report here what it has read.
  for (int s = 0; s < a.stages; ++s) {
    if (lane == 0) mbar_wait(smem + kEmpty + 8 * stage, phase);
    if (++stage == a.stages) stage = 0, phase ^= 1;
  }
}

// A warpgroup computes D[64 pixels, kChannels] = X[64 pixels, C] * W[kChannels, C]^T; each of its warps finishes,
// stores and fetches the residual of its own 16 pixels, kSlabs * 64 channels at a time.
template <class T, int kChannels, int kWidth, int kSlabs>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, uint8_t* shared, const int4* units) {
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), w4 = warp & 3;
  const int wg = warp / (4 * kWidth), member = (warp >> 2) % kWidth, ring = a.resident ? wg : 0;
  const int first = Schedule(a).ktile * kChannels * kWidth, k0 = first + member * kChannels, ctas = 1 << a.log_cluster;
  const float2* biases = reinterpret_cast<const float2*>(shared + kBiasAt) + member * kChannels / 2;
  await_settled(a);
  if (threadIdx.x < kChannels * kWidth)
    reinterpret_cast<float*>(shared + kBiasAt)[threadIdx.x] = load_bias<T>(a, first + threadIdx.x);
  bar_sync(1, kConsumers<kWidth>);
  grid_dependency_wait();

  constexpr int kBoxes = kWidth == 1 ? 2 : 1;  // of output under way at once, unless there is a residual
  const bool has_residual = a.residual.data != nullptr;
  const uint32_t staging = smem + a.staging_at + warp * a.buffers * kRows;
  const uint32_t residual_full = smem + kResidualFull + 8 * warp;
  const uint32_t ring_at = smem + a.ring_at + ring * a.stages * a.stage_bytes;
  const uint32_t pixels = wgmma_operand(ring_at + (a.resident ? 0 : wg * kSlab));
  const uint32_t weights =
      wgmma_operand((a.resident ? smem + a.weights_at : ring_at + 2 * kSlab) + member * kChannels / 64 * kSlab);
  const uint32_t weight_step = a.slabs * (kSlab >> 4), stage_step = a.stage_bytes >> 4;

  int stage = 0, phase = 0;
  auto await = [&] { mbar_wait(smem + kFull + 8 * (ring * kMaxStages + stage), phase); };
  auto advance = [&] {
    if (++stage == a.stages) stage = 0, phase ^= 1;
  };
  auto release = [&](uint32_t empty) {  // in every CTA that may load into it
    if (ctas > 1 && lane < ctas) mbar_arrive_at(empty, lane);
    if (ctas == 1 && lane == 0) mbar_arrive(empty);
  };
  auto skip = [&](int slices) {
    for (; slices > 0; --slices) {
      await();
      __syncwarp();
      release(smem + kEmpty + 8 * stage);
      advance();
    }
  };
  for (int i = 0;; ++i) {
    const int slot = wg * kTileSlots + i % kTileSlots;
    mbar_wait(smem + kTileFull + 8 * slot, (i / kTileSlots) & 1);
    const int4* tile = units + slot * kMaxUnits;
    const int end = tile[0].w & (kEnd | kSkipAndEnd);
    if (!a.resident && i == 0 && wg == 1 && end != kEnd) skip(a.slices / 2);
    if (end == kSkipAndEnd) skip(wg == 0 ? a.slices / 2 : a.slices - a.slices / 2);
    if (end) break;
    __syncwarp();
    int4 at = {};
    const CUtensorMap* to = nullptr;
    if (lane == 0) {  // the lane that reports the tile as read is the one that reads it
      at = tile[a.side == 8 ? 0 : w4];
      to = &maps.of[at.w / kFlat].y;
      if (a.side == 8) (at.w ? at.z : at.y) += w4 * (at.w ? 16 : 2);  // of a cell of 8x8 two rows; or a cell of 4x4
      mbar_arrive(smem + kTileEmpty + 8 * slot);
      if (has_residual) {
        tma_store_wait_read();
        mbar_expect(residual_full, kChannels / 64 * kRows);
        const CUtensorMap* map = &maps.of[at.w / kFlat].residual;
        for (int q = 0; q < kChannels / 64; q += kSlabs) {
          if constexpr (kSlabs == 1)
            tma_load(staging + q * kRows, map, residual_full, k0 + q * 64, at.z, at.y, at.x);
          else
            tma_load(staging + q * kRows, map, residual_full, 0, k0 / 64 + q, at.z, at.y, at.x);
        }
      }
    }

    // Sums begin with the bias: what comes after the products is on the way to the next tile's.
    float acc[kChannels / 2];
#pragma unroll
    for (int e = 0; e < kChannels / 2; e += 4) {
      const float2 bias = biases[e + (lane & 3)];
      acc[e] = acc[e + 2] = bias.x, acc[e + 1] = acc[e + 3] = bias.y;
    }
    uint32_t read = 0;  // barrier of the stage that the slice before the last one issued has read
    for (int c = 0; c < a.slices; ++c) {
      if (a.resident && i == 0) mbar_wait(smem + kWeightFull + 8 * c, 0);
      await();
      const uint32_t dp = pixels + stage * stage_step;
      const uint32_t dw = weights + (a.resident ? c * weight_step : stage * stage_step);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<T, kChannels>(acc, wgmma_layout(1024) | (dp + k * 2), wgmma_layout(1024) | (dw + k * 2), 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (read) release(read);
      read = smem + kEmpty + 8 * (ring * kMaxStages + stage);
      advance();
    }
    wgmma_wait<0>();
    release(read);

    for_epilogue(a, [&](auto simple, auto residual) {
      if (residual) mbar_wait(residual_full, i & 1);
#pragma unroll
      for (int q = 0; q < kChannels / 64; ++q) {
        const int slab = q % kSlabs, box = q / kSlabs;
        const uint32_t rows = staging + (residual ? box : box % kBoxes) * kSlabs * kRows;
        if (!residual && slab == 0) {
          if (lane == 0) tma_store_wait_read<kBoxes - 1>();
          __syncwarp();
        }
        finish_rows<T, 8, kSlabs>(a, simple, residual, acc + q * 32, rows, slab);
        if (slab != kSlabs - 1) continue;
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
          if constexpr (kSlabs == 1) {
            if (at.x >= 0) tma_store(to, rows, k0 + q * 64, at.z, at.y, at.x);
          } else {
            if (at.x >= 0) tma_store(to, rows, 0, k0 / 64 + q - slab, at.z, at.y, at.x);
          }
          tma_store_commit();
        }
      }
    });
  }
  if (lane == 0) tma_store_wait_read();
}

template <class T, int kChannels, int kWidth, int kSlabs>
__global__ void __launch_bounds__(kWideThreads<kWidth>, 1)
    conv1x1_wide_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  init_barriers<kWideThreads<kWidth>>(a, cta, a.resident ? 4 * kWidth : 8 * kWidth << a.log_cluster, 4 * kWidth);
  if (a.log_cluster) cluster_sync();
  // Every role calls grid_dependency_wait() before it touches feature maps, some in every CTA.
  const int other = cta.warp - kConsumers<kWidth> / 32;
  if (other < 0) {  // 384 threads start with 168 registers each, 640 with 96
    registers_up<kWidth == 1 ? 216 : 112>();
    consume<T, kChannels, kWidth, kSlabs>(a, maps, cta.smem, shared, units_of(shared));
  } else {
    registers_down<kWidth == 1 ? 40 : 32>();
    if (other < 2) {
      if (a.resident && other < kGroups<kWidth>)
        produce(a, maps, cta.smem, units_of(shared), other);
      else if (!a.resident && other == 0)
        produce_streamed(a, maps, cta.smem, units_of(shared));
      else
        grid_dependency_wait();
    } else {
      load_and_clear(a, &maps.w, cta.smem, other == 2 && cta.lane == 0 && a.resident, [&] {
        if (a.fringe) zero_fringe<T>(a);
      });
    }
  }
}

// ---------------------------------------------------------------- host

template <class T, int kChannels, int kWidth, int kSlabs>
Status launch(const Conv2dParams& p, const Plan& plan, Args a, const DeviceInfo& device, cudaStream_t stream) {
  Maps maps = {};
  SBNET_TRY(input_maps(&maps, p, a));
  auto of_warps = [&](CUtensorMap PlaneMaps::* which, const char* name, const TensorView& t) {
    return kSlabs == 1 ? box_maps(&maps, which, name, t, a, 16 / a.side, 16)
                       : pair_maps(&maps, which, name, t, a, 16 / a.side, 16);
  };
  SBNET_TRY(of_warps(&PlaneMaps::y, "out", p.y));
  if (p.residual.data) SBNET_TRY(of_warps(&PlaneMaps::residual, "residual", p.residual));

  constexpr auto kernel = conv1x1_wide_kernel<T, kChannels, kWidth, kSlabs>;
  int clusters = 0;
  SBNET_TRY(clusters_that_fit<kernel>(device, kWideThreads<kWidth>, kSharedLimit, &a.log_cluster, &clusters));
  SBNET_TRY(weight_map(&maps.w, p, weight_rows(a)));
  int64_t columns = plan.ktiles < clusters ? clusters / plan.ktiles : 1;
  if (!a.fringe && plan.tiles < columns) columns = plan.tiles;
  const ClusterLaunch launch((columns * plan.ktiles) << a.log_cluster, kWideThreads<kWidth>, plan.shared, a.log_cluster,
                             stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, kernel, maps, a));
  return ok_status();
}

template <class T>
Status launch_of(const Conv2dParams& p, const Plan& plan, const Args& a, const DeviceInfo& device,
                 cudaStream_t stream) {
  if (a.wide == 4) return launch<T, 128, 4, 2>(p, plan, a, device, stream);
  if (a.pairs) return launch<T, 128, 2, 2>(p, plan, a, device, stream);
  if (a.wide == 2) return launch<T, 128, 2, 1>(p, plan, a, device, stream);
  if (a.slabs == 2) return launch<T, 128, 1, 1>(p, plan, a, device, stream);
  return launch<T, 256, 1, 1>(p, plan, a, device, stream);
}

}  // namespace

bool conv1x1_wide_pays(const Conv2dParams& p, const DeviceInfo& device) {
  const int64_t C = reduction_of(p), K = p.weight.size[0];
  // 128 channels a tile pay where a tile's input is much: there a single group, as in conv1x1.cu, stops loading.
  if (C % 64 || K % 128 || (K % 256 && C < 384)) return false;
  Args a = {};
  const Plan plan = plan_wide(p, &a);
  // Few tiles share the device better if they are small, or split; but 128 channels at a time, with weights that stay,
  // cost no more when the list is short. With a residual, large ones pay earlier.
  const bool small = a.resident && a.slabs == 2;
  const int least = small ? 2 : conv1x1_split_takes(p) ? 3 : p.residual.data ? 8 : 12;
  return plan.tiles * plan.ktiles * (a.slabs == 8 ? 2 : 1) * 2 >= device.sm_count * least;
}

Status conv1x1_wide(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  Args a = {};
  fill_common(p, &a);
  const Plan plan = plan_wide(p, &a);
  if (p.x.size[0] == 0 || (plan.tiles == 0 && !a.fringe)) return ok_status();
  return p.x.dtype == DType::kBF16 ? launch_of<__nv_bfloat16>(p, plan, a, device, stream)
                                   : launch_of<__half>(p, plan, a, device, stream);
}

}  // namespace sbnet::sm90

// Hopper 1x1 and 3x3 convolutions whose tiles are few, where one CTA would take long over a tile's sums: stride 1 or 2,
// fp16 or bf16 with fp32 sums, channel-last.
//
// A tile is 64 pixels (a cell of 8x8, or four of 4x4) x 64 or 32 output channels. Its sum is a row of chunks, 64 input
// channels of a tap each. The CTAs of a cluster take a part of the chunks each: their weights set out before the launch
// ahead has ended and stay in shared memory for all tiles of the CTA. Each CTA sends the others its sums of the pixels
// that those finish, and finishes its own, always in the same order. The host cuts a layer by how many tiles there can
// be, so a block's bits do not depend on the list. Most layers take less than half of a multiprocessor's shared memory,
// so that the next launch starts beside this one.
//
//   warps 0-7  two warpgroups, a tile each: WGMMA, exchange of sums, output
//   warp 8     weights, input patches
//   warp 9     zeroes the fringe
#include <algorithm>

#include "core/masked/conv_patches.h"
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_few.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90 {
namespace {

using namespace few_detail;

template <class C>
__global__ void __launch_bounds__(kThreads, 2)
    conv_few_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  const Job<C> job(a);
  await_settled(a);
  const bool ahead = job.group == 0;  // if any weights are needed, these are: no need to wait for the count
  if (cta.warp == 2 * 4) {
    if (cta.lane < kMostChunks / kBatch) mbar_init(cta.smem + a.barriers_at + kWeightFull + 8 * cta.lane, 1);
    fence_mbar_init();
    __syncwarp();
    if (ahead) load_weights(a, &maps.w, cta.smem, job);
    if (cta.lane < (C::kViews ? 4 : 1)) prefetch_map(&maps.x[cta.lane]);
  } else if (cta.warp == 0) {
    const uint32_t barriers = cta.smem + a.barriers_at;
    if (cta.lane < kMostPatches * kMostBuffers) mbar_init(barriers + kPatchFull + 8 * cta.lane, 1);
    if (cta.lane < kMostBuffers) mbar_init(barriers + kPatchEmpty + 8 * cta.lane, 4);
    if (cta.lane < kWarpgroups) {
      mbar_init(barriers + kSumsFull + 8 * cta.lane, 1);
      mbar_init(barriers + kSumsFree + 8 * cta.lane, 1 << a.log_split);
    }
    fence_mbar_init();
  }
  Cells cells(a);
  __syncthreads();
  cluster_arrive();
  if (cta.warp < 8) {
    auto run = [&](auto log) { consume<C, decltype(log)::value>(a, cta.smem, shared, job, cells); };
    if (a.log_split == 0) return run(std::integral_constant<int, 0>());
    if (a.log_split == 1) return run(std::integral_constant<int, 1>());
    if (a.log_split == 2) return run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 3>());
  } else if (cta.warp == 8) {
    produce<C>(a, maps, cta.smem, job, cells, ahead);
  } else {
    take_turn();
    if (a.fringe) zero_fringe<typename C::T, 1>(a);
  }
}

// ---------------------------------------------------------------- host

constexpr int64_t kMostTiles = 128;
constexpr int kHalf = kSharedLimit / 2 - 512;  // bytes that two CTAs may have on a multiprocessor

int shape_of(const Conv2dParams& p) { return p.weight.size[2] == 1 ? 0 : static_cast<int>(p.stride[0]); }
int channels_of(const Conv2dParams& p) { return (p.weight.size[0] + 31) / 32 % 2 ? 32 : 64; }

// Fills in how a layer is cut; false: it does not fit.
template <class C>
bool cut(const Conv2dParams& p, const DeviceInfo& device, int log_split, int64_t tiles, Args* a) {
  const int parts = 1 << log_split, slices = static_cast<int>((p.x.size[1] + 63) / 64);
  const int slabs = static_cast<int>((p.weight.size[0] + C::kChannels - 1) / C::kChannels);
  a->chunks = slices * C::kTaps, a->log_split = log_split, a->slabs = FastDiv(slabs), a->patches = 0;
  const int most = (a->chunks + parts - 1) >> log_split;
  if (a->chunks < parts || most > kMostChunks) return false;
  for (int part = 0; part < parts; ++part) {
    const int first = a->chunks * part >> log_split, end = a->chunks * (part + 1) >> log_split;
    a->patches = std::max(a->patches, C::patch_of(end - 1) + 1 - C::patch_of(first));
  }
  if (a->patches > kMostPatches) return false;
  auto total = [&](int log_buffers) {
    a->log_buffers = log_buffers;
    a->patches_at = most * C::kChunk;
    a->sums_at = a->patches_at + (a->patches << log_buffers) * C::kPatchPitch;
    a->bias_at = a->sums_at + kWarpgroups * C::kSums;
    a->barriers_at = a->bias_at + kWarpgroups * C::kChannels * 4;
    return a->barriers_at + kBarriers;
  };
  // Two buffers where more would keep the next launch off this one's multiprocessors.
  const int room = total(1) <= kHalf ? kHalf : kSharedLimit;
  if (total(2) > room && total(1) > room) return false;
  // Clusters of four and more leave some multiprocessors out.
  const int64_t clusters = (log_split < 2 ? device.sm_count : device.sm_count * 10 / 11) >> log_split;
  a->groups = static_cast<int>(std::clamp<int64_t>(clusters / slabs, 1, std::max<int64_t>(tiles, 1)));
  return true;
}

// The cut that a full list takes least with: each tile of a warpgroup takes as long, whatever its chunks, and without
// room for the next launch beside this one as much again. False: none fits. pays: is it faster than the other kernels?
// (Weights and limits are measured: docs/log/conv.md.)
template <class C>
bool choose(const Conv2dParams& p, const DeviceInfo& device, int64_t tiles, Args* a, bool* pays = nullptr) {
  double least = 0;
  int best = -1, rounds = 0;
  for (int log = kMostLog; log >= 0; --log) {
    if (!cut<C>(p, device, log, tiles, a)) continue;
    const int64_t each = (tiles + a->groups - 1) / a->groups;
    const int turns = static_cast<int>((each + kWarpgroups - 1) / kWarpgroups);
    const double cost = 0.6 * turns + (a->barriers_at + kBarriers > kHalf ? 0.7 : 0);
    if (best < 0 || cost < least) least = cost, best = log, rounds = turns;
  }
  const int most = C::kViews || a->chunks >= 48 ? 5 : 3;
  if (pays) *pays = a->chunks >= 15 ? rounds <= most : least < (a->chunks >= 8 ? 1.25 : 0.65);
  return best >= 0 && cut<C>(p, device, best, tiles, a);
}

int64_t tiles_of(const Conv2dParams& p) {
  const int64_t cell = p.weight.size[2] == 1 ? conv1x1_cell(p.active.grid) : 8;
  return (p.active.capacity * (p.active.grid.size[0] / cell) * (p.active.grid.size[1] / cell) * cell * cell + 63) / 64;
}

template <class F>
auto with_config(const Conv2dParams& p, const F& run) {
  auto of = [&](auto type) {
    using T = decltype(type);
    const bool narrow = channels_of(p) == 32;
    switch (shape_of(p)) {
      case 0:
        return narrow ? run(Config<T, 32, 1, 1>()) : run(Config<T, 64, 1, 1>());
      case 1:
        return narrow ? run(Config<T, 32, 9, 1>()) : run(Config<T, 64, 9, 1>());
      default:
        return narrow ? run(Config<T, 32, 9, 2>()) : run(Config<T, 64, 9, 2>());
    }
  };
  return p.x.dtype == DType::kBF16 ? of(__nv_bfloat16()) : of(__half());
}

template <class C>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t tiles = tiles_of(p);
  if (p.x.size[0] == 0 || (tiles == 0 && !has_fringe(p))) return ok_status();
  Args a = {};
  fill_common(p, &a);
  a.side = C::kTaps == 1 ? conv1x1_cell(p.active.grid) : 8;
  a.log_units = a.side == 8 ? 0 : 2;
  const int per_row = p.active.grid.size[1] / a.side;
  a.units_per_row = FastDiv(per_row), a.units_per_block = FastDiv(p.active.grid.size[0] / a.side * per_row);
  SBNET_CHECK(choose<C>(p, device, tiles, &a), "%s: plan (a bug): expected a layer that fits, got %d input channels",
              kOp, static_cast<int>(p.x.size[1]));
  Maps maps = {};
  for (int view = 0; view < (C::kViews ? 4 : 1); ++view)
    SBNET_TRY(plane_map(&maps.x[view], "x", p.x, C::kTaps == 1 ? a.side : C::kSide, C::kTaps == 1 ? a.side : C::kSide,
                        static_cast<int>(p.stride[0]), C::kViews && view < 2, C::kViews && view % 2 == 0));
  SBNET_TRY(tap_map(&maps.w, p, C::kChannels));
  constexpr auto kernel = conv_few_kernel<C>;
  SBNET_TRY(allow_most_shared<kernel>(device, kSharedLimit));
  const ClusterLaunch at((a.groups * static_cast<int64_t>(a.slabs.divisor)) << a.log_split, kThreads,
                         a.barriers_at + kBarriers, a.log_split, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&at.config, kernel, maps, a));
  return ok_status();
}

}  // namespace

bool conv_few_takes(const Conv2dParams& p, const DeviceInfo& device) {
  const int64_t C = p.x.size[1], K = p.weight.size[0];
  const bool pointwise = is_pixelwise(p);
  if (p.stride[0] > 2 || C < 64 || (!pointwise && p.weight.size[2] * p.weight.size[3] != 9)) return false;
  if (!pointwise && (p.weight.size[2] != 3 || p.padding[0] != 1)) return false;  // patches, which have a stride of 3
  const int64_t tiles = tiles_of(p);
  if (tiles == 0 || tiles > kMostTiles || (pointwise && K > C)) return false;
  Args a = {};
  bool pays = false;
  return with_config(p, [&](auto config) { return choose<decltype(config)>(p, device, tiles, &a, &pays); }) && pays;
}

Status conv_few(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  return with_config(p, [&](auto config) { return launch<decltype(config)>(p, device, stream); });
}

}  // namespace sbnet::sm90

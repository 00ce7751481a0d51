// Block-sparse 3x3 convolution for Hopper: y = activation(conv(x) + bias + residual) on the active blocks of y.
//
// Stride 1 (and 2 for few tiles of many channels, the rest of which is conv3x3_stride2.cu's), padding 1, fp16 or bf16
// with fp32 sums, channel-last. Persistent CTAs, one per SM, read the number of active blocks on the device. The input
// patch of a tile (with its halo, 64 channels at a time) is loaded once by TMA, zeros outside the plane, and serves all
// nine taps; see conv3x3_compute.cuh.
//
//   warps 0-15  four warpgroups: WGMMA and epilogue         conv3x3_compute.cuh
//   warp 16     schedule and input patches                  conv3x3_load.cuh
//   warp 17     weights
//   warps 18-19 zero the fringe
// Few cells of 128 to 512 channels: conv3x3_few.cuh, in the same launch, as the count says.
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv3x3_compute.cuh"
#include "cuda/sm90/conv/conv3x3_few.cuh"
#include "cuda/sm90/conv/conv3x3_load.cuh"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90 {
namespace {

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    conv3x3_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint32_t smem = smem_address(shared);
  pin(smem);
  auto* tiles = reinterpret_cast<typename C::Tile*>(shared + C::kTilesAt);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  if (lane == 0 && warp >= 16) {
    auto init = [&](int at, int n, int arrivals) {
#pragma unroll
      for (int i = 0; i < n; ++i) mbar_init(smem + at + 8 * i, arrivals);
    };
    if (warp == 16) {
      init(C::kPatchFull, C::kPatchStages, 1);
      init(C::kPatchEmpty, C::kPatchStages, 4 * C::kGroup);
      init(C::kExchangeFull, 1, 1);
      init(C::kExchangeDone, 1, 4);
      prefetch_map(maps.x);
    } else if (warp == 17) {
      init(C::kWeightFull, C::kWeightStages, 1);
      prefetch_map(&maps.w);
    } else if (warp == 18) {
      init(C::kWeightEmpty, C::kWeightStages, 4 * C::kGroup);
      prefetch_map(&maps.y);
    } else {
      init(C::kTileFull, C::kTileSlots, C::kUnits);
      init(C::kTileEmpty, C::kTileSlots, 4 * C::kGroup + (C::kResident ? 0 : 1));
      init(C::kResidualFull, kConsumers, 1);
      if constexpr (C::kFewLog > 0) Few<C>::init_barriers(smem);
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (a.log_cluster) cluster_arrive();  // who sends partial sums waits for it
  int few = 0;                          // cells, if they are few
  if constexpr (C::kFewLog > 0) {
    await_settled(a);
    const int cells = min(max(load_int(a.count), 0), a.capacity) * static_cast<int>(a.units_per_block.divisor);
    if (cells <= a.few_cells) few = cells;
  }
  // Every role calls grid_dependency_wait() before it touches feature maps, some in every CTA.
  if (warp < 16) {  // 640 threads start with 96 registers each
    registers_up<112>();
    if constexpr (C::kFewLog > 0) {
      if (few && warp < 4) return consume_few<C>(a, smem, shared, few);
      if (few) return;
    }
    consume<C>(a, maps, smem, shared, tiles);
  } else {
    registers_down<32>();
    if constexpr (C::kFewLog > 0) {
      if (few && warp == 16) return produce_few_patches<C>(a, &maps.x[1], smem, few);
      if (few && warp == 17) {
        if (lane == 0) produce_few_weights<C>(a, &maps.w, smem, few);
        return;
      }
    }
    if (warp == 16)
      produce_patches<C>(a, maps.x, smem, tiles);
    else if (warp == 17 && lane == 0)
      produce_weights<C>(a, &maps.w, smem, tiles);
    else if (warp >= 18) {
      take_turn();
      if (a.fringe) zero_fringe<typename C::T>(a);
    }
  }
}

// ---------------------------------------------------------------- host

template <class C>
struct Geometry {
  int per_row, per_block, ktiles;
  int64_t tiles;  // if every slot of the list is active
  explicit Geometry(const Conv2dParams& p)
      : per_row(p.active.grid.size[1] / C::kUnitWidth),
        per_block(p.active.grid.size[0] / C::kUnitHeight * per_row),
        ktiles(static_cast<int>((p.weight.size[0] + 63) / 64)),
        tiles((p.active.capacity * per_block + C::kUnits - 1) / C::kUnits * ktiles) {}
};

template <class C>
Status launch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const Geometry<C> geometry(p);
  const int slices = static_cast<int>((p.x.size[1] + 63) / 64);
  const bool fringe = has_fringe(p);
  if (p.x.size[0] == 0 || (geometry.tiles == 0 && !fringe)) return ok_status();

  // Clusters exist to share left-over tiles.
  int log_cluster = C::kFewLog ? C::kFewLog : C::kTurns && !C::kResident ? 1 : 0, clusters = 0;
  SBNET_TRY(clusters_that_fit<conv3x3_kernel<C>>(device, kThreads, C::kShared, &log_cluster, &clusters));
  const int log_launch = log_cluster, teams = clusters;
  if (log_cluster > 1) clusters <<= log_cluster - 1, log_cluster = 1;  // tiles are shared by two CTAs of them
  if (!C::kFewLog && !fringe && geometry.tiles * 2 < clusters) clusters = static_cast<int>(geometry.tiles * 2);

  Maps maps;
  const TensorView& residual = p.residual.data ? p.residual : p.y;
  for (int view = 0; view < C::kStride * C::kStride; ++view)  // odd rows and columns first, see conv3x3_load.cuh
    SBNET_TRY(plane_map(&maps.x[view], "x", p.x, C::kPatchWidth, C::kCells ? 1 : C::kPatchHeight, C::kStride,
                        C::kStride == 2 && view < 2, C::kStride == 2 && view % 2 == 0));
  SBNET_TRY(plane_map(&maps.y, "out", p.y, 8, C::kUnitHeight));
  SBNET_TRY(plane_map(&maps.y_pair, "out", p.y, 8, C::kCells ? 1 : 2));
  SBNET_TRY(plane_map(&maps.residual, "residual", residual, 8, C::kUnitHeight));
  SBNET_TRY(plane_map(&maps.residual_pair, "residual", residual, 8, C::kCells ? 1 : 2));
  SBNET_TRY(tap_map(&maps.w, p, 64));

  Args a = {};
  fill_common(p, &a);
  if (C::kResident && weights_by_hand(p.x.size[1])) a.weight = static_cast<const uint4*>(p.weight.data);
  a.C = static_cast<int>(p.x.size[1]);
  a.slices = slices;
  a.log_cluster = log_cluster;
  a.ktiles = FastDiv(geometry.ktiles);
  a.units_per_block = FastDiv(geometry.per_block);
  a.units_per_row = FastDiv(geometry.per_row);
  a.clusters = FastDiv(clusters);
  if constexpr (C::kFewLog > 0) {
    SBNET_TRY(plane_map(&maps.x[1], "x", p.x, 10, 10));
    a.few_groups = log_launch == C::kFewLog ? teams / geometry.ktiles : 0;
    // Of the longest sums two jobs each are still few; of the others one for half of the device: the rest is the next
    // launch's, which should be resident when this one ends.
    a.few_cells = C::kFewLog == 2 ? a.few_groups * 2 : a.few_groups / 2;
  }

  const ClusterLaunch launch(clusters << log_cluster, kThreads, C::kShared, log_launch, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, conv3x3_kernel<C>, maps, a));
  return ok_status();
}

// log2 of the CTAs that share a tile of few: each has the weights of 64 or 128 input channels.
inline int few_log(const Conv2dParams& p, const DeviceInfo& device) {
  const int64_t C = p.x.size[1], K = p.weight.size[0];
  if (K % 64 || (C != 128 && C != 256 && C != 512)) return 0;
  if (C < 512) return 1;
  // Clusters of four leave a tenth of the device idle: only where there is no work for all of it.
  const int64_t tiles =
      (p.active.capacity * (p.active.grid.size[0] / 8) * (p.active.grid.size[1] / 8) + 3) / 4 * (K / 64);
  return tiles * 2 <= device.sm_count ? 2 : 0;
}

// The table of cases: block sides and channel counts -> tile shape, weights resident or streamed.
template <class T>
Status dispatch(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const int64_t C = p.x.size[1], K = p.weight.size[0];
  if (p.stride[0] == 2) return launch<Config<T, Shape::kSquare, false, 4, 2>>(p, device, stream);
  const bool resident = C <= 64 && K <= 64;
  const int h = p.active.grid.size[0], w = p.active.grid.size[1];
  if (h % 16 != 0) {
    if (resident) return launch<Config<T, Shape::kCells, true, 4>>(p, device, stream);
    const int few = few_log(p, device);
    if (few == 1) return launch<Config<T, Shape::kCells, false, 4, 1, 1>>(p, device, stream);
    if (few == 2) return launch<Config<T, Shape::kCells, false, 4, 1, 2>>(p, device, stream);
    return launch<Config<T, Shape::kCells, false, 4>>(p, device, stream);
  }
  if (resident && C <= 32) return launch<Config<T, Shape::kStrip, true, 2>>(p, device, stream);
  if (resident) return launch<Config<T, Shape::kStrip, true, 4>>(p, device, stream);
  if (w % 16 != 0) return launch<Config<T, Shape::kStrip, false, 4>>(p, device, stream);
  return launch<Config<T, Shape::kSquare, false, 4>>(p, device, stream);
}

}  // namespace

Status conv3x3(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.stride[0] == 2 && conv3x3_stride2_pays(p, device)) return conv3x3_stride2(p, device, stream);
  return p.x.dtype == DType::kBF16 ? dispatch<__nv_bfloat16>(p, device, stream) : dispatch<__half>(p, device, stream);
}

}  // namespace sbnet::sm90

// Block-sparse matmul for many rows: tiles of 128 output features x 256 rows (or 128, where whole ones would not fill
// the device).
//
// The product is computed transposed, D[64 features, rows] += W^T x^T, so that a warpgroup's m64n256 covers one slice
// of 64 features. A CTA has two slices and walks the pieces of the reduction in which either has a block: the input
// tile [256 rows x 64] comes once, by TMA, and a slice without a block there does nothing. Weights of blocks of 64 and
// 128 are read by WGMMA from shared memory, in either direction as they are stored; smaller blocks go through
// registers, where an absent neighbour is zeros and costs nothing to load. CTAs of a cluster have neighbouring slices
// and the same rows: each loads its part of the input tile for both.
//
//   warps 0-3     producers, a stage each: records of the plan, TMA
//   warps 4-11    two warpgroups: WGMMA, bias, activation, TMA store
#include "cuda/sm90/matmul/launch.cuh"
#include "cuda/sm90/matmul/tiles.cuh"

namespace sbnet::sm90::matmul {
namespace {

constexpr int kRows = 256, kSlices = 2, kThreads = 384;
constexpr int kInput = kRows * 128, kSlice = 64 * 64 * 2, kStage = kInput + kSlices * kSlice;
constexpr int kStages = 4, kStaging = 64 * 128;  // a warpgroup has two staging buffers of 64 rows x 64 features
constexpr int kRing = 2 * kSlices * kStaging, kControl = kRing + kStages * kStage;
constexpr int kFull = kControl + 16 * kStages, kEmpty = kFull + 8 * kStages, kShared = kEmpty + 8 * kStages;
static_assert(kShared <= 227 * 1024 && kRing % 1024 == 0 && kStage % 1024 == 0);
static_assert(kStages == kProducers);

template <int kUnit>
constexpr int kSliceBoxes = (64 / kUnit) * (64 / kUnit);

// A warp's stage is its own: it alone loads it.
template <int kUnit>
__device__ __forceinline__ void produce(const TileArgs& a, const MatmulMaps& maps, uint32_t smem, uint8_t* shared) {
  constexpr int kIds = kSlices * kSliceBoxes<kUnit>, kBox = kUnit * kUnit * 2;
  const int lane = threadIdx.x & 31, rank = a.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int stage = __shfl_sync(~0u, threadIdx.x >> 5, 0), box_rows = kRows / 2 / a.cluster;
  const uint32_t everyone = (1u << a.cluster) - 1, at = smem + kRing + stage * kStage;
  const uint32_t full = smem + kFull + 8 * stage, empty = smem + kEmpty + 8 * stage;
  int4* control = reinterpret_cast<int4*>(shared + kControl) + stage;
  bool last = false;
  int phase = 1;
  grid_dependency_wait();
  for_steps<kIds, false, 1>(a, rank, stage, [&](const Step& step) {
    const uint32_t mask = __ballot_sync(~0u, step.box >= 0);
    mbar_wait(empty, phase);
    phase ^= 1;
    if (lane == 0) {
      *control = make_int4(static_cast<int>(mask), step.flags, step.row, step.feature + rank * kSlices * 64);
      if (step.piece < 0) {
        mbar_arrive(full);
      } else {
        const int boxes = step.flags & kHalf ? 1 : 2;  // of half a tile's rows, each CTA its part of them
        mbar_expect(full, boxes * (kInput / 2) + __popc(mask) * kBox);
        for (int i = 0; i < boxes; ++i) {
          const int row = i * (kRows / 2) + rank * box_rows;
          if (a.cluster == 1)
            tma_load(at + row * 128, &maps.x, full, step.piece, step.row + row);
          else
            tma_multicast(at + row * 128, &maps.x, full, step.piece, step.row + row, everyone);
        }
      }
    }
    __syncwarp();
    if (step.box >= 0) {
      const uint32_t to = at + kInput + lane * kBox;
      if constexpr (kUnit == 64)
        tma_load(to, &maps.weight, full, (step.box & 1) * 64, (step.box >> 2) * a.block_size + (step.box & 2) * 32);
      else
        tma_load(to, &maps.weight, full, 0, step.box * (kBox / 128));
    }
    last = step.flags & kEnd;
  });
  // The neighbours signal here: leave when the last of them has. (Nobody gives the end back.)
  if (!last) mbar_wait(empty, phase);
}

template <class T, int kUnit, bool kTransposed>
__device__ __forceinline__ void consume(const TileArgs& a, const MatmulMaps& maps, uint32_t smem, uint8_t* shared) {
  constexpr int kBoxes = kSliceBoxes<kUnit>;
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  const int4* control = reinterpret_cast<const int4*>(shared + kControl);
  const uint32_t staging = smem + wg * 2 * kStaging, slice = smem + kRing + kInput + wg * kSlice;
  const uint32_t weights = operand(slice), input = operand(smem + kRing);
  // From one 16-deep step of the reduction to the next, >> 4.
  auto release = [&](int stage) {
    __syncwarp();  // all lanes have read the stage's control word
    if (a.cluster == 1) {
      if (lane == 0) mbar_arrive(smem + kEmpty + 8 * stage);
    } else if (lane < a.cluster) {
      mbar_arrive_at(smem + kEmpty + 8 * stage, lane);
    }
  };
  grid_dependency_wait();
  int stage = 0, phase = 0, chunk = 0;
  auto next_control = [&] {
    mbar_wait(smem + kFull + 8 * stage, phase);
    int4 c = control[stage];
    c.x = __shfl_sync(~0u, c.x, 0), c.y = __shfl_sync(~0u, c.y, 0);  // the compiler sees: one value for the warp
    return c;
  };
  // A tile of kN rows. Sums of its own: sharing registers between two widths would make ptxas serialise WGMMA.
  auto compute = [&](auto rows) {
    constexpr int kN = decltype(rows)::value;
    float sums[kN / 2] = {};
    int4 c;
    int held = -1;  // a stage that WGMMA still reads, released one record later
    do {
      c = next_control();
      const uint32_t mask = static_cast<uint32_t>(c.x) >> (wg * kBoxes) & ((1u << kBoxes) - 1);
      const uint32_t at = stage * (kStage >> 4);
      if (!mask) {
        if (held >= 0) {
          wgmma_wait<0>();
          release(held);
          held = -1;
        }
        release(stage);
      } else if constexpr (kUnit == 64) {
        multiply_whole<T, kN, kTransposed>(sums, weights + at, input + at);
        if (held >= 0) {
          wgmma_wait<1>();
          release(held);
        }
        held = stage;
      } else {
        uint32_t pieces[4][4];
        load_piece<kUnit, kTransposed>(slice + stage * kStage, mask, pieces);
        multiply_piece<T, kUnit, kN>(sums, pieces, wgmma_layout(1024) | (input + at), mask);
        wgmma_wait<0>();
        release(stage);
      }
      if (++stage == kStages) stage = 0, phase ^= 1;
    } while (!(c.y & kLast));
    wgmma_wait<0>();
    if (held >= 0) release(held);
    const Bias bias = load_bias<T>(a, c.w + wg * 64);
    // Not unrolled, by moving the sums down: the code of every activation stands once, not for each 64 rows.
#pragma unroll 1
    for (int row = c.z; row < c.z + kN; row += 64, ++chunk) {
      const uint32_t buffer = staging + (chunk & 1) * kStaging;
      if (leader) tma_store_wait_read<1>();
      bar_sync(1 + wg, 128);
      stage_sums<T, 64>(a, sums, bias, buffer);
      fence_async_proxy();
      bar_sync(1 + wg, 128);
      if (leader) {
        tma_store(&maps.y, buffer, c.w + wg * 64, row);
        tma_store_commit();
      }
#pragma unroll
      for (int e = 0; e < kN / 2 - 32; ++e) sums[e] = sums[e + 32];
    }
  };
  for (;;) {
    const int flags = next_control().y;
    if (flags & kEnd) break;
    if (flags & kHalf)
      compute(std::integral_constant<int, kRows / 2>());
    else
      compute(std::integral_constant<int, kRows>());
  }
  if (leader) tma_store_wait_read();
}

template <class T, int kUnit, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_wide_kernel(const __grid_constant__ MatmulMaps maps, const __grid_constant__ TileArgs a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  begin<kStages>(maps, a, smem + kFull, smem + kEmpty, 8 * a.cluster, [] {});
  if (warp >= 4) {
    registers_up<208>();
    consume<T, kUnit, kTransposed>(a, maps, smem, shared);
  } else {
    registers_down<88>();
    produce<kUnit>(a, maps, smem, shared);
  }
}

}  // namespace

Status launch_wide(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return dispatch(p, [&](auto type, auto unit, auto transposed) {
    constexpr auto kKernel = matmul_wide_kernel<decltype(type), decltype(unit)::value, decltype(transposed)::value>;
    const TilePlan plan = wide_plan(p.layout.shape, p.transposed);
    const int log_cluster = plan.cluster / 2;
    int workers = 0;
    SBNET_TRY(workers_of<kKernel>(kMatmulOp, device, kThreads, kShared, log_cluster, &workers));
    const TileArgs args = tile_args(p, plan, kRows, workers);
    MatmulMaps maps;
    SBNET_TRY(make_maps(p, kRows / 2 / plan.cluster, 64, &maps));
    const ClusterLaunch launch(int64_t{std::min(workers, args.units)} << log_cluster, kThreads, kShared, log_cluster,
                               stream);
    SBNET_CUDA_TRY(kMatmulOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, args));
    return ok_status();
  });
}

}  // namespace sbnet::sm90::matmul

// Block-sparse matmul for few rows (decoding): tiles of 64 output features x 16 or 64 rows. All is about reading the
// weights once, at the rate of memory, on every SM.
//
// D[64 features, rows] += W^T x^T as in wide.cu. A tile's records are shared out, in turn, among the two warpgroups of
// a CTA and, where there are fewer tiles than SMs, among the CTAs of a cluster; the sums meet in shared memory and are
// added in a fixed order.
//
//   warps 0-3     producers, a stage each in turn: records of the plan, TMA
//   warps 4-7     WGMMA; adds the sums of all, bias, activation, TMA store
//   warps 8-11    WGMMA
#include "cuda/sm90/matmul/launch.cuh"
#include "cuda/sm90/matmul/tiles.cuh"

namespace sbnet::sm90::matmul {
namespace {

constexpr int kThreads = 384, kWeights = 64 * 64 * 2, kMostCtas = 4;  // of a cluster

template <int kRows>
struct Shared {
  static constexpr int kInput = kRows * 128, kStage = kInput + kWeights, kSums = 64 * kRows * 4, kStaging = kRows * 128;
  static constexpr int kStages = kRows == 64 ? 8 : 16;  // even: stages of a warpgroup are every other one
  static constexpr int kRing = 2 * kStaging, kSumsAt = kRing + kStages * kStage;  // a slot for each other share
  static constexpr int kControl = kSumsAt + kMostCtas * kSums, kFull = kControl + 16 * kStages;
  static constexpr int kEmpty = kFull + 8 * kStages, kSumsFull = kEmpty + 8 * kStages, kSumsEmpty = kSumsFull + 8;
  static constexpr int kBytes = kSumsEmpty + 8;
  static_assert(kBytes <= 227 * 1024 && kRing % 1024 == 0 && kStage % 1024 == 0 && kStages % kProducers == 0);
};

// A warp loads every fourth stage.
template <int kUnit, int kRows>
__device__ __forceinline__ void produce(const TileArgs& a, const MatmulMaps& maps, uint32_t smem, uint8_t* shared) {
  using S = Shared<kRows>;
  constexpr int kIds = (64 / kUnit) * (64 / kUnit), kBox = kUnit * kUnit * 2;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  int4* control = reinterpret_cast<int4*>(shared + S::kControl);
  int stage = warp, phase = 1;
  const int input_bytes = min(a.rows, kRows) * 128;
  grid_dependency_wait();
  const int rank = a.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  for_steps<kIds, true, 2>(a, rank, warp, [&](const Step& step) {
    const uint32_t mask = __ballot_sync(~0u, step.box >= 0), at = smem + S::kRing + stage * S::kStage;
    const uint32_t full = smem + S::kFull + 8 * stage;
    mbar_wait(smem + S::kEmpty + 8 * stage, phase);
    if (lane == 0) {
      control[stage] = make_int4(static_cast<int>(mask), step.flags, step.row, step.feature);
      if (step.piece < 0) {
        mbar_arrive(full);
      } else {
        mbar_expect(full, input_bytes + __popc(mask) * kBox);
        tma_load(at, &maps.x, full, step.piece, step.row);
      }
    }
    __syncwarp();
    if (step.box >= 0) {
      const uint32_t to = at + S::kInput + lane * kBox;
      if constexpr (kUnit == 64)
        tma_load(to, &maps.weight, full, (step.box & 1) * 64, (step.box >> 2) * a.block_size + (step.box & 2) * 32);
      else
        tma_load(to, &maps.weight, full, 0, step.box * (kBox / 128));
    }
    if ((stage += kProducers) >= S::kStages) stage -= S::kStages, phase ^= 1;
  });
}

// Adds the sums in `slots` (of kSums bytes each, as put_sums() left them) to this thread's.
template <int kSums>
__device__ __forceinline__ void add_sums(float (&sums)[kSums], uint32_t slots, int count) {
  for (int s = 0; s < count; ++s, slots += kSums * 4 * 128)
#pragma unroll
    for (int e = 0; e < kSums; e += 4) {
      const float4 v = load_shared(slots + e * 4 * 128 + (threadIdx.x & 127) * 16);
      sums[e] += v.x, sums[e + 1] += v.y, sums[e + 2] += v.z, sums[e + 3] += v.w;
    }
}

template <class T, int kUnit, bool kTransposed, int kRows>
__device__ __forceinline__ void consume(const TileArgs& a, const MatmulMaps& maps, uint32_t smem, uint8_t* shared) {
  using S = Shared<kRows>;
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1, lane = threadIdx.x & 31, tid = threadIdx.x & 127;
  const int rank = a.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const bool leader = tid == 0;
  const int4* control = reinterpret_cast<const int4*>(shared + S::kControl);
  const uint32_t weights = operand(smem + S::kRing + S::kInput), input = operand(smem + S::kRing);
  constexpr uint32_t kWeightStep = (kTransposed ? 32 : 16 * 128) >> 4, kInputStep = 32 >> 4;
  const uint32_t slots = smem + S::kSumsAt, sums_full = smem + S::kSumsFull, sums_empty = smem + S::kSumsEmpty;
  grid_dependency_wait();
  int stage = wg, phase = 0, tile = 0;
  for (;; ++tile) {
    float sums[kRows / 2] = {};
    int4 c;
    do {
      mbar_wait(smem + S::kFull + 8 * stage, phase);
      c = control[stage];
      c.x = __shfl_sync(~0u, c.x, 0), c.y = __shfl_sync(~0u, c.y, 0);
      if (c.x) {
        const uint32_t at = stage * (S::kStage >> 4);
        if constexpr (kUnit == 64) {
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k)
            multiply_add<T, kRows, !kTransposed, false>(sums, wgmma_layout(1024) | (weights + at + k * kWeightStep),
                                                        wgmma_layout(1024) | (input + at + k * kInputStep));
          wgmma_commit();
        } else {
          uint32_t pieces[4][4];
          load_piece<kUnit, kTransposed>(smem + S::kRing + S::kInput + stage * S::kStage, c.x, pieces);
          multiply_piece<T, kUnit, kRows>(sums, pieces, wgmma_layout(1024) | (input + at), c.x);
        }
        wgmma_wait<0>();
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(smem + S::kEmpty + 8 * stage);
      if ((stage += 2) >= S::kStages) stage -= S::kStages, phase ^= 1;
    } while (!(c.y & kLast));
    if (c.y & kEnd) break;

    if (wg == 1) {
#pragma unroll
      for (int e = 0; e < kRows / 2; e += 4)
        store_shared(slots + e * 4 * 128 + tid * 16, sums[e], sums[e + 1], sums[e + 2], sums[e + 3]);
      bar_sync(1, 256);
      bar_sync(2, 256);  // and they have been added
      continue;
    }
    bar_sync(1, 256);
    add_sums(sums, slots, 1);
    bar_sync(2, 256);
    if (rank > 0) {  // to the first CTA of the cluster, which finishes the tile
      if (tile > 0) mbar_wait(sums_empty, (tile - 1) & 1);
      const uint32_t to = map_to_rank(slots + rank * S::kSums + tid * 16, 0), bar = map_to_rank(sums_full, 0);
#pragma unroll
      for (int e = 0; e < kRows / 2; e += 4)
        store_async(to + e * 4 * 128, bar, sums[e], sums[e + 1], sums[e + 2], sums[e + 3]);
      continue;
    }
    if (a.cluster > 1) {
      if (leader) mbar_expect(sums_full, (a.cluster - 1) * S::kSums);
      mbar_wait(sums_full, tile & 1);
      add_sums(sums, slots + S::kSums, a.cluster - 1);
      bar_sync(3, 128);
      if (tid > 0 && tid < a.cluster) mbar_arrive_at(sums_empty, tid);
    }
    const Bias bias = load_bias<T>(a, c.w);
    const uint32_t buffer = smem + (tile & 1) * S::kStaging;
    if (leader) tma_store_wait_read<1>();
    bar_sync(3, 128);
    stage_sums<T, kRows>(a, sums, bias, buffer);
    fence_async_proxy();
    bar_sync(3, 128);
    if (leader) {
      tma_store(&maps.y, buffer, c.w, c.z);
      tma_store_commit();
    }
  }
  if (wg == 0 && leader) {
    tma_store_wait_read();
    if (rank > 0 && tile > 0) mbar_wait(sums_empty, (tile - 1) & 1);  // no signal comes here after that
  }
}

template <class T, int kUnit, bool kTransposed, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_narrow_kernel(const __grid_constant__ MatmulMaps maps, const __grid_constant__ TileArgs a) {
  using S = Shared<kRows>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  begin<S::kStages>(maps, a, smem + S::kFull, smem + S::kEmpty, 4,
                    [&] { mbar_init(smem + S::kSumsFull, 1), mbar_init(smem + S::kSumsEmpty, 1); });
  if (warp >= 4)
    consume<T, kUnit, kTransposed, kRows>(a, maps, smem, shared);
  else
    produce<kUnit, kRows>(a, maps, smem, shared);
}

template <int kRows>
Status launch(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return dispatch(p, [&](auto type, auto unit, auto transposed) {
    constexpr auto kKernel =
        matmul_narrow_kernel<decltype(type), decltype(unit)::value, decltype(transposed)::value, kRows>;
    constexpr int kBytes = Shared<kRows>::kBytes;
    const int log_cluster = narrow_log_cluster(p, device.sm_count);
    int workers = 0;
    SBNET_TRY(workers_of<kKernel>(kMatmulOp, device, kThreads, kBytes, log_cluster, &workers));
    TileArgs args = tile_args(p, narrow_plan(p.layout.shape, p.transposed), kRows, workers);
    args.cluster = 1 << log_cluster;
    args.whole = args.units = args.items;  // no halves
    MatmulMaps maps;
    // Boxes of the rows there are: TMA takes longer to fill what lies beyond them than to copy.
    const int box_rows = std::min(args.rows, kRows);
    SBNET_TRY(make_maps(p, box_rows, box_rows, &maps));
    const ClusterLaunch launch(int64_t{std::min(workers, args.items)} << log_cluster, kThreads, kBytes, log_cluster,
                               stream);
    SBNET_CUDA_TRY(kMatmulOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, args));
    return ok_status();
  });
}

}  // namespace

int narrow_log_cluster(const BlocksparseMatmulParams& p, int sm_count) {
  const int64_t rows = rows_of(p.x), tile = rows <= 16 ? 16 : 64;
  const int64_t items = narrow_plan(p.layout.shape, p.transposed).groups * ((rows + tile - 1) / tile);
  return items * 4 <= sm_count ? 2 : items * 2 <= sm_count ? 1 : 0;
}

Status launch_narrow(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return rows_of(p.x) <= 16 ? launch<16>(p, device, stream) : launch<64>(p, device, stream);
}

}  // namespace sbnet::sm90::matmul

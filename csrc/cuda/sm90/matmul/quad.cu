// Block-sparse matmul for the pixels of active blocks: tiles of 128 output features x 256 pixels.
//
// D[64 features, 128 pixels] += W^T x^T as in wide.cu, by four warpgroups, two slices of features by two halves of the
// pixels. Reductions are short here, and four warpgroups overlap one another's epilogues.
//
//   warps 0-3     producers, a stage each: records of the plan, TMA
//   warps 4-19    four warpgroups: WGMMA, bias, activation, TMA store
#include "cuda/sm90/matmul/launch.cuh"
#include "cuda/sm90/matmul/tiles.cuh"

namespace sbnet::sm90::matmul {
namespace {

constexpr int kThreads = 640, kWarpgroups = 4, kStages = 4, kN = 128;  // rows of a warpgroup
constexpr int kSlices = 2, kRows = kN * kWarpgroups / kSlices, kSlice = 64 * 64 * 2, kChunk = 64,
              kStaging = kChunk * 128;
static_assert(kStages == kProducers);

template <int kUnit>
struct Shared {
  static constexpr int kInput = kRows * 128, kStage = kInput + kSlices * kSlice;
  static constexpr int kRing = kWarpgroups * kStaging, kControl = kRing + kStages * kStage;
  static constexpr int kFull = kControl + 16 * kStages, kEmpty = kFull + 8 * kStages;
  static constexpr int kBytes = kEmpty + 8 * kStages;
  static constexpr int kBoxes = (64 / kUnit) * (64 / kUnit);  // of a slice
  static_assert(kBytes <= 227 * 1024 && kRing % 1024 == 0 && kStage % 1024 == 0);
};

// The rows of active blocks.
struct QuadRows {
  const int32_t *blocks, *count;
  int capacity, box_rows;  // box_rows: of a box of the input
  int area, block_h, block_w, grid_h, grid_w, batch;
};

// Where a row of x or y lies. Outside of the plane, which TMA reads as zeros and does not write, for rows that are
// none.
struct Pixel {
  int x, y, n;
};
__device__ __forceinline__ Pixel pixel_of(const QuadRows& rows, int count, int row) {
  const int slot = row / rows.area, within = row - slot * rows.area;
  if (slot >= count) return {0, 0, rows.batch};
  const int n = load_int(rows.blocks + slot * 3), i = load_int(rows.blocks + slot * 3 + 1);
  const int j = load_int(rows.blocks + slot * 3 + 2);
  const bool inside = static_cast<unsigned>(n) < static_cast<unsigned>(rows.batch) &&
                      static_cast<unsigned>(i) < static_cast<unsigned>(rows.grid_h) &&
                      static_cast<unsigned>(j) < static_cast<unsigned>(rows.grid_w);
  if (!inside) return {0, 0, rows.batch};
  return {j * rows.block_w, i * rows.block_h + within / rows.block_w, n};
}
__device__ __forceinline__ int active_count(const QuadRows& rows) {
  return min(max(load_int(rows.count), 0), rows.capacity);
}

// A warp's stage is its own: it alone loads it.
template <int kUnit>
__device__ __forceinline__ void produce(const TileArgs& args, const QuadRows& rows, const MatmulMaps& maps,
                                        uint32_t smem, uint8_t* shared) {
  using S = Shared<kUnit>;
  constexpr int kIds = kSlices * S::kBoxes, kBox = kUnit * kUnit * 2;
  const int lane = threadIdx.x & 31, rank = args.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int stage = __shfl_sync(~0u, threadIdx.x >> 5, 0), boxes = kRows / rows.box_rows;
  const uint32_t everyone = (1u << args.cluster) - 1, at = smem + S::kRing + stage * S::kStage;
  const uint32_t full = smem + S::kFull + 8 * stage, empty = smem + S::kEmpty + 8 * stage;
  int4* control = reinterpret_cast<int4*>(shared + S::kControl) + stage;
  bool last = false;
  int phase = 1, known = -1;  // the row whose pixels `from` is
  Pixel from = {};            // of this lane's box of the input
  grid_dependency_wait();
  TileArgs a = args;
  const int count = active_count(rows);
  a.rows = count * rows.area;
  a.tiles = (a.rows + kRows - 1) / kRows;
  a.items = a.whole = a.units = a.groups * a.tiles;
  for_steps<kIds, false, 1>(a, rank, stage, [&](const Step& step) {
    const uint32_t mask = __ballot_sync(~0u, step.box >= 0);
    if (step.row != known && lane < boxes) from = pixel_of(rows, count, step.row + lane * rows.box_rows);
    known = step.row;
    mbar_wait(empty, phase);
    phase ^= 1;
    if (lane == 0) {
      *control = make_int4(static_cast<int>(mask), step.flags, step.row, step.feature + rank * kSlices * 64);
      if (step.piece < 0)
        mbar_arrive(full);
      else
        mbar_expect(full, S::kInput + __popc(mask) * kBox);
    }
    __syncwarp();
    if (step.piece >= 0 && lane < boxes) {  // each CTA its share of the boxes
      const uint32_t to = at + lane * rows.box_rows * 128;
      if (a.cluster == 1)
        tma_load(to, &maps.x, full, step.piece, from.x, from.y, from.n);
      else if ((lane & (a.cluster - 1)) == rank)
        multicast_pixels(to, &maps.x, full, step.piece, from.x, from.y, from.n, everyone);
    }
    if (const int box = step.box; box >= 0) {
      const uint32_t to = at + S::kInput + lane * kBox;
      if constexpr (kUnit == 64)
        tma_load(to, &maps.weight, full, (box & 1) * 64, (box >> 2) * a.block_size + (box & 2) * 32);
      else
        tma_load(to, &maps.weight, full, 0, box * (kBox / 128));
    }
    last = step.flags & kEnd;
  });
  // The neighbours signal here: leave when the last of them has. (Nobody gives the end back.)
  if (!last) mbar_wait(empty, phase);
}

template <class T, int kUnit, bool kTransposed>
__device__ __forceinline__ void consume(const TileArgs& a, const QuadRows& rows, const MatmulMaps& maps, uint32_t smem,
                                        uint8_t* shared) {
  using S = Shared<kUnit>;
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1, lane = threadIdx.x & 31;
  const int slice = wg % kSlices, first_row = wg / kSlices * kN;
  const bool leader = (threadIdx.x & 127) == 0;
  const int4* control = reinterpret_cast<const int4*>(shared + S::kControl);
  const uint32_t staging = smem + wg * kStaging, boxes = smem + S::kRing + S::kInput + slice * kSlice;
  const uint32_t weights = operand(boxes), input = operand(smem + S::kRing + first_row * 128);
  // From one 16-deep step of the reduction to the next, >> 4.
  const auto release = [&](int stage) {
    __syncwarp();  // all lanes have read the stage's control word
    if (a.cluster == 1) {
      if (lane == 0) mbar_arrive(smem + S::kEmpty + 8 * stage);
    } else if (lane < a.cluster) {
      mbar_arrive_at(smem + S::kEmpty + 8 * stage, lane);
    }
  };
  grid_dependency_wait();
  const int count = active_count(rows);
  int stage = 0, phase = 0;
  for (;;) {
    float sums[kN / 2] = {};
    int4 c;
    do {
      mbar_wait(smem + S::kFull + 8 * stage, phase);
      c = control[stage];
      c.x = __shfl_sync(~0u, c.x, 0), c.y = __shfl_sync(~0u, c.y, 0);  // the compiler sees: one value for the warp
      const uint32_t mask = static_cast<uint32_t>(c.x) >> (slice * S::kBoxes) & ((1u << S::kBoxes) - 1);
      if (mask) {
        const uint32_t at = stage * (S::kStage >> 4);
        if constexpr (kUnit == 64) {
          multiply_whole<T, kN, kTransposed>(sums, weights + at, input + at);
        } else {
          uint32_t pieces[4][4];
          load_piece<kUnit, kTransposed>(boxes + stage * S::kStage, mask, pieces);
          multiply_piece<T, kUnit, kN>(sums, pieces, wgmma_layout(1024) | (input + at), mask);
        }
        wgmma_wait<0>();
      }
      if (c.y & kEnd) break;
      release(stage);
      if (++stage == kStages) stage = 0, phase ^= 1;
    } while (!(c.y & kLast));
    if (c.y & kEnd) break;
    const int feature = c.w + slice * 64;
    const Bias bias = load_bias<T>(a, feature);
    // Not unrolled, by moving the sums down: the code of every activation stands once.
#pragma unroll 1
    for (int chunk = 0; chunk < kN; chunk += kChunk) {
      Pixel to = {};
      if (leader) {
        to = pixel_of(rows, count, c.z + first_row + chunk);
        tma_store_wait_read();
      }
      bar_sync(1 + wg, 128);
      stage_sums<T, kChunk>(a, sums, bias, staging);
      fence_async_proxy();
      bar_sync(1 + wg, 128);
      if (leader) {
        sm90::tma_store(&maps.y, staging, feature, to.x, to.y, to.n);
        tma_store_commit();
      }
#pragma unroll
      for (int e = 0; e < kN / 4; ++e) sums[e] = sums[e + kN / 4];
    }
  }
  if (leader) tma_store_wait_read();
}

template <class T, int kUnit, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1)
    matmul_quad_kernel(const __grid_constant__ MatmulMaps maps, const __grid_constant__ TileArgs a,
                       const __grid_constant__ QuadRows rows) {
  using S = Shared<kUnit>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t smem = smem_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  begin<kStages>(maps, a, smem + S::kFull, smem + S::kEmpty, 4 * kWarpgroups * a.cluster, [] {});
  if (warp >= 4) {
    registers_up<112>();
    consume<T, kUnit, kTransposed>(a, rows, maps, smem, shared);
  } else {
    registers_down<32>();
    produce<kUnit>(a, rows, maps, smem, shared);
  }
}

}  // namespace

// Rows of a box of the input that lie side by side in a block: 0 if some chunk of 64 would not.
int quad_box_rows(const BlockGrid& grid, int most) {
  const int h = grid.size[0], w = grid.size[1];
  for (int rows = most; rows >= kChunk; rows /= 2)
    if (w <= kChunk && kChunk % w == 0 && h % (rows / w) == 0) return rows;
  return 0;
}

Status launch_quad(const BlocksparseMatmulParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return dispatch(p, [&](auto type, auto unit, auto transposed) {
    constexpr int kUnit = decltype(unit)::value;
    using S = Shared<kUnit>;
    constexpr auto kKernel = matmul_quad_kernel<decltype(type), kUnit, decltype(transposed)::value>;
    const TilePlan plan = wide_plan(p.layout.shape, p.transposed);
    const int log_cluster = plan.cluster / 2;
    int workers = 0;
    SBNET_TRY(workers_of<kKernel>(kMatmulOp, device, kThreads, S::kBytes, log_cluster, &workers));
    TileArgs args = tile_args(p, plan, kRows, workers);
    args.whole = args.units = args.items;  // no halves
    const BlockGrid& grid = p.active.grid;
    const QuadRows rows = {p.active.indices,
                           p.active.count,
                           static_cast<int>(p.active.capacity),
                           quad_box_rows(grid, kRows / 2),
                           grid.size[0] * grid.size[1],
                           grid.size[0],
                           grid.size[1],
                           grid.count[0],
                           grid.count[1],
                           static_cast<int>(p.y.size[0])};
    MatmulMaps maps;
    SBNET_TRY(plane_map(&maps.x, "x", p.x, rows.block_w, rows.box_rows / rows.block_w));
    SBNET_TRY(plane_map(&maps.y, "out", p.y, rows.block_w, kChunk / rows.block_w));
    SBNET_TRY(
        matrix_map(&maps.weight, kMatmulOp, "weight", weight_matrix(p), weight_box_rows(p.layout.shape.block_size)));
    const ClusterLaunch launch(int64_t{std::min(workers, args.items)} << log_cluster, kThreads, S::kBytes, log_cluster,
                               stream);
    SBNET_CUDA_TRY(kMatmulOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, args, rows));
    return ok_status();
  });
}

}  // namespace sbnet::sm90::matmul

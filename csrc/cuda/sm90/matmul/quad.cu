// Block-sparse matmul for many rows with blocks below 64, and for the pixels of active blocks with blocks of any size:
// tiles of 256 output features x 128 rows (with blocks of 64 and 128: 128 x 256).
//
// D[64 features, 128 rows] += W^T x^T as in wide.cu, by four warpgroups. Weights of small blocks go through registers,
// so that a record is a chain: wait, load fragments, multiply, wait. Four chains at a time hide one another. And of the
// bytes that a record moves the input is the part that zeros do not shrink: many outputs and few rows to a tile, and
// pairs of CTAs with neighbouring outputs that load half of the input each, for both.
//
//   warps 0-3     producers, a stage each: records of the plan, TMA
//   warps 4-19    four warpgroups: WGMMA, bias, activation, TMA store
#include "cuda/sm90/matmul/launch.cuh"
#include "cuda/sm90/matmul/tiles.cuh"

namespace sbnet::sm90::matmul {
namespace {

constexpr int kThreads = 640, kWarpgroups = 4, kStages = 4, kN = 128;  // rows of a warpgroup
constexpr int kSlice = 64 * 64 * 2, kChunk = 64, kStaging = kChunk * 128;
static_assert(kStages == kProducers);

template <int kUnit>
struct Shared {
  static constexpr int kSlices = wide_slices(kUnit), kRows = kN * kWarpgroups / kSlices;
  static constexpr int kInput = kRows * 128, kStage = kInput + kSlices * kSlice;
  static constexpr int kRing = kWarpgroups * kStaging, kControl = kRing + kStages * kStage;
  static constexpr int kFull = kControl + 16 * kStages, kEmpty = kFull + 8 * kStages;
  static constexpr int kBytes = kEmpty + 8 * kStages;
  static constexpr int kBoxes = (64 / kUnit) * (64 / kUnit);  // of a slice
  static_assert(kBytes <= 227 * 1024 && kRing % 1024 == 0 && kStage % 1024 == 0);
};

// The rows of active blocks; blocks null: those of a matrix.
struct QuadRows {
  const int32_t *blocks, *count;
  int capacity, box_rows;  // box_rows: of a box of the input
  int area, block_h, block_w, grid_h, grid_w, batch;
};

// Where a row of x or y lies: (row, 0, 0) of a matrix, or the pixel of an active block. Outside of the plane, which TMA
// reads as zeros and does not write, for rows that are none.
struct Pixel {
  int x, y, n;
};
__device__ __forceinline__ Pixel pixel_of(const QuadRows& rows, int count, int row) {
  if (!rows.blocks) return {row, 0, 0};
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
  return rows.blocks ? min(max(load_int(rows.count), 0), rows.capacity) : 0;
}

// A warp's stage is its own: it alone loads it.
template <int kUnit>
__device__ __forceinline__ void produce(const TileArgs& args, const QuadRows& rows, const MatmulMaps& maps,
                                        uint32_t smem, uint8_t* shared) {
  using S = Shared<kUnit>;
  constexpr int kIds = S::kSlices * S::kBoxes, kBox = kUnit * kUnit * 2;
  const int lane = threadIdx.x & 31, rank = args.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int stage = __shfl_sync(~0u, threadIdx.x >> 5, 0), boxes = S::kRows / rows.box_rows;
  const uint32_t everyone = (1u << args.cluster) - 1, at = smem + S::kRing + stage * S::kStage;
  const uint32_t full = smem + S::kFull + 8 * stage, empty = smem + S::kEmpty + 8 * stage;
  int4* control = reinterpret_cast<int4*>(shared + S::kControl) + stage;
  bool last = false;
  int phase = 1, known = -1;  // the row whose pixels `from` is
  Pixel from = {};            // of this lane's box of the input
  grid_dependency_wait();
  TileArgs a = args;
  const int count = active_count(rows);
  if (rows.blocks) {
    a.rows = count * rows.area;
    a.tiles = (a.rows + S::kRows - 1) / S::kRows;
    a.items = a.whole = a.units = a.groups * a.tiles;
  }
  for_steps<kIds, false, 1>(a, rank, stage, [&](const auto& step) {
    uint32_t mask[2] = {};
#pragma unroll
    for (int i = 0; i < (kIds + 31) / 32; ++i) mask[i] = __ballot_sync(~0u, step.box[i] >= 0);
    if (step.row != known && lane < boxes) from = pixel_of(rows, count, step.row + lane * rows.box_rows);
    known = step.row;
    mbar_wait(empty, phase);
    phase ^= 1;
    if (lane == 0) {
      *control = make_int4(static_cast<int>(mask[0]), static_cast<int>(mask[1]), step.row,
                           (step.feature + rank * S::kSlices * 64) | step.flags);
      if (step.piece < 0)
        mbar_arrive(full);
      else
        mbar_expect(full, S::kInput + (__popc(mask[0]) + __popc(mask[1])) * kBox);
    }
    __syncwarp();
    if (step.piece >= 0 && lane < boxes) {  // each CTA its share of the boxes
      const uint32_t to = at + lane * rows.box_rows * 128;
      if (a.cluster == 1)
        tma_load(to, &maps.x, full, step.piece, from.x, from.y, from.n);
      else if ((lane & (a.cluster - 1)) == rank)
        tma_multicast(to, &maps.x, full, step.piece, from.x, from.y, from.n, everyone);
    }
#pragma unroll
    for (int i = 0; i < (kIds + 31) / 32; ++i) {
      const int box = step.box[i];
      if (box < 0) continue;
      const uint32_t to = at + S::kInput + (lane + i * 32) * kBox;
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
  const int slice = wg % S::kSlices, first_row = wg / S::kSlices * kN;
  const bool leader = (threadIdx.x & 127) == 0;
  const int4* control = reinterpret_cast<const int4*>(shared + S::kControl);
  const uint32_t staging = smem + wg * kStaging, boxes = smem + S::kRing + S::kInput + slice * kSlice;
  const uint32_t weights = operand(boxes), input = operand(smem + S::kRing + first_row * 128);
  // From one 16-deep step of the reduction to the next, >> 4.
  constexpr uint32_t kWeightStep = (kTransposed ? 32 : 16 * 128) >> 4, kInputStep = 32 >> 4;
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
    int row, at_feature;
    do {
      mbar_wait(smem + S::kFull + 8 * stage, phase);
      const int4 c = control[stage];
      const uint32_t low = __shfl_sync(~0u, c.x, 0), high = __shfl_sync(~0u, c.y, 0);  // one value for the warp
      row = c.z, at_feature = __shfl_sync(~0u, c.w, 0);
      const uint32_t mask = static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (slice * S::kBoxes)) &
                            ((1u << S::kBoxes) - 1);
      if (mask) {
        const uint32_t at = stage * (S::kStage >> 4);
        if constexpr (kUnit == 64) {
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k)
            multiply_add<T, kN, !kTransposed, false>(sums, wgmma_layout(1024) | (weights + at + k * kWeightStep),
                                                     wgmma_layout(1024) | (input + at + k * kInputStep));
          wgmma_commit();
        } else {
          uint32_t pieces[4][4];
          load_piece<kUnit, kTransposed>(boxes + stage * S::kStage, mask, pieces);
          multiply_piece<T, kUnit, kN>(sums, pieces, wgmma_layout(1024) | (input + at), mask);
        }
        wgmma_wait<0>();
      }
      if (at_feature & kEnd) break;
      release(stage);
      if (++stage == kStages) stage = 0, phase ^= 1;
    } while (!(at_feature & kLast));
    if (at_feature & kEnd) break;
    const int feature = (at_feature & ~63) + slice * 64;
    const Bias bias = load_bias<T>(a, feature);
    // Not unrolled, by moving the sums down: the code of every activation stands once.
#pragma unroll 1
    for (int chunk = 0; chunk < kN; chunk += kChunk) {
      Pixel to = {};
      if (leader) {
        to = pixel_of(rows, count, row + first_row + chunk);
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
  grid_dependency_release();
  if (threadIdx.x == 0) {
    prefetch_map(&maps.x), prefetch_map(&maps.weight), prefetch_map(&maps.y);
    for (int i = 0; i < kStages; ++i) {
      mbar_init(smem + S::kFull + 8 * i, 1);
      mbar_init(smem + S::kEmpty + 8 * i, 4 * kWarpgroups * a.cluster);  // the consumers' warps
    }
    fence_mbar_init();
  }
  __syncthreads();
  if (a.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
  if (warp >= 4) {
    registers_up<112>();
    consume<T, kUnit, kTransposed>(a, rows, maps, smem, shared);
  } else {
    registers_down<32>();
    produce<kUnit>(a, rows, maps, smem, shared);
  }
}

// Boxes of 64 features x box_rows rows: of a matrix, or of a plane's pixels, block_w to a line.
Status rows_map(CUtensorMap* map, const char* name, const TensorView& t, int block_w, int box_rows) {
  cuuint64_t size[4] = {cuuint64_t(t.size[1]), 1, 1, 1}, stride[3];
  cuuint32_t box[4] = {64, cuuint32_t(box_rows), 1, 1};
  if (block_w) {
    const PixelStrides s = pixel_strides(t);
    const int64_t elements[3] = {s.x, s.y, s.n};
    const int64_t pixels[3] = {t.size[3], t.size[2], t.size[0]};
    for (int d = 0; d < 3; ++d) size[d + 1] = pixels[d], stride[d] = elements[d] * 2;
    box[1] = block_w, box[2] = box_rows / block_w;
  } else {
    Matrix m;
    matrix_of(t, &m);
    size[1] = m.rows;
    for (cuuint64_t& s : stride) s = m.stride * 2;
  }
  return make_map(map, t.dtype, name, 4, t.data, size, stride, box);
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
    TileArgs args = tile_args(p, plan, S::kRows, workers);
    args.whole = args.units = args.items;  // no halves
    QuadRows rows = {};
    rows.box_rows = S::kRows / 2;
    if (p.active.indices) {
      const BlockGrid& grid = p.active.grid;
      rows = {p.active.indices,
              p.active.count,
              static_cast<int>(p.active.capacity),
              quad_box_rows(grid, S::kRows / 2),
              grid.size[0] * grid.size[1],
              grid.size[0],
              grid.size[1],
              grid.count[0],
              grid.count[1],
              static_cast<int>(p.y.size[0])};
    }
    MatmulMaps maps;
    SBNET_TRY(rows_map(&maps.x, "x", p.x, rows.block_w, rows.box_rows));
    SBNET_TRY(rows_map(&maps.y, "out", p.y, rows.block_w, kChunk));
    SBNET_TRY(
        matrix_map(&maps.weight, kMatmulOp, "weight", weight_matrix(p), weight_box_rows(p.layout.shape.block_size)));
    const ClusterLaunch launch(int64_t{std::min(workers, args.items)} << log_cluster, kThreads, S::kBytes, log_cluster,
                               stream);
    SBNET_CUDA_TRY(kMatmulOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, args, rows));
    return ok_status();
  });
}

}  // namespace sbnet::sm90::matmul

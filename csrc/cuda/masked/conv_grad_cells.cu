// Weight gradients of 3x3 kernels, with what every GPU since sm_80 has: mma.sync, ldmatrix, cp.async.
//
// A stage is a cell of 8x8 pixels of dy and the patch of x that its windows see. All nine taps are multiplied from the
// one patch: a CTA owns up to 64 output by 32 input channels of all taps, and a warp one word of input channels. The
// reduction runs over pixels, along which neither operand is contiguous, so ldmatrix transposes both. A row of eight
// pixels of the patch is one matrix, and serves every tap that reads it there.
//
// dy has 128 bytes a pixel, whose word w lies at w ^ (column % 8); the patch 64, w at w ^ (place / 2 % 4), where places
// are columns, with a stride of 2 the even ones first. Either way eight pixels of a matrix are free of bank conflicts.
#include "cuda/masked/conv_grad_finish.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128, kCell = 8, kOutputs = 64, kInputs = 32, kTaps = 9;
constexpr int kLeastCells = 2;  // of a part

struct CellsPlan {
  GradParts parts;
  FastDiv cells_per_block, cells_per_row;
  FastDiv tiles_m, tiles_n, channels, taps_per_row;
  int32_t group_inputs, group_outputs;
};

// kM: sixteens of output channels.
template <class T, int kStride, int kM>
struct CellTile {
  static constexpr int kSide = (kCell - 1) * kStride + 3, kEven = (kSide + 1) / 2;
  static constexpr int kPitch = kStride == 1 ? kSide : 2 * kEven;
  static constexpr int kStages = kStride == 1 ? 4 : 3;
  static constexpr int kGrad = kCell * kCell * 128, kStage = kGrad + kSide * kPitch * 64;
  static constexpr int kWords = 2 * kM;  // of dy
  static constexpr int kCopiesGrad = kCell * kCell * kWords / kThreads;
  static constexpr int kGradStep = kThreads / kWords / kCell;  // rows
  static constexpr int kCopiesX = (kSide * kSide * 4 + kThreads - 1) / kThreads, kStepX = kThreads / 4;
  // Of a patch that half a cell reads: rows, and loads of four matrices for all three columns of taps.
  static constexpr int kRows = 3 * kStride + 3, kLoads = (3 * kRows + 3) / 4;
  static constexpr int kBiasesAt = kCopiesX * kStepX * static_cast<int>(sizeof(int2));
  static constexpr int kStagesAt = kBiasesAt + kOutputs * 4;
  static constexpr int kAlone = kStagesAt + kStages * kStage;
  static constexpr int kShared = std::max(kAlone, kStagesAt + sums_bytes(16 * kM, kTaps* kInputs));
  static_assert(kStage % 128 == 0 && kStagesAt % 128 == 0 && kPitch % 2 == 0);
  static_assert(kShared <= 99 * 1024, "the least that a device since sm_80 has");

  static __device__ __forceinline__ int place(int column) {
    return kStride == 1 ? column : column % 2 * kEven + column / 2;
  }
  static __device__ __forceinline__ uint32_t patch_word(int row, int place, int word) {
    return static_cast<uint32_t>((row * kPitch + place) * 64 + ((word ^ (place / 2 % 4)) << 4));
  }
};

// Brings cells to shared memory. What the list says is asked for one cell ahead.
template <class T, int kStride, int kM>
struct CellLoader {
  using Tile = CellTile<T, kStride, kM>;
  const Conv2dParams& p;
  const CellsPlan& plan;
  const int2* table;  // of the patch: where a pixel is in x, in words; row, column, place in the stage
  const T *x, *grad;  // this thread's channels
  bool x_in, grad_in;
  int count;
  int64_t next, end;
  BlockIndex block;
  int down, across;  // of the cell in its block

  __device__ __forceinline__ CellLoader(const Conv2dParams& p, const CellsPlan& plan, const GradCta& cta, int2* to)
      : p(p), plan(plan), table(to + threadIdx.x / 4) {
    const int c = static_cast<int>(cta.tile_n) * kInputs + static_cast<int>(threadIdx.x) % 4 * kLanes<T>;
    const int k = static_cast<int>(cta.tile_m) * kOutputs + static_cast<int>(threadIdx.x) % Tile::kWords * kLanes<T>;
    x_in = c < plan.group_inputs, grad_in = k < plan.group_outputs;
    x = static_cast<const T*>(p.x.data) + static_cast<int64_t>(cta.group) * plan.group_inputs + c;
    const int first = static_cast<int>(threadIdx.x) / Tile::kWords;
    grad = static_cast<const T*>(p.y.data) + static_cast<int64_t>(cta.group) * plan.group_outputs + k +
           first / kCell * p.y.stride[2] + first % kCell * p.y.stride[3];
    for (int i = threadIdx.x; i < Tile::kCopiesX * Tile::kStepX; i += kThreads) {
      const int row = i / Tile::kSide, column = i % Tile::kSide;
      to[i] = make_int2(static_cast<int>((row * p.x.stride[2] + column * p.x.stride[3]) / kLanes<T>),
                        row | column << 8 | static_cast<int>(Tile::patch_word(row, Tile::place(column), 0)) << 16);
    }
  }
  __device__ __forceinline__ void begin(const PartRange& range, int blocks) {
    next = range.begin, end = range.end, count = blocks;
    ask();
  }
  __device__ __forceinline__ void ask() {
    block.n = -1;
    if (next >= end) return;
    uint32_t slot, rest, d, a;
    plan.cells_per_block.divmod(static_cast<uint32_t>(next), &slot, &rest);
    plan.cells_per_row.divmod(rest, &d, &a);
    down = static_cast<int>(d) * kCell, across = static_cast<int>(a) * kCell;
    const int32_t* row = p.active.indices + int64_t{slot} * 3;
    block = {row[0], row[1], row[2]};
  }
  __device__ __forceinline__ void copy(uint32_t stage) {
    if (next < end) {
      const BlockGrid& g = p.active.grid;
      const int row = block.i * g.size[0] + down, column = block.j * g.size[1] + across;
      // Pixels of the cell that are of the block and the plane.
      int rows = min(min(kCell, g.size[0] - down), static_cast<int>(p.y.size[2]) - row);
      int columns = min(min(kCell, g.size[1] - across), static_cast<int>(p.y.size[3]) - column);
      if (!is_block(block, static_cast<int>(p.y.size[0]), g)) rows = columns = 0;
      const T* from = grad + block.n * p.y.stride[0] + row * p.y.stride[2] + column * p.y.stride[3];
      const int first = static_cast<int>(threadIdx.x) / Tile::kWords,
                word = static_cast<int>(threadIdx.x) % Tile::kWords;
      const uint32_t to = stage + first * 128 + ((word ^ (first % kCell)) << 4);
      const bool in = grad_in & (first % kCell < columns);
#pragma unroll
      for (int i = 0; i < Tile::kCopiesGrad; ++i)
        cp_async_16(to + i * Tile::kGradStep * kCell * 128, from + i * Tile::kGradStep * p.y.stride[2],
                    in & (first / kCell + i * Tile::kGradStep < rows));
      // No more of x than these pixels read: elsewhere may be anything, which 0 of dy would not make 0.
      const int top = row * kStride - p.padding[0], left = column * kStride - p.padding[1];
      const int low_row = max(-top, 0), low_column = max(-left, 0);
      const unsigned height = max(min((rows - 1) * kStride + 3, static_cast<int>(p.x.size[2]) - top) - low_row, 0);
      const unsigned width =
          max(min((columns - 1) * kStride + 3, static_cast<int>(p.x.size[3]) - left) - low_column, 0);
      const bool any = x_in & (rows > 0) & (columns > 0);
      const T* const patch = x + block.n * p.x.stride[0] + top * p.x.stride[2] + left * p.x.stride[3];
      const uint32_t own = stage + Tile::kGrad, own_word = threadIdx.x % 4 << 4;
#pragma unroll
      for (int i = 0; i < Tile::kCopiesX; ++i) {
        const int2 entry = table[i * Tile::kStepX];
        const bool reads = any & (static_cast<unsigned>((entry.y & 255) - low_row) < height) &
                           (static_cast<unsigned>((entry.y >> 8 & 255) - low_column) < width);
        const bool issue = (i + 1) * Tile::kStepX <= Tile::kSide * Tile::kSide ||
                           threadIdx.x / 4 + i * Tile::kStepX < Tile::kSide * Tile::kSide;
        cp_async_16(own + (static_cast<uint32_t>(entry.y) >> 16 ^ own_word), patch + int64_t{entry.x} * kLanes<T>,
                    reads, issue);
      }
      ++next;
      ask();
    }
    cp_async_commit();
  }
};

template <class T, int kStride, int kM>
__global__ void __launch_bounds__(kThreads, 2)
    conv_grad_cells_kernel(const __grid_constant__ ConvWeightGradParams params, const __grid_constant__ CellsPlan plan,
                           float* workspace) {
  using Tile = CellTile<T, kStride, kM>;
  extern __shared__ __align__(128) char smem[];
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const GradCta cta(plan.parts, plan.tiles_m, plan.tiles_n);
  CellLoader<T, kStride, kM> loader(p, plan, cta, reinterpret_cast<int2*>(smem));
  __syncthreads();  // the table

  grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, cta.part);
  const int cells = static_cast<int>(range.end - range.begin);
  if (cells <= 0 && plan.parts.cluster == 1 && plan.parts.stored() > 1) return;
  loader.begin(range, count);

  float sums[kM][kTaps][4] = {};
  const bool with_bias = params.bias && cta.tile_n == 0;
  BiasSums<T, Tile::kWords, kCell * kCell, 128, kThreads> bias;
  const uint32_t stages = shared_address(smem + Tile::kStagesAt);
  const uint32_t lane_a = (lane / 16 * 8 + lane % 8) * 128 + (((lane / 8 % 2) ^ (lane % 8)) << 4);
  uint32_t lane_b[Tile::kLoads];
#pragma unroll
  for (int i = 0; i < Tile::kLoads; ++i) {
    const int matrix = min(i * 4 + lane / 8, 3 * Tile::kRows - 1);
    lane_b[i] = Tile::kGrad +
                Tile::patch_word(matrix % Tile::kRows, Tile::place(matrix / Tile::kRows + lane % 8 * kStride), warp);
  }

  for (int s = 0; s < Tile::kStages - 1; ++s) loader.copy(stages + s * Tile::kStage);
  int slot = 0;
#pragma unroll 1
  for (int cell = 0; cell < cells; ++cell) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();  // the stage has landed for all threads, and all are done with the one before
    loader.copy(stages + (slot == 0 ? Tile::kStages - 1 : slot - 1) * Tile::kStage);
    const uint32_t stage = stages + slot * Tile::kStage;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[Tile::kLoads][4];
#pragma unroll
      for (int i = 0; i < Tile::kLoads; ++i)
        load_matrix_x4_transposed(stage + lane_b[i] + half * (kCell / 2) * kStride * Tile::kPitch * 64, b[i]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {  // two rows of the cell
        uint32_t a[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m)
          load_matrix_x4_transposed(stage + (lane_a ^ (m << 5)) + (half * 2 + pair) * 16 * 128, a[m]);
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) {
          const int first = tap % 3 * Tile::kRows + pair * 2 * kStride + tap / 3, second = first + kStride;
#pragma unroll
          for (int m = 0; m < kM; ++m)
            Product<T>::add(sums[m][tap], a[m], b[first / 4][first % 4], b[second / 4][second % 4]);
        }
      }
    }
    if (with_bias) bias.add(smem + Tile::kStagesAt + slot * Tile::kStage);
    slot = slot + 1 == Tile::kStages ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncthreads();            // all are done with the stages
  grid_dependency_release();  // not before: who waits for the parts takes room that tiles could have

  float* const biases = reinterpret_cast<float*>(smem + Tile::kBiasesAt);
  if (with_bias) bias.gather(reinterpret_cast<float*>(smem + Tile::kStagesAt), biases);
  const GradSink<T> sink = {
      params, plan.parts, plan.channels, plan.taps_per_row, workspace, cta.part / plan.parts.cluster};
  const int k = static_cast<int>(cta.tile_m) * kOutputs, c = static_cast<int>(cta.tile_n) * kInputs;
  const int64_t group = static_cast<int64_t>(cta.group) * plan.group_outputs;
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          visit(m * 16 + lane / 4 + e / 2 * 8, tap * kInputs + warp * 8 + lane % 4 * 2 + e % 2, sums[m][tap][e]);
  };
  const auto put = [&](int m, int n, float sum) {
    const int input = c + n % kInputs;
    if (k + m >= plan.group_outputs || input >= plan.group_inputs) return;
    sink.put(group + k + m, static_cast<uint32_t>(n / kInputs * plan.group_inputs + input), sum);
  };
  const auto put_bias = [&](int m, float sum) {
    if (k + m < plan.group_outputs) sink.put_bias(group + k + m, sum);
  };
  finish_tile<16 * kM, kTaps * kInputs, kThreads>(smem + Tile::kStagesAt, biases, plan.parts.cluster, with_bias, each,
                                                  put, put_bias);
}

// ---- host

int64_t cells_of(const Conv2dParams& p, int d) {
  return (std::min<int64_t>(p.active.grid.size[d], p.y.size[2 + d]) + kCell - 1) / kCell;
}
int64_t tiles_of(const Conv2dParams& p) {
  const int64_t outputs = p.weight.size[0] / p.groups;
  return (outputs + kOutputs - 1) / kOutputs * ((p.weight.size[1] + kInputs - 1) / kInputs) * p.groups;
}

GradParts cells_parts(const ConvWeightGradParams& p, const DeviceInfo& device) {
  const int64_t block = cells_of(p.conv, 0) * cells_of(p.conv, 1) * kCell * kCell;
  GradParts parts(p, block, parts_for(device, tiles_of(p.conv)), kCell * kCell, kLeastCells);
  if (has_clusters(device)) parts.join();
  return parts;
}

template <class T, int kStride, int kM>
Status launch_cells(const ConvWeightGradParams& p, const CellsPlan& plan, float* workspace, const DeviceInfo& device,
                    cudaStream_t stream) {
  using Tile = CellTile<T, kStride, kM>;
  return launch_grad<conv_grad_cells_kernel<T, kStride, kM>>(p, plan, tiles_of(p.conv), kThreads,
                                                             plan.parts.cluster > 1 ? Tile::kShared : Tile::kAlone,
                                                             Tile::kShared, workspace, device, stream);
}

Status launch_cells_grad(const ConvWeightGradParams& p, const GradParts& parts, float* workspace,
                         const DeviceInfo& device, cudaStream_t stream) {
  const Conv2dParams& c = p.conv;
  const int64_t outputs = c.weight.size[0] / c.groups, inputs = c.weight.size[1];
  const CellsPlan plan = {parts,
                          FastDiv(cells_of(c, 0) * cells_of(c, 1)),
                          FastDiv(cells_of(c, 1)),
                          FastDiv((outputs + kOutputs - 1) / kOutputs),
                          FastDiv((inputs + kInputs - 1) / kInputs),
                          FastDiv(inputs),
                          FastDiv(3),
                          static_cast<int32_t>(inputs),
                          static_cast<int32_t>(outputs)};
  const auto run = [&](auto t) -> Status {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      const bool few = outputs <= 32, one = c.stride[0] == 1;
      if (few) return (one ? launch_cells<T, 1, 2> : launch_cells<T, 2, 2>)(p, plan, workspace, device, stream);
      return (one ? launch_cells<T, 1, 4> : launch_cells<T, 2, 4>)(p, plan, workspace, device, stream);
    }
    return make_status(Code::kUnsupported, "%s: x: dtype: expected float16 or bfloat16, got float32", kGradOp);
  };
  return by_dtype(c.x.dtype, run);
}

}  // namespace

// Cells must be full enough, and their places known in 32 bits.
bool grad_cells_takes(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  if (!grad_rows_takes(p) || c.weight.size[2] != 3 || c.weight.size[3] != 3) return false;
  if (c.dilation[0] != 1 || c.dilation[1] != 1 || c.stride[0] != c.stride[1] || c.stride[0] > 2) return false;
  const int64_t pixels = PixelList(c).pixels_per_block, cells = cells_of(c, 0) * cells_of(c, 1);
  return pixels * 2 >= cells * kCell * kCell && c.active.capacity * cells < INT32_MAX / 2;
}

const GradKernel kGradCells = {cells_parts, launch_cells_grad};

}  // namespace sbnet::portable

// Weight gradients of 3x3 kernels, with what every GPU since sm_80 has: mma.sync, ldmatrix, cp.async.
//
// A stage is a cell of 8x8 pixels of dy and the patch of x that its windows see. All nine taps are multiplied from the
// one patch: a CTA owns up to 64 output by 32 input channels of all taps, and a warp one word of input channels. The
// reduction runs over pixels, along which neither operand is contiguous, so ldmatrix transposes both. A row of eight
// pixels of the patch is one matrix, and serves every tap that reads it there.
//
// dy has 128 bytes a pixel, whose word w lies at w ^ (column % 8); the patch 64, w at w ^ (place / 2 % 4), where places
// are columns, with a stride of 2 the even ones first. Either way eight pixels of a matrix are free of bank conflicts.
#include "cuda/masked/conv_grad_cells.cuh"

namespace sbnet::portable {
namespace {

constexpr int kInputs = 32, kTaps = 9;

using CellsLaunch = GradLaunch<GradLayer<CellsPlan>, kGradTogether>;

// kM: sixteens of output channels.
template <class T, int kStride, int kM>
struct CellTile {
  static constexpr int kSide = (kCell - 1) * kStride + 3, kEven = (kSide + 1) / 2;
  static constexpr int kPitch = kStride == 1 ? kSide : 2 * kEven;
  static constexpr int kStages = kStride == 1 ? 4 : 3;
  static constexpr int kGrad = CellGrad<T, kM>::kBytes, kStage = kGrad + kSide * kPitch * 64;
  static constexpr int kCopiesX = (kSide * kSide * 4 + kCellThreads - 1) / kCellThreads, kStepX = kCellThreads / 4;
  // Of a patch that half a cell reads: rows, and loads of four matrices for all three columns of taps.
  static constexpr int kRows = 3 * kStride + 3, kLoads = (3 * kRows + 3) / 4;
  static constexpr int kSpotsAt = kCopiesX * kStepX * static_cast<int>(sizeof(int2));
  static constexpr int kBiasesAt = kSpotsAt + kSpotBytes;
  static constexpr int kStagesAt = kBiasesAt + kCellOutputs * 4;
  static constexpr int kShared =
      std::max(kStagesAt + kStages * kStage, kStagesAt + sums_bytes(16 * kM, kTaps* kInputs));
  static_assert(kStage % 128 == 0 && kStagesAt % 128 == 0 && kPitch % 2 == 0);
  static_assert(kShared <= 99 * 1024, "the least that a device since sm_80 has");

  static __device__ __forceinline__ int place(int column) {
    return kStride == 1 ? column : column % 2 * kEven + column / 2;
  }
  static __device__ __forceinline__ uint32_t patch_word(int row, int place, int word) {
    return static_cast<uint32_t>((row * kPitch + place) * 64 + ((word ^ (place / 2 % 4)) << 4));
  }
};

// Copies patches of x.
template <class T, class Tile>
struct CellPatch {
  const Conv2dParams& p;
  const int2* table;  // where a pixel is in x, in words; row, column, place in the stage
  const T* x;         // this thread's channels
  bool in;

  __device__ __forceinline__ CellPatch(const Conv2dParams& p, const CellsPlan& plan, const GradCta& cta, int2* to)
      : p(p), table(to + threadIdx.x / 4) {
    const int c = static_cast<int>(cta.tile_n) * kInputs + static_cast<int>(threadIdx.x) % 4 * kLanes<T>;
    in = c < plan.group_inputs;
    x = static_cast<const T*>(p.x.data) + static_cast<int64_t>(cta.group) * plan.group_inputs + c;
    for (int i = threadIdx.x; i < Tile::kCopiesX * Tile::kStepX; i += kCellThreads) {
      const int row = i / Tile::kSide, column = i % Tile::kSide;
      to[i] = make_int2(static_cast<int>((row * p.x.stride[2] + column * p.x.stride[3]) / kLanes<T>),
                        row | column << 8 | static_cast<int>(Tile::patch_word(row, Tile::place(column), 0)) << 16);
    }
  }
  // One of kCopiesX, whose entry of the table is given; past the patch there is none.
  __device__ __forceinline__ void copy(int i, int2 entry, const Spot& spot, uint32_t stage) const {
    if ((i + 1) * Tile::kStepX > Tile::kSide * Tile::kSide &&
        static_cast<int>(threadIdx.x) / 4 + i * Tile::kStepX >= Tile::kSide * Tile::kSide)
      return;
    const bool reads = in & (spot.whole || spot.reads(entry.y & 255, entry.y >> 8 & 255));
    cp_async_16_or_zeros(stage + (static_cast<uint32_t>(entry.y) >> 16 ^ threadIdx.x % 4 << 4),
                         x + int64_t{spot.x + entry.x} * kLanes<T>, reads);
  }
};

template <class T, int kStride, int kM>
__global__ void __launch_bounds__(kCellThreads, 2) conv_grad_cells_kernel(const __grid_constant__ CellsLaunch launch) {
  using Tile = CellTile<T, kStride, kM>;
  extern __shared__ __align__(128) char smem[];
  uint32_t number;
  const auto& layer = launch.own(&number);
  const ConvWeightGradParams& params = layer.params;
  const CellsPlan& plan = layer.plan;
  const Conv2dParams& p = params.conv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const GradCta cta(number, plan.parts, plan.tiles_m, plan.tiles_n);
  const CellPatch<T, Tile> patch(p, plan, cta, reinterpret_cast<int2*>(smem));
  const CellGrad<T, kM> grad(p, plan, cta);

  grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(plan.parts, count, cta.part);
  const int cells = static_cast<int>(range.end - range.begin);
  if (cells <= 0 && plan.parts.cluster == 1 && plan.parts.stored() > 1) return;
  const CellSpots<kLanes<T>> spots = {p, plan, reinterpret_cast<Spot*>(smem + Tile::kSpotsAt), range};
  spots.tabulate(0);
  __syncthreads();

  float sums[kM][kTaps][4] = {};
  const bool with_bias = params.bias && cta.tile_n == 0;
  BiasSums<T, 2 * kM, kCell * kCell, 128, kCellThreads> bias;
  const uint32_t stages = shared_address(smem + Tile::kStagesAt);
  const uint32_t lane_a = lane_of_grad();
  uint32_t lane_b[Tile::kLoads];
#pragma unroll
  for (int i = 0; i < Tile::kLoads; ++i) {
    const int matrix = min(i * 4 + lane / 8, 3 * Tile::kRows - 1);
    lane_b[i] = Tile::kGrad +
                Tile::patch_word(matrix % Tile::kRows, Tile::place(matrix / Tile::kRows + lane % 8 * kStride), warp);
  }

  // What is copied, some at a time between products, to which the next entry of the table comes meanwhile.
  constexpr int kCopies = Tile::kCopiesX + CellGrad<T, kM>::kCopies;
  Spot spot;
  int2 entry;
  bool more;
  const auto begin = [&](int cell) {
    more = cell < cells;
    if (more) spot = spots.take(cell), entry = patch.table[0];
  };
  const auto copy = [&](int i, int slot) {
    if (!more) return;
    const uint32_t stage = stages + slot * Tile::kStage;
    if (i < Tile::kCopiesX) {
      patch.copy(i, entry, spot, stage + Tile::kGrad);
      if (i + 1 < Tile::kCopiesX) entry = patch.table[(i + 1) * Tile::kStepX];
    } else {
      grad.copy(i - Tile::kCopiesX, spot, stage);
    }
  };
#pragma unroll 1
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    begin(s);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy(i, s);
    cp_async_commit();
  }
  int slot = 0;
#pragma unroll 1
  for (int cell = 0; cell < cells; ++cell) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();  // the stage has landed for all threads, and all are done with the one before
    const int free = slot == 0 ? Tile::kStages - 1 : slot - 1;
    begin(cell + Tile::kStages - 1);
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
            mma_16x8<T>(sums[m][tap], a[m], b[first / 4][first % 4], b[second / 4][second % 4]);
#pragma unroll
          for (int i = 0; i < kCopies; ++i)
            if (half == 0 && i * 2 * kTaps / kCopies == pair * kTaps + tap) copy(i, free);
        }
      }
      if (half == 0) cp_async_commit();
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
      params, plan.parts, plan.channels, plan.taps_per_row, layer.workspace, cta.part / plan.parts.cluster};
  const int k = static_cast<int>(cta.tile_m) * kCellOutputs, c = static_cast<int>(cta.tile_n) * kInputs;
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
  const auto put = [&](int m, int n, const float (&sums)[4]) {
    const int input = c + n % kInputs;
    if (k + m >= plan.group_outputs || input >= plan.group_inputs) return;
    sink.put(group + k + m, static_cast<uint32_t>(n / kInputs * plan.group_inputs + input), sums);
  };
  const auto put_bias = [&](int m, float sum) {
    if (k + m < plan.group_outputs) sink.put_bias(group + k + m, sum);
  };
  finish_tile<16 * kM, kTaps * kInputs, kCellThreads>(smem + Tile::kStagesAt, biases, plan.parts, cta.part, with_bias,
                                                      each, put, put_bias);
}

// ---- host

int64_t cells_tiles(const ConvWeightGradParams& p) { return cell_tiles(p.conv, p.conv.weight.size[1], kInputs); }
bool few_outputs(const Conv2dParams& c) { return c.weight.size[0] / c.groups <= 32; }
int cells_variant(const ConvWeightGradParams& p) {
  return p.conv.stride[0] * 4 + few_outputs(p.conv) * 2 + (p.conv.x.dtype == DType::kF16);
}

GradParts cells_parts(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t wanted) {
  return parts_of_cells(p, device, cells_tiles(p), wanted);
}

template <class T, int kStride, int kM>
Status launch_cells(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream) {
  const auto plan_of = [](const GradWork& w) {
    return plan_of_cells(w.params.conv, w.parts, w.params.conv.weight.size[1], kInputs);
  };
  return launch_grad<conv_grad_cells_kernel<T, kStride, kM>, CellsLaunch>(
      layers, count, kGradCells, plan_of, kCellThreads, CellTile<T, kStride, kM>::kShared, device, stream);
}

Status launch_cells_grad(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream) {
  const Conv2dParams& c = layers[0].params.conv;
  const auto run = [&](auto t) -> Status {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      const bool one = c.stride[0] == 1;
      if (few_outputs(c)) return (one ? launch_cells<T, 1, 2> : launch_cells<T, 2, 2>)(layers, count, device, stream);
      return (one ? launch_cells<T, 1, 4> : launch_cells<T, 2, 4>)(layers, count, device, stream);
    }
    return make_status(Code::kUnsupported, "%s: x: dtype: expected float16 or bfloat16, got float32", kGradOp);
  };
  return by_dtype(c.x.dtype, run);
}

}  // namespace

bool grad_cells_takes(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  return grad_rows_takes(p) && fills_cells(c) && c.weight.size[2] == 3 && c.weight.size[3] == 3 && c.dilation[0] == 1 &&
         c.dilation[1] == 1 && c.stride[0] == c.stride[1] && c.stride[0] <= 2;
}

const GradKernel kGradCells = {cells_variant, cells_tiles, cells_parts, launch_cells_grad};

}  // namespace sbnet::portable

// Weight gradients of few input channels, float16 and bfloat16, with what every GPU since sm_80 has: mma.sync,
// ldmatrix.
//
// A stage is a cell of 8x8 pixels of dy and the patch of x that its windows see, as elements: words of a pixel's
// channels would be mostly empty. A CTA owns up to 64 output channels by 160 columns (r, s, c). A product's operand is
// two neighbouring pixels' elements of a column, which a lane puts together itself.
#include "cuda/masked/conv_grad_cells.cuh"

namespace sbnet::portable {
namespace {

constexpr int kWarpTiles = 5, kColumns = 4 * kWarpTiles * 8;
constexpr int kLoads = 14, kElements = kLoads * kCellThreads;  // of a patch

struct FewPlan {
  CellsPlan cells;
  FastDiv patch_row, channels;  // elements
  int32_t patch;                // elements; rows lie one after the other
};

using FewLaunch = GradLaunch<GradLayer<FewPlan>, 1>;  // a network's first layer

template <class T, int kM>
struct FewTile {
  static constexpr int kStages = 3, kGrad = CellGrad<T, kM>::kBytes;
  static constexpr int kStage = kGrad + kElements * static_cast<int>(sizeof(T));
  static constexpr int kSpotsAt = kElements * static_cast<int>(sizeof(int2)), kBiasesAt = kSpotsAt + kSpotBytes;
  static constexpr int kStagesAt = kBiasesAt + kCellOutputs * 4;
  static constexpr int kShared = std::max(kStagesAt + kStages * kStage, kStagesAt + sums_bytes(16 * kM, kColumns));
  static_assert(kStagesAt % 128 == 0 && kStage % 128 == 0 && kShared <= 99 * 1024);
};

// This thread's elements of a patch: loaded early, stored to shared memory when they have come.
template <class T>
struct FewPatch {
  const Conv2dParams& p;
  const FewPlan& plan;
  const int2* table;  // where an element is in x; row, column
  const T* x;
  T elements[kLoads];

  __device__ __forceinline__ FewPatch(const Conv2dParams& p, const FewPlan& plan, const GradCta& cta, int2* to)
      : p(p), plan(plan), table(to + threadIdx.x) {
    x = static_cast<const T*>(p.x.data) + static_cast<int64_t>(cta.group) * plan.cells.group_inputs * p.x.stride[1];
    for (int i = threadIdx.x; i < kElements; i += kCellThreads) {
      uint32_t row, rest, column, c;
      plan.patch_row.divmod(static_cast<uint32_t>(i), &row, &rest);
      plan.channels.divmod(rest, &column, &c);
      to[i] = make_int2(static_cast<int>(row * p.x.stride[2] + column * p.x.stride[3] + c * p.x.stride[1]),
                        static_cast<int>(i < plan.patch ? row << 16 | column : 0x7fff7fff));
    }
  }
  __device__ __forceinline__ void load(const Spot& spot) {
    const T* const from = x + spot.x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int2 entry = table[i * kCellThreads];
      elements[i] = from_float<T>(0.f);
      if (spot.reads(entry.y >> 16, entry.y & 0xffff)) elements[i] = from[entry.x];
    }
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) to[threadIdx.x + i * kCellThreads] = elements[i];
  }
};

template <class T, int kM>
__global__ void __launch_bounds__(kCellThreads, 3) conv_grad_few_kernel(const __grid_constant__ FewLaunch launch) {
  using Tile = FewTile<T, kM>;
  extern __shared__ __align__(128) char smem[];
  uint32_t number;
  const auto& layer = launch.own(&number);
  const ConvWeightGradParams& params = layer.params;
  const FewPlan& plan = layer.plan;
  const Conv2dParams& p = params.conv;
  const GradParts& parts = plan.cells.parts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const GradCta cta(number, parts, plan.cells.tiles_m, plan.cells.tiles_n);
  FewPatch<T> patch(p, plan, cta, reinterpret_cast<int2*>(smem));
  const CellGrad<T, kM> grad(p, plan.cells, cta);
  // Where a patch has a lane's column of each product, of its first pixel; and how far its rows and pixels are apart.
  const int C = plan.cells.group_inputs, pitch = static_cast<int>(plan.patch_row.divisor);
  const int step = p.stride[1] * C, step_row = p.stride[0] * pitch;
  int base[kWarpTiles];
#pragma unroll
  for (int j = 0; j < kWarpTiles; ++j) {
    const int column = static_cast<int>(cta.tile_n) * kColumns + (warp * kWarpTiles + j) * 8 + lane / 4;
    uint32_t tap, c, r, s;
    plan.channels.divmod(static_cast<uint32_t>(column < parts.columns ? column : 0), &tap, &c);
    plan.cells.taps_per_row.divmod(tap, &r, &s);
    base[j] = static_cast<int>(r) * p.dilation[0] * pitch + static_cast<int>(s) * p.dilation[1] * C +
              static_cast<int>(c) + lane % 4 * 2 * step;
  }

  grid_dependency_wait();
  const int count = clamped_count(p.active.count, static_cast<int>(p.active.capacity));
  const PartRange range = range_of_part(parts, count, cta.part);
  const int cells = static_cast<int>(range.end - range.begin);
  if (cells <= 0 && parts.cluster == 1 && parts.stored() > 1) return;
  const CellSpots<1> spots = {p, plan.cells, reinterpret_cast<Spot*>(smem + Tile::kSpotsAt), range};
  spots.tabulate(0);
  __syncthreads();

  float sums[kM][kWarpTiles][4] = {};
  const bool with_bias = params.bias && cta.tile_n == 0;
  BiasSums<T, 2 * kM, kCell * kCell, 128, kCellThreads> bias;
  const uint32_t stages = shared_address(smem + Tile::kStagesAt);
  const uint32_t lane_a = lane_of_grad();
  const auto elements_of = [&](int slot) {
    return reinterpret_cast<T*>(smem + Tile::kStagesAt + slot * Tile::kStage + Tile::kGrad);
  };
  bool more = false;
  const auto fetch = [&](int cell, int slot) {
    more = cell < cells;
    if (more) {
      const Spot spot = spots.take(cell);
#pragma unroll
      for (int i = 0; i < CellGrad<T, kM>::kCopies; ++i) grad.copy(i, spot, stages + slot * Tile::kStage);
      patch.load(spot);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    fetch(s, s);
    if (more) patch.store(elements_of(s));
  }
  int slot = 0;
#pragma unroll 1
  for (int cell = 0; cell < cells; ++cell) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();  // the stage has landed for all threads, and all are done with the one before
    const int free = slot == 0 ? Tile::kStages - 1 : slot - 1;
    fetch(cell + Tile::kStages - 1, free);
    const uint32_t stage = stages + slot * Tile::kStage;
    const uint16_t* const elements = reinterpret_cast<const uint16_t*>(elements_of(slot));
#pragma unroll
    for (int pair = 0; pair < kCell / 2; ++pair) {  // two rows of the cell
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrix_x4_transposed(stage + (lane_a ^ (m << 5)) + pair * 16 * 128, a[m]);
#pragma unroll
      for (int j = 0; j < kWarpTiles; ++j) {
        const auto two = [&](int row) {
          const uint16_t* const from = elements + base[j] + row * step_row;
          return static_cast<uint32_t>(from[0]) | static_cast<uint32_t>(from[step]) << 16;
        };
        const uint32_t b0 = two(pair * 2), b1 = two(pair * 2 + 1);
#pragma unroll
        for (int m = 0; m < kM; ++m) Product<T>::add(sums[m][j], a[m], b0, b1);
      }
    }
    if (with_bias) bias.add(smem + Tile::kStagesAt + slot * Tile::kStage);
    if (more) patch.store(elements_of(free));
    slot = slot + 1 == Tile::kStages ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncthreads();            // all are done with the stages
  grid_dependency_release();  // not before: who waits for the parts takes room that tiles could have

  float* const biases = reinterpret_cast<float*>(smem + Tile::kBiasesAt);
  if (with_bias) bias.gather(reinterpret_cast<float*>(smem + Tile::kStagesAt), biases);
  const GradSink<T> sink = {
      params, parts, plan.channels, plan.cells.taps_per_row, layer.workspace, cta.part / parts.cluster};
  const int k = static_cast<int>(cta.tile_m) * kCellOutputs, column = static_cast<int>(cta.tile_n) * kColumns;
  const int64_t group = static_cast<int64_t>(cta.group) * plan.cells.group_outputs;
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int j = 0; j < kWarpTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          visit(m * 16 + lane / 4 + e / 2 * 8, (warp * kWarpTiles + j) * 8 + lane % 4 * 2 + e % 2, sums[m][j][e]);
  };
  const auto put = [&](int m, int n, const float (&sums)[4]) {
    if (k + m < plan.cells.group_outputs && column + n < parts.columns)
      sink.put(group + k + m, static_cast<uint32_t>(column + n), sums);
  };
  const auto put_bias = [&](int m, float sum) {
    if (k + m < plan.cells.group_outputs) sink.put_bias(group + k + m, sum);
  };
  finish_tile<16 * kM, kColumns, kCellThreads>(smem + Tile::kStagesAt, biases, parts, cta.part, with_bias, each, put,
                                               put_bias);
}

// ---- host

int64_t columns_of(const Conv2dParams& p) { return p.weight.size[1] * p.weight.size[2] * p.weight.size[3]; }
int64_t patch_side(const Conv2dParams& p, int d) {
  return int64_t{kCell - 1} * p.stride[d] + (p.weight.size[2 + d] - 1) * p.dilation[d] + 1;
}

int64_t few_tiles(const ConvWeightGradParams& p) { return cell_tiles(p.conv, columns_of(p.conv), kColumns); }
GradParts few_parts(const ConvWeightGradParams& p, const DeviceInfo& device, int64_t wanted) {
  return parts_of_cells(p, device, few_tiles(p), wanted);
}

template <class T, int kM>
Status launch_few(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream) {
  const auto plan_of = [](const GradWork& w) -> FewPlan {
    const Conv2dParams& c = w.params.conv;
    const int64_t row = patch_side(c, 1) * c.weight.size[1];
    return {plan_of_cells(c, w.parts, columns_of(c), kColumns), FastDiv(row), FastDiv(c.weight.size[1]),
            static_cast<int32_t>(patch_side(c, 0) * row)};
  };
  return launch_grad<conv_grad_few_kernel<T, kM>, FewLaunch>(layers, count, kGradFew, plan_of, kCellThreads,
                                                             FewTile<T, kM>::kShared, device, stream);
}

Status launch_few_grad(const GradWork* layers, int count, const DeviceInfo& device, cudaStream_t stream) {
  const Conv2dParams& c = layers[0].params.conv;
  return by_dtype(c.x.dtype, [&](auto t) -> Status {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2)
      return (c.weight.size[0] / c.groups <= 32 ? launch_few<T, 2> : launch_few<T, 4>)(layers, count, device, stream);
    return make_status(Code::kUnsupported, "%s: x: dtype: expected float16 or bfloat16, got float32", kGradOp);
  });
}

}  // namespace

bool grad_few_takes(const ConvWeightGradParams& p) {
  const Conv2dParams& c = p.conv;
  if (c.x.dtype == DType::kF32 || !channels_vectorize(c.y) || c.weight.size[0] / c.groups % 8 || !fills_cells(c))
    return false;
  // With dilations, pixels that a cell has not would reach between those that its windows read.
  if (c.dilation[0] != 1 || c.dilation[1] != 1) return false;
  const int64_t height = patch_side(c, 0), width = patch_side(c, 1), C = c.weight.size[1];
  int64_t reach = height * c.x.stride[2] + width * c.x.stride[3] + C * c.x.stride[1];
  for (int d : {0, 2, 3}) reach += c.x.size[d] * c.x.stride[d];
  return std::max(height, width) < 256 && height * width * C <= kElements && reach < INT32_MAX && grad_in_reach(c.y);
}

const GradKernel kGradFew = {nullptr, few_tiles, few_parts, launch_few_grad};

}  // namespace sbnet::portable

// Block-sparse 1x1 convolution of bytes for Hopper, int8 or float8_e4m3fn: stride 1 or 2, channels in multiples of 16.
//
// As conv1x1.cu, on pairs of channels (conv_bytes.cu): its producer warps, rings and resident weights, told of half as
// many channels of two bytes. A tile is 128 pixels, cells of 8x8 or 4x4, x up to 256 output channels, 64 to each of one
// to four warpgroups, so that a layer of 256 reads its input once; two groups of warpgroups have tiles of their own
// where a tile takes one or two.
//
//   warps 0-15   WGMMA and epilogue
//   warps 16-17  a producer per group: schedule, input
//   warps 18-19  zero the fringe; 18 loads resident weights before
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv1x1_load.cuh"
#include "cuda/sm90/conv/conv_bytes_finish.cuh"

namespace sbnet::sm90 {
namespace {

using conv1x1_detail::Maps, conv1x1_detail::kSlab, conv1x1_detail::kThreads, conv1x1_detail::kWarpgroups;

constexpr int kStage = bytes::kPositions * 128, kLeastStages = 3;

struct Args : conv1x1_detail::Args, bytes::Epilogue {
  static constexpr int y_c = 1, residual_c = 1;  // channels are adjacent
  struct {
    FringeView fringe;
    TensorView y;
  } zeros;
  FringePlan zeros_plan;
};

// Shared memory: control, a warpgroup's staged outputs and their places and slopes, weights, rings.
template <class Element, bool kBytes>
struct Config : bytes::Numbers<Element, kBytes> {
  static constexpr int kStaging = bytes::kStagingBytes, kOutputs = bytes::kRows;
  static constexpr int kStagingAt = conv1x1_detail::kControl;
  static constexpr int kPlacesAt = kWarpgroups * kStaging;  // from kStagingAt on
  static constexpr int kSlopesAt = kPlacesAt + kWarpgroups * bytes::kPositions * 16;
  static constexpr int kWeightsAt = (kStagingAt + kSlopesAt + kWarpgroups * kOutputs * 4 + 1023) / 1024 * 1024;
};

// Where position `at` of a tile goes.
__device__ __forceinline__ bytes::Place place_of(const Args& a, const int4* tile, int at) {
  const int log_side = a.side == 8 ? 3 : 2, row = at >> log_side & (a.side - 1);
  const int4 unit = tile[at >> 2 * log_side];
  const int y = unit.y + row, x = unit.z + (at & (a.side - 1));
  if (unit.x < 0 || y >= a.H || x >= a.W) return {-1, 0, 0};
  return {unit.x * a.y.n + y * a.y.y + x * a.y.x, unit.x, static_cast<uint32_t>(y) << 16 | x};
}

// Warps 0-15. A warpgroup computes D[64 channels, 128 pixels] = W[64 channels, C] * X[128 pixels, C]^T.
template <class C>
__device__ void consume(const Args& a, uint32_t smem, uint8_t* shared, const int4* units) {
  using namespace conv1x1_detail;
  const int tid = threadIdx.x & 127, lane = tid & 31;
  const int wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0), group = wg / a.wide, member = wg - group * a.wide;
  if (group >= a.groups) return;
  const uint32_t ring = smem + a.ring_at + group * a.stages * a.stage_bytes;
  const uint32_t slabs = wgmma_operand((a.resident ? smem + a.weights_at : ring + kStage) + member * kSlab);
  const uint32_t pixels = wgmma_operand(ring);
  uint8_t* staged = shared + C::kStagingAt;
  bytes::Place* places = reinterpret_cast<bytes::Place*>(staged + C::kPlacesAt) + wg * bytes::kPositions;
  const int k0 = (Schedule(a).ktile * a.wide + member) * 64, channel = k0 + (tid >> 5) * 16 + (lane >> 2);
  const bool idle = k0 >= a.K;  // the last of the channels may leave a warpgroup without any
  grid_dependency_wait();
  if (tid < C::kOutputs)
    reinterpret_cast<float*>(staged + C::kSlopesAt)[wg * C::kOutputs + tid] =
        a.slopes && k0 + tid < a.K ? load_float(static_cast<const float*>(a.slopes) + k0 + tid) : a.slope;

  int stage = 0, phase = 0;
  for (int i = 0;; ++i) {
    const int slot = group * kTileSlots + i % kTileSlots;
    mbar_wait(smem + kTileFull + 8 * slot, (i / kTileSlots) & 1);
    const int4* tile = units + slot * kMaxUnits;
    if (tile[0].w & kEnd) break;
    bar_sync(1 + wg, 128);  // the places of the tile before are no longer read
    places[tid] = place_of(a, tile, tid);
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + kTileEmpty + 8 * slot);
    float scale[2], bias[2];  // on their way until the products are done
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = channel + h * 8;
      scale[h] = k < a.K ? load_float(a.scale + k) : 0.f;
      bias[h] = a.bias && k < a.K ? load_float(static_cast<const float*>(a.bias) + k) : 0.f;
    }
    typename C::Sum acc[64];
    const uint32_t read =
        multiply_slices(a, smem, group, slabs, pixels, a.resident && i == 0, stage, phase,
                        [&](uint64_t w, uint64_t x, int accumulate) { wgmma_bytes(acc, w, x, accumulate); });
    wgmma_wait<0>();
    if (lane == 0) mbar_arrive(read);
    if (idle) continue;
    bar_sync(1 + wg, 128);
    bytes::finish<C>(a, k0, acc, staged, places, scale, bias);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    conv1x1_bytes_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  using namespace conv1x1_detail;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  init_barriers<kThreads>(a, cta, 4 * a.wide, 4 * a.wide);
  // Every role calls grid_dependency_wait() before it touches feature maps, some in every CTA.
  if (cta.warp < kMaxWarps) {  // 640 threads start with 96 registers each
    registers_up<112>();
    consume<C>(a, cta.smem, shared, units_of(shared));
  } else {
    registers_down<32>();
    if (cta.warp < kMaxWarps + 2) {
      if (cta.warp - kMaxWarps < a.groups) produce(a, maps, cta.smem, units_of(shared), cta.warp - kMaxWarps);
    } else {
      const bool loads = cta.warp == kMaxWarps + 2 && cta.lane == 0 && a.resident;
      load_and_clear(a, &maps.w, cta.smem, loads, [&] {
        const int64_t thread = int64_t{blockIdx.x} * 64 + (threadIdx.x & 63);
        bytes::by_result<C>(a.y_dtype, [&](auto t) {
          clear_fringe<decltype(t)>(a.zeros, a.zeros_plan, thread, int64_t{gridDim.x} * 64);
        });
      });
    }
  }
}

// ---------------------------------------------------------------- host

// Returns how many tiles of pixels a full list has.
template <class C>
int64_t plan(const Conv2dParams& pairs, const DeviceInfo& device, Args* a) {
  using namespace conv1x1_detail;
  const int per_block = cut_cells(pairs, a), slabs = static_cast<int>((pairs.weight.size[0] + 63) / 64);
  a->flat_count = -1;
  a->units = bytes::kPositions / (a->side * a->side);
  const int64_t tiles = (pairs.active.capacity * per_block + a->units - 1) / a->units;
  const auto columns = [&] { return (slabs + a->wide - 1) / a->wide; };
  a->wide = std::min(slabs, kWarpgroups);
  a->wide = (slabs + columns() - 1) / columns();
  // As in plan_launch: an eighth of a full list is the guess of how long it is.
  while (tiles * columns() / 8 < device.sm_count / 2 && a->wide > 1) a->wide = (a->wide + 1) / 2;
  a->slabs = a->wide;
  a->ktiles = FastDiv(columns());
  const auto fits = [&](int groups, bool resident) {
    a->groups = groups, a->resident = resident;
    a->weights_at = C::kWeightsAt;
    a->ring_at = a->weights_at + (resident ? a->slices * a->wide * kSlab : 0);
    a->stage_bytes = kStage + (resident ? 0 : a->wide * kSlab);
    a->stages = std::min((kSharedLimit - a->ring_at) / a->stage_bytes / groups, kMaxStages);
    return a->stages >= kLeastStages;
  };
  const bool few = a->slices <= kMaxResident;
  if (!(few && ((a->wide <= 2 && fits(2, true)) || fits(1, true)))) fits(1, false);
  return tiles;
}

template <class C>
Status launch_kernel(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  const Conv2dParams pairs = byte_pairs(p);
  Args a = {};
  fill_common(pairs, &a);
  const int64_t tiles = plan<C>(pairs, device, &a), ktiles = a.ktiles.divisor;
  if (tiles == 0 && !a.fringe) return ok_status();
  static_cast<bytes::Epilogue&>(a) = bytes::epilogue(p);
  a.zeros = {p.fringe, p.y}, a.zeros_plan = FringePlan(p);
  Maps maps = {};
  SBNET_TRY(conv1x1_detail::input_maps(&maps, pairs, a));
  SBNET_TRY(conv1x1_detail::weight_map(&maps.w, pairs));
  constexpr auto kernel = conv1x1_bytes_kernel<C>;
  SBNET_TRY(allow_shared<kernel>(kQuantizedConvOp, device, kSharedLimit));
  int64_t columns = std::max<int64_t>(device.sm_count / ktiles, 1);
  if (!a.fringe) columns = std::min(columns, tiles);
  const int shared = a.ring_at + a.groups * a.stages * a.stage_bytes;
  SBNET_CUDA_TRY(kQuantizedConvOp, launch_dependent(device, kernel, dim3(static_cast<unsigned>(columns * ktiles)),
                                                    dim3(kThreads), shared, stream, maps, a));
  return ok_status();
}

template <class Element>
Status launch(const QuantizedConv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return bytes::of_registers(p) ? launch_kernel<Config<Element, true>>(p, device, stream)
                                : launch_kernel<Config<Element, false>>(p, device, stream);
}

}  // namespace

Status conv1x1_bytes(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  return p.x.dtype == DType::kI8 ? launch<int8_t>(p, device, stream) : launch<__nv_fp8_e4m3>(p, device, stream);
}

}  // namespace sbnet::sm90

// A bottleneck block in one kernel: 1x1 to few channels, 3x3, 1x1 back, shortcut (core/masked/bottleneck.h).
//
// A tile is a cell of 8x8 pixels. Its input patch of 10x10 pixels is loaded once, all channels; h1 of the patch and,
// in its place, h2 of the cell stay in shared memory. Pixels of the patch in blocks that are not active, or outside of
// the plane, have h1 = 0. So 36 % of h1 is computed twice, and two launches, two planes written and read, and two
// fringes are saved.
//
// A tile is one warpgroup's, or two's where h1 is wide, from its patch to its output (bottleneck_compute.cuh): a team.
// Teams go their own ways and share the weights, which come in slabs of 64 input channels, in the order of use. They
// stay in shared memory if two teams find room beside all of them; otherwise they go round a ring, for all teams.
//
//   warps 0 ...     teams: WGMMA, epilogues             bottleneck_compute.cuh
//   the next warp   schedule, input patches             bottleneck_load.cuh
//   the next        weights
//   the last two    zero the fringe
#include "cuda/sm90/conv/bottleneck_compute.cuh"
#include "cuda/sm90/conv/bottleneck_load.cuh"
#include "cuda/sm90/conv/conv.h"

namespace sbnet::sm90 {
namespace {

using namespace bottleneck_detail;

template <class T, int kN>
__global__ void __launch_bounds__(Widths<kN>::kThreads, 1)
    bottleneck_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  int4* units = reinterpret_cast<int4*>(shared + kUnitsAt);
  const int consumers = a.teams * Widths<kN>::kTeam * 4;
  if (threadIdx.x == 0) prefetch_map(&maps.x), prefetch_map(&maps.w1), prefetch_map(&maps.w2), prefetch_map(&maps.w3);
  cta.init_barriers(0, kBarriersEnd, consumers + 4, [&](int at) {
    return at >= kWEmpty ? consumers : at >= kXEmpty && at < kTileFull ? 4 : 1;
  });
  __syncthreads();
  if (cta.warp < consumers) {
    registers_up<Widths<kN>::kConsumerRegisters>();
    consume<T, kN>(a, cta.smem, shared, units);
  } else {
    registers_down<56>();  // consumers and fringe wait for the launch ahead: so every CTA has waited when it exits
    if (cta.warp == consumers) {
      produce_patches(a, maps, cta.smem, units);
    } else if (cta.warp == consumers + 1) {
      await_settled(a);
      if (cta.lane == 0 && !(Widths<kN>::kByHand && a.resident)) load_weights<kN>(a, maps, cta.smem);
    } else {
      take_turn();
      if (a.fringe) zero_fringe<T>(a);
    }
  }
}

// ---------------------------------------------------------------- host

template <class T, int kN>
Status launch(const BottleneckParams& p, const Maps& maps, Args a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = bottleneck_kernel<T, kN>;
  lay_out<kN>(p, &a);
  SBNET_CHECK(a.stages >= kLeastStages, "%s: plan (a bug): expected at least %d stages, got %d", kOp, kLeastStages,
              a.stages);
  SBNET_TRY(allow_shared<kernel>(kOp, device, kSharedLimit));
  const int64_t tiles = p.active.capacity * a.units_per_block.divisor;
  const unsigned ctas = static_cast<unsigned>(!a.fringe && tiles < device.sm_count ? tiles : device.sm_count);
  const int threads = (Widths<kN>::kTeam * a.teams + 1) * 128;
  SBNET_CUDA_TRY(kOp, launch_dependent(device, kernel, dim3(ctas), dim3(threads), a.shared, stream, maps, a));
  return ok_status();
}

Status matrix_map(CUtensorMap* m, const TensorView& weight, int rows) {
  const cuuint64_t size[2] = {cuuint64_t(weight.size[1]), cuuint64_t(weight.size[0])}, stride[1] = {size[0] * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(rows)};
  return make_map(m, weight.dtype, "weight", 2, weight.data, size, stride, box);
}

}  // namespace

Status bottleneck(const BottleneckParams& p, const DeviceInfo& device, CUstream_st* stream) {
  Conv2dParams layers[3];
  bottleneck_layers(p, nullptr, layers);
  Args a = {};
  fill_common(layers[2], &a);
  for (int k = 0; k < 3; ++k) a.words[k] = static_cast<const uint4*>(p.weight[k].data);
  a.bias1 = p.bias[0], a.bias2 = p.bias[1], a.block_map = p.active.block_map;
  const int per_row = p.active.grid.size[1] / 8;
  a.units_per_block = FastDiv(p.active.grid.size[0] / 8 * per_row), a.units_per_row = FastDiv(per_row);
  a.block_rows = FastDiv(a.block_h), a.block_columns = FastDiv(a.block_w);
  if (p.x.size[0] == 0 || (p.active.capacity == 0 && !a.fringe)) return ok_status();

  const int n = padded(p.weight[0].size[0]);
  Maps maps;
  SBNET_TRY(plane_map(&maps.x, "x", p.x, kPatchSide, kPatchSide));
  SBNET_TRY(matrix_map(&maps.w1, p.weight[0], n));
  if (n == 48 || n == 96) {
    TensorView taps = p.weight[1];
    taps.size[1] *= 9;
    SBNET_TRY(matrix_map(&maps.w2, taps, n));
  } else {
    SBNET_TRY(tap_map(&maps.w2, layers[1], n));
  }
  SBNET_TRY(matrix_map(&maps.w3, p.weight[2], n > 64 ? 128 : 64));
  auto by_width = [&](auto type) {
    using T = decltype(type);
    return n == 32   ? launch<T, 32>(p, maps, a, device, stream)
           : n == 48 ? launch<T, 48>(p, maps, a, device, stream)
           : n == 64 ? launch<T, 64>(p, maps, a, device, stream)
           : n == 96 ? launch<T, 96>(p, maps, a, device, stream)
                     : launch<T, kMaxWidth>(p, maps, a, device, stream);
  };
  return p.x.dtype == DType::kBF16 ? by_width(__nv_bfloat16()) : by_width(__half());
}

}  // namespace sbnet::sm90

// Convolutions by rows (conv_rows.cuh) of floats, and the phases of transposed ones.
#include "cuda/masked/conv_rows.cuh"

namespace sbnet::portable {
namespace {

// Phases of a transposed convolution, without a fringe: as many convolutions at once.
struct RowPhases {
  Conv2dParams p[kMostPhases];
  RowsPlan plan[kMostPhases];
  FastDiv phases;
};
template <class T, bool kNarrow>
__global__ void __launch_bounds__(kRowThreads, ctas_of(kNarrow))
    conv_rows_phases_kernel(const __grid_constant__ RowPhases all) {
  extern __shared__ __align__(128) char smem[];
  grid_dependency_wait();
  uint32_t cta, phase;
  all.phases.divmod(blockIdx.x, &cta, &phase);
  run_rows<T, true, kNarrow>(all.p[phase], all.plan[phase], smem, static_cast<int>(cta),
                             static_cast<int>(gridDim.x / all.phases.divisor));
}

template <class T, bool kNarrow>
Status launch_phases(const Conv2dParams* p, int phases, const DeviceInfo& device, cudaStream_t stream) {
  static OccupancyCache cache;
  RowPhases all;
  int64_t tiles = 0;
  for (int i = 0; i < phases; ++i) {
    all.p[i] = p[i], all.plan[i] = RowsPlan(p[i]);
    const RowsPlan& plan = all.plan[i];
    tiles =
        std::max(tiles, plan.list.tiles(p[i].active.capacity, kTilePixels) * plan.group_tiles[1].divisor * p[i].groups);
  }
  all.phases = FastDiv(phases);
  constexpr auto kernel = conv_rows_phases_kernel<T, kNarrow>;
  constexpr int kShared = kRowsShared<T, true, kNarrow>;
  int ctas = 0;
  SBNET_TRY(prepare_kernel(device, kernel, kRowThreads, kShared, &cache, &ctas));
  const unsigned grid = persistent_grid(device, ctas, tiles, 0, kRowThreads) * static_cast<unsigned>(phases);
  SBNET_CUDA_TRY(kConvOp, launch_dependent(device, kernel, dim3(grid), dim3(kRowThreads), kShared, stream, all));
  return ok_status();
}

}  // namespace

Status launch_rows(const Conv2dParams& p, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    return is_narrow(p) ? launch_taps<T, true>(p, device, stream) : launch_taps<T, false>(p, device, stream);
  });
}

Status launch_rows_phases(const Conv2dParams* p, int phases, const DeviceInfo& device, cudaStream_t stream) {
  return by_dtype(p->x.dtype, [&](auto t) {
    using T = decltype(t);
    return is_narrow(*p) ? launch_phases<T, true>(p, phases, device, stream)
                         : launch_phases<T, false>(p, phases, device, stream);
  });
}

}  // namespace sbnet::portable

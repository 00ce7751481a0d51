// Block-sparse transposed convolution for Hopper, all phases of the output in one launch: fp16 and bf16 with fp32 sums,
// channel-last. Outputs of a phase are every stride-th pixel of y, and a convolution of stride 1 over x.
//
// Persistent CTAs. A job is four units of 8x8 outputs of a phase x 64 output channels. The patch of x holds what all
// phases of its units read, so it stays while jobs of the same units follow each other, if shared memory has room for
// all input channels. The weights are multiplied as they lie, [input][tap][output]: WGMMA takes its first operand by
// columns, too. So nothing runs ahead that puts them in order.
//
//   warps 0-7  two warpgroups: the fringe's zeros, then WGMMA and epilogue of 128 positions each
//   warp 8     jobs and patches
//   warp 9     weights
#include "core/layer.h"
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_general_finish.cuh"
#include "cuda/sm90/conv/conv_general_host.cuh"
#include "cuda/sm90/matmul/ptx.cuh"

namespace sbnet::sm90::transpose {

using general::Column;
using general::kPositions;
using general::Maps;
using general::Place;

constexpr int kThreads = 320;  // two warpgroups of consumers, a warp that loads patches, one that loads weights
constexpr int kCell = 8;       // a unit is 8x8 outputs of a phase
constexpr int kUnits = 4;      // of a CTA; the rows of two alternate in a patch (general::Shape::kCells)
constexpr int kMaxPatchStages = 5, kMaxWeightStages = 8;

// Of general::Args, `group` holds the phases: where their first output is, and the end of their taps. H and W are the
// sides of the largest phase, block_h and block_w those of a phase's blocks, `columns` the jobs that share a patch,
// `padding` what lies before the patch's first pixel.
struct Args : general::Args {
  int32_t out_h, out_w;
  FastDiv phases;
  bool resident;  // a patch holds all input channels, and stays for all jobs that share it
};
static_assert(sizeof(Args) + sizeof(Maps) <= 4096, "a kernel's parameters");

template <class T>
struct Config : general::Config<T, 64, true> {
  using Base = general::Config<T, 64, true>;
  static constexpr int kPatchFull = Base::kRecordsAt + kMaxPatchStages * kUnits * 16;
  static constexpr int kPatchEmpty = kPatchFull + 8 * kMaxPatchStages;
  static constexpr int kWeightFull = kPatchEmpty + 8 * kMaxPatchStages;
  static constexpr int kWeightEmpty = kWeightFull + 8 * kMaxWeightStages;
  static constexpr int kWeightsAt = (kWeightEmpty + 8 * kMaxWeightStages + 1023) / 1024 * 1024;  // then the patches
};

// This CTA's jobs. Neighbours share a patch, so they are dealt out in runs.
struct Jobs {
  uint32_t begin, end;
  __device__ __forceinline__ Jobs(const Args& a, int count) {
    const uint64_t jobs = general::tiles_of(a, count);
    begin = static_cast<uint32_t>(jobs * blockIdx.x / gridDim.x);
    end = static_cast<uint32_t>(jobs * (blockIdx.x + 1) / gridDim.x);
  }
};

// Four units x 64 output channels of a phase. first, last: among those of this CTA that share its patch.
struct Job {
  uint32_t units, column, phase;
  bool first, last;
  __device__ __forceinline__ Job(const Args& a, const Jobs& jobs, uint32_t at) {
    uint32_t within;
    a.columns.divmod(at, &units, &within);
    a.phases.divmod(within, &column, &phase);
    first = !a.resident || at == jobs.begin || within == 0;
    last = !a.resident || at + 1 == jobs.end || within + 1 == a.columns.divisor;
  }
  __device__ __forceinline__ int first_tap(const Args& a) const { return phase ? a.group[phase - 1].end : 0; }
  __device__ __forceinline__ int end_tap(const Args& a) const { return a.group[phase].end; }
};

// Where position `at` of warpgroup `wg` goes, given the units of its job.
__device__ __forceinline__ Place place_of(const Args& a, const int4* units, uint32_t phase, int wg, int at) {
  const int row = at >> 3;
  const int4 unit = units[wg * 2 + (row & 1)];
  const int y = (unit.y + (row >> 1)) * a.stride[0] + a.group[phase].y,
            x = (unit.z + (at & 7)) * a.stride[1] + a.group[phase].x;
  if (!unit.w || y >= a.out_h || x >= a.out_w) return {-1, 0, 0};
  return {unit.x * a.y.n + y * a.y.y + x * a.y.x, unit.x, static_cast<uint32_t>(y << 16 | x)};
}

}  // namespace sbnet::sm90::transpose

namespace sbnet::sm90 {
namespace {

using namespace transpose;

// Warp 8. Rows of units alternate in a patch, and TMA cannot leave gaps between them: a box a row.
template <class C>
__device__ void produce_patches(const Args& a, const CUtensorMap* map, uint32_t smem, uint8_t* shared, int lane) {
  await_settled(a);
  const int count = general::count_of<C>(a), u = lane % kUnits;
  const Jobs jobs(a, count);
  const uint32_t patches = smem + C::kWeightsAt + a.weight_stages * C::kTap;
  int stage = 0;
  uint32_t phase = 1;
  grid_dependency_wait();
  for (uint32_t at = jobs.begin; at < jobs.end; ++at) {
    const Job job(a, jobs, at);
    if (!job.first) continue;
    const int4 unit = general::locate(a, job.units * kUnits + u, count);
    for (int slice = 0; slice < a.slices; ++slice) {
      const uint32_t full = smem + C::kPatchFull + 8 * stage, patch = patches + stage * a.patch_bytes;
      mbar_wait(smem + C::kPatchEmpty + 8 * stage, phase);
      if (slice == 0) {
        if (lane < kUnits) reinterpret_cast<int4*>(shared + C::kRecordsAt)[stage * kUnits + lane] = unit;
        __syncwarp();
      }
      if (lane == 0) mbar_expect(full, a.positions * 128);
      __syncwarp();
      for (int row = lane / kUnits; row < a.patch_h; row += 32 / kUnits)
        tma_load(patch + (u / 2 * a.second + (row * 2 + u % 2) * a.patch_w) * 128, map, full, slice * 64,
                 unit.z - a.padding[1], unit.y - a.padding[0] + row, unit.x);
      if (++stage == a.patch_stages) stage = 0, phase ^= 1;
    }
  }
}

// Warp 9: a tap of 64 input channels after the other: a row of 128 bytes for each input channel.
template <class C>
__device__ void produce_weights(const Args& a, const CUtensorMap* map, uint32_t smem, int lane) {
  await_settled(a);
  if (lane) return;
  const Jobs jobs(a, general::count_of<C>(a));
  int stage = 0;
  uint32_t phase = 1;
  for (uint32_t at = jobs.begin; at < jobs.end; ++at) {
    const Job job(a, jobs, at);
    for (int slice = 0; slice < a.slices; ++slice)
      for (int t = job.first_tap(a); t < job.end_tap(a); ++t) {
        const uint32_t full = smem + C::kWeightFull + 8 * stage;
        mbar_wait(smem + C::kWeightEmpty + 8 * stage, phase);
        mbar_expect(full, C::kTap);
        tma_load(smem + C::kWeightsAt + stage * C::kTap, map, full, job.column * 64, a.tap[t].weight & 0xffff,
                 a.tap[t].weight >> 16, slice * 64);
        if (++stage == a.weight_stages) stage = 0, phase ^= 1;
      }
  }
}

// Warps 0-7.
template <class C>
__device__ void consume(const Args& a, uint32_t smem, uint8_t* shared) {
  using T = typename C::T;
  const int tid = threadIdx.x & 127, lane = tid & 31, wg = __shfl_sync(0xffffffff, threadIdx.x >> 7, 0);
  Place* places = reinterpret_cast<Place*>(shared + C::kPlacesAt) + wg * kPositions;
  float* bias = reinterpret_cast<float*>(shared + C::kBiasAt) + wg * C::kOutputs;
  const uint32_t weights = matmul::operand(smem + C::kWeightsAt);
  const uint32_t patches = wgmma_operand(smem + C::kWeightsAt + a.weight_stages * C::kTap) + wg * a.second * 8;
  const uint64_t rows_of_inputs = wgmma_layout(1024), rows_of_pixels = wgmma_layout(a.patch_w * 128);
  uint32_t weight = 0, weight_phase = 0, patch = 0, patch_phase = 0;
  uint32_t read_weight = 0, read_patch = 0;  // barriers of the stages that the tap before the last one issued has read
  const auto release = [&] {
    if (lane == 0 && read_weight) mbar_arrive(read_weight);
    if (lane == 0 && read_patch) mbar_arrive(read_patch);
    read_weight = read_patch = 0;
  };
  take_turn();
  // While the first patch is on its way.
  clear_fringe<T>(a.zeros, a.zeros_plan, int64_t{blockIdx.x} * 256 + threadIdx.x, int64_t{gridDim.x} * 256);
  const Jobs jobs(a, general::count_of<C>(a));

  for (uint32_t at = jobs.begin; at < jobs.end; ++at) {
    const Job job(a, jobs, at);
    const Column column(a, job.column);
    const int k0 = job.column * C::kOutputs, first = job.first_tap(a), end = job.end_tap(a);
    uint32_t stage = patch, stage_phase = patch_phase;
    mbar_wait(smem + C::kPatchFull + 8 * stage, stage_phase);
    bar_sync(1 + wg, 128);  // the places of the job before are no longer read
    places[tid] =
        place_of(a, reinterpret_cast<const int4*>(shared + C::kRecordsAt) + stage * kUnits, job.phase, wg, tid);
    const float own_bias = tid < C::kOutputs ? load_bias<T>(a, k0 + tid) : 0.f;  // on its way until the sums are made
    float acc[1][64] = {};
#pragma unroll 1
    for (int slice = 0; slice < a.slices; ++slice) {
      mbar_wait(smem + C::kPatchFull + 8 * stage, stage_phase);
      const uint32_t pixels = patches + stage * (a.patch_bytes >> 4);
      general::with_steps(slice + 1 < a.slices ? 4 : a.last_steps, [&](auto steps) {
#pragma unroll 1
        for (int tap = first; tap < end; ++tap) {
          const uint32_t dp = pixels + a.tap[tap].shift * 8, dw = weights + weight * (C::kTap >> 4);
          mbar_wait(smem + C::kWeightFull + 8 * weight, weight_phase);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < decltype(steps)::value; ++k)
            matmul::multiply_add<T, 128, true, false>(acc[0], rows_of_inputs | (dw + k * 128),
                                                      rows_of_pixels | (dp + k * 2));
          wgmma_commit();
          wgmma_wait<1>();
          release();
          read_weight = smem + C::kWeightEmpty + 8 * weight;
          read_patch = job.last && tap + 1 == end ? smem + C::kPatchEmpty + 8 * stage : 0;
          if (++weight == a.weight_stages) weight = 0, weight_phase ^= 1;
        }
      });
      if (++stage == a.patch_stages) stage = 0, stage_phase ^= 1;
    }
    if (job.last) patch = stage, patch_phase = stage_phase;
    if (tid < C::kOutputs) bias[tid] = own_bias;
    wgmma_wait<0>();
    release();
    bar_sync(1 + wg, 128);
    general::finish<C>(a, column, k0, acc, smem, shared, places, bias);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 2)
    conv_transpose_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  if (threadIdx.x == 0) cta.init_rings<C, kMaxPatchStages, kMaxWeightStages>({1, 8}, {1, 8});
  __syncthreads();
  if (cta.warp < 8)
    consume<C>(a, cta.smem, shared);
  else if (cta.warp == 8)
    produce_patches<C>(a, &maps.x, cta.smem, shared, cta.lane);
  else
    produce_weights<C>(a, &maps.w, cta.smem, cta.lane);
}

// ---------------------------------------------------------------- host

// Taps and phases, and the patch that all phases of four units read.
void fill_phases(const ConvTransposeParams& p, Args* a) {
  TransposePhase axis[2][kMaxTransposeStride];
  int side[2];
  for (int d = 0; d < 2; ++d) {
    int first = INT32_MAX, last = INT32_MIN;
    for (int i = 0; i < p.stride[d]; ++i) {
      const TransposePhase phase = axis[d][i] = transpose_phase(p, d, i);
      first = std::min(first, phase.first), last = std::max(last, phase.first + (phase.taps - 1) * phase.dilation);
    }
    a->padding[d] = -first, a->stride[d] = p.stride[d];
    side[d] = kCell + last - first;
  }
  a->patch_h = side[0], a->patch_w = side[1];
  const int pitch = 2 * side[1];
  a->second = side[0] * pitch, a->positions = 2 * a->second;
  a->patch_bytes = (a->positions * 128 + 1023) / 1024 * 1024;
  int phases = 0, taps = 0;
  for (int i = 0; i < p.stride[0]; ++i)
    for (int j = 0; j < p.stride[1]; ++j) {
      const TransposePhase &row = axis[0][i], &column = axis[1][j];
      for (int r = 0; r < row.taps; ++r)
        for (int s = 0; s < column.taps; ++s)
          a->tap[taps++] = {(row.first + r * row.dilation + a->padding[0]) * pitch + column.first +
                                s * column.dilation + a->padding[1],
                            (row.last_tap - r * row.tap_step) << 16 | (column.last_tap - s * column.tap_step)};
      a->group[phases++] = {i, j, taps};
    }
  a->phases = FastDiv(phases);
}

// Rings of shared memory. Two CTAs on a multiprocessor hide each other's epilogues; a patch that stays is read once
// for all phases. Returns bytes.
template <class C>
int fill_rings(Args* a) {
  const auto fits = [&](int limit, int patches, int weights) {
    a->patch_stages = patches;
    a->weight_stages = std::min((limit - C::kWeightsAt - patches * a->patch_bytes) / C::kTap, kMaxWeightStages);
    return patches <= kMaxPatchStages && a->weight_stages >= weights;
  };
  a->resident = true;
  if (!fits(general::kHalfShared, a->slices, 3) && !fits(kSharedLimit, a->slices, 3)) {
    a->resident = false;
    fits(kSharedLimit, 2, 3);
  }
  return C::kWeightsAt + a->patch_stages * a->patch_bytes + a->weight_stages * C::kTap;
}

Status make_maps(const ConvTransposeParams& p, const Args& a, Maps* maps) {
  SBNET_TRY(plane_map(&maps->x, "x", p.x, a.patch_w, 1));
  const TensorView& w = p.weight;
  const auto apart = [&](int d) { return cuuint64_t(w.size[d] > 1 ? w.stride[d] * 2 : 16); };
  const cuuint64_t size[4] = {cuuint64_t(w.size[1]), cuuint64_t(w.size[3]), cuuint64_t(w.size[2]),
                              cuuint64_t(w.size[0])};
  const cuuint64_t stride[3] = {apart(3), apart(2), apart(0)};
  const cuuint32_t box[4] = {64, 1, 1, 64};
  return make_map(&maps->w, w.dtype, "weight", 4, w.data, size, stride, box);
}

template <class T>
Status launch(const ConvTransposeParams& p, const DeviceInfo& device, cudaStream_t stream) {
  using C = Config<T>;
  constexpr auto kKernel = conv_transpose_kernel<C>;
  Args a = {};
  const TransposePhase row = transpose_phase(p, 0, 0), column = transpose_phase(p, 1, 0);  // those of most outputs
  Conv2dParams phase = phase_conv(p, row, column, 0, 0, nullptr);
  phase.y = p.y, phase.residual = p.residual, phase.fringe = p.fringe;
  fill_common(phase, &a);
  a.H = static_cast<int>(row.side), a.W = static_cast<int>(column.side);
  a.out_h = static_cast<int>(p.y.size[2]), a.out_w = static_cast<int>(p.y.size[3]);
  a.zeros = {p.fringe, p.y}, a.zeros_plan = FringePlan(p);
  fill_phases(p, &a);

  const int down = a.block_h / kCell, across = a.block_w / kCell, columns = (a.K + 63) / 64;
  a.units = kUnits, a.unit_h = a.unit_w = kCell;
  a.units_per_block = FastDiv(int64_t{down} * across), a.units_per_row = FastDiv(across);
  a.columns = FastDiv(int64_t{columns} * a.phases.divisor), a.tiles_per_chunk = FastDiv(columns);
  a.channels = a.chunk_inputs = static_cast<int>(p.x.size[1]), a.chunk_outputs = a.K;
  a.slices = (a.channels + 63) / 64, a.last_steps = (a.channels - (a.slices - 1) * 64 + 15) / 16;
  a.y_c = a.residual_c = 1, a.out_word = 16;
  const int shared = fill_rings<C>(&a);
  Maps maps;
  SBNET_TRY(make_maps(p, a, &maps));

  const int64_t jobs = (p.active.capacity * a.units_per_block.divisor + kUnits - 1) / kUnits * a.columns.divisor;
  if (!jobs && !has_fringe(phase)) return ok_status();
  SBNET_TRY(allow_most_shared<kKernel>(device, kSharedLimit));
  const int64_t room = int64_t{device.sm_count} * (shared <= general::kHalfShared ? 2 : 1);
  const ClusterLaunch launch(has_fringe(phase) ? room : std::min(jobs, room), kThreads, shared, 0, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, kKernel, maps, static_cast<const Args&>(a)));
  return ok_status();
}

}  // namespace

Status conv_transpose(const ConvTransposeParams& p, const DeviceInfo& device, CUstream_st* stream) {
  if (p.y.size[0] == 0) return ok_status();
  return named("sparse_conv_transpose2d", p.x.dtype == DType::kBF16 ? launch<__nv_bfloat16>(p, device, stream)
                                                                    : launch<__half>(p, device, stream));
}

}  // namespace sbnet::sm90

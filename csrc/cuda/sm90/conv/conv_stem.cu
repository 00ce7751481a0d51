// Block-sparse 7x7 convolution of stride 2 on three channels for Hopper: y = activation(conv(x) + bias) on active
// blocks.
//
// A pixel of 6 bytes suits no swizzled operand: the input goes through registers. A tile is a cell of 8x8 outputs. Its
// 21x21 input pixels come by TMA as 21 rows of 72 elements, with zeros outside the plane. The 21 elements that a kernel
// row of an output pixel reads lie together, 12 bytes from those of the next: the pairs that a WGMMA operand in
// registers is made of are aligned words of them. The weights stay in shared memory, in the order of these pairs.
//
//   warps 0-15   four warpgroups, a cell each at a time
//   warps 16-19  a producer per warpgroup: schedule, input; 18 and 19 zero the fringe afterwards
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv_host.cuh"

namespace sbnet::sm90 {
namespace {

constexpr int kThreads = 640, kWarpgroups = 4;
constexpr int kCell = 8, kPatch = 2 * kCell + 5;  // pixels of a side
// TMA copies from multiples of 8 elements only: a patch row has 7 before the first pixel's first, which is odd.
constexpr int kBefore = 7, kRow = 72 * 2;
constexpr int kPatchBytes = kPatch * kRow, kPatchPitch = 3072, kStages = 6;

// The reduction: 7 kernel rows of 21 elements. Elements 1-20 of a row are ten pairs; 70 of these fill steps 0-8 of 16
// elements but for two pairs; step 9 holds the first element of each row, behind a zero.
constexpr int kSteps = 10, kSlab = 64 * 128;  // bytes of 64 output channels x 64 elements of weights
constexpr int kPairs = 70;

constexpr int kWeightsAt = 0, kStagingAt = 3 * kSlab, kRingAt = kStagingAt + kWarpgroups * kSlab;
constexpr int kUnitsAt = kRingAt + kWarpgroups * kStages * kPatchPitch;
constexpr int kBiasAt = kUnitsAt + kWarpgroups * kStages * 16, kFull = kBiasAt + 64 * 4;
constexpr int kEmpty = kFull + 8 * kWarpgroups * kStages, kShared = kEmpty + 8 * kWarpgroups * kStages;
constexpr int kBarAll = 5;  // named barrier of all warpgroups; 1-4 are one's own

struct MapsStem {
  CUtensorMap x, y;
};
struct ArgsStem : CommonArgs {
  const void* weight;  // [K, 7, 7, 3]
  FastDiv units_per_block, units_per_row;
};

// Which element of an output channel's 147 stands at place `at` of the reduction; -1: zero.
__device__ __forceinline__ int element_at(int at) {
  const int pair = at / 2;
  if (pair < kPairs) return pair / 10 * 21 + 1 + pair % 10 * 2 + at % 2;
  const int row = pair - (kSteps - 1) * 8;
  return row >= 0 && row < 7 && at % 2 == 1 ? row * 21 : -1;
}

// Warp 16 + g: finds the cells of warpgroup g, one of the next 32 a lane, and loads their patches.
__device__ void produce(const ArgsStem& a, const CUtensorMap* map, uint32_t smem, int4* units, int group) {
  const int lane = threadIdx.x & 31;
  const uint32_t step = gridDim.x * kWarpgroups;
  uint32_t tile = (lane * kWarpgroups + group) * gridDim.x + blockIdx.x, row, sub, sub_y, sub_x;
  auto aim = [&] {
    a.units_per_block.divmod(tile, &row, &sub);
    a.units_per_row.divmod(sub, &sub_y, &sub_x);
  };
  aim();
  grid_dependency_wait();
  const int loaded = load_int(a.count);
  int4 block = load_row(a, row);
  const uint32_t count = min(max(loaded, 0), a.capacity), total = count * a.units_per_block.divisor;
  int stage = 0, phase = 1;
  for (uint32_t first = group * gridDim.x + blockIdx.x; first < total; first += 32 * step) {
    const int4 unit = unit_of_block(a, block, row < count, sub_y * kCell, sub_x * kCell);
    for (unsigned live = __ballot_sync(0xffffffff, unit.x >= 0); live; live &= live - 1) {
      if (lane == __ffs(live) - 1) {
        const int slot = group * kStages + stage;
        mbar_wait(smem + kEmpty + 8 * slot, phase);
        units[slot] = unit;
        mbar_expect(smem + kFull + 8 * slot, kPatchBytes);
        tma_load(smem + kRingAt + slot * kPatchPitch, map, smem + kFull + 8 * slot, unit.z * 6 - 9 - kBefore,
                 unit.y * 2 - 3, unit.x);
      }
      __syncwarp();
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    tile += 32 * step;
    aim();
    block = load_row(a, row);
  }
  if (lane == 0) {
    const int slot = group * kStages + stage;
    mbar_wait(smem + kEmpty + 8 * slot, phase);
    units[slot].w = 1;  // no more cells
    mbar_arrive(smem + kFull + 8 * slot);
  }
}

template <class T>
__device__ void consume(const ArgsStem& a, const CUtensorMap* map, uint32_t smem, uint8_t* shared, const int4* units) {
  const int tid = threadIdx.x & 127, lane = tid & 31, w4 = tid >> 5, wg = threadIdx.x >> 7;
  grid_dependency_wait();
  // Weights: 16 bytes at a time, rows of 128 bytes with the swizzle that WGMMA expects.
  for (int i = threadIdx.x; i < 64 * kSteps * 2; i += kWarpgroups * 128) {
    const int k = i / (kSteps * 2), word = i % (kSteps * 2);
    uint32_t v[4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int from = element_at(word * 8 + e);
      const uint32_t half = from >= 0 && k < a.K ? load_half(static_cast<const T*>(a.weight) + k * 147 + from) : 0;
      v[e / 2] = e % 2 ? v[e / 2] | half << 16 : half;
    }
    *reinterpret_cast<uint4*>(shared + kWeightsAt + word / 8 * kSlab + k * 128 + ((word % 8 ^ k % 8) << 4)) =
        make_uint4(v[0], v[1], v[2], v[3]);
  }
  float* bias = reinterpret_cast<float*>(shared + kBiasAt);
  if (threadIdx.x < 64) bias[threadIdx.x] = load_bias<T>(a, threadIdx.x);
  fence_async_proxy();
  bar_sync(kBarAll, kWarpgroups * 128);

  // Where this thread's pairs of a step lie, from its first pixel's origin on: those of its second are two rows below.
  const int t = lane & 3, pixel = lane >> 2;
  uint32_t pair_at[kSteps * 2];
#pragma unroll
  for (int i = 0; i < kSteps * 2; ++i) {
    const int pair = i / 2 * 8 + i % 2 * 4 + t;
    if (i < 2 * (kSteps - 1))
      pair_at[i] = pair < kPairs ? pair / 10 * kRow + (kBefore + 1 + pair % 10 * 2) * 2 : 0;
    else
      pair_at[i] = min(i % 2 * 4 + t, 6) * kRow + (kBefore - 1) * 2;
  }
  const uint32_t origin = smem + kRingAt + wg * kStages * kPatchPitch + w4 * 4 * kRow + pixel * 12;
  const uint32_t weights = wgmma_operand(smem + kWeightsAt), staging = smem + kStagingAt + wg * kSlab;
  const int i8 = lane & 7, mat = lane >> 3;  // stmatrix: 16 pixels x 16 channels
  const uint32_t lane_row = staging + (w4 * 16 + (mat & 1) * 8 + i8) * 128;
  const uint32_t low = pack<T>(a.low, a.low);

  int stage = 0, phase = 0;
  while (true) {
    const int slot = wg * kStages + stage;
    mbar_wait(smem + kFull + 8 * slot, phase);
    const int4 unit = units[slot];
    if (unit.w) break;
    const uint32_t from = origin + stage * kPatchPitch;
    uint32_t x[kSteps][4];
    float acc[32];
    auto load = [&](int s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // pixels 0-7, 8-15 of the warp's, then the upper half of the step's pairs
        x[s][i] = load_shared_word(from + pair_at[s * 2 + i / 2] + i % 2 * 2 * kRow);
        // Before the first element of a row stands a pixel that the output may not read; the other places are free.
        if (s == kSteps - 1) x[s][i] &= i / 2 * 4 + t < 7 ? 0xffff0000 : 0;
        if (s == kSteps - 2 && i >= 2) x[s][i] = s * 8 + 4 + t < kPairs ? x[s][i] : 0;
      }
    };
    auto multiply = [&](int s) {
      wgmma_registers<T>(acc, x[s], wgmma_layout(1024) | (weights + s / 4 * (kSlab >> 4) + s % 4 * 2), s);
    };
#pragma unroll
    for (int s = 0; s < kSteps / 2; ++s) load(s);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps / 2; ++s) multiply(s);
    wgmma_commit();
#pragma unroll
    for (int s = kSteps / 2; s < kSteps; ++s) load(s);
    __syncwarp();
    if (lane == 0) mbar_arrive(smem + kEmpty + 8 * slot);
    if (++stage == kStages) stage = 0, phase ^= 1;
    wgmma_fence();
#pragma unroll
    for (int s = kSteps / 2; s < kSteps; ++s) multiply(s);
    wgmma_commit();
    if (tid == 0) tma_store_wait_read();  // the staging memory is free
    wgmma_wait<0>();
    bar_sync(1 + wg, 128);
    auto finish = [&](auto simple) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 16 channels
        float v[8];
        uint32_t packed[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 b = *reinterpret_cast<const float2*>(bias + j * 16 + h * 8 + t * 2);
#pragma unroll
          for (int e = 0; e < 4; ++e) v[h * 4 + e] = acc[j * 8 + h * 4 + e] + (e % 2 ? b.y : b.x);
        }
        finish_sums<T>(a, simple, Known<false>(), v, low, packed);
        stmatrix(lane_row + ((j * 2 + (mat >> 1) ^ i8) << 4), packed[0], packed[1], packed[2], packed[3]);
      }
    };
    if (is_max(a.activation))
      finish(Known<true>());
    else if (is_gated(a.activation))
      finish(Gated());
    else
      finish(Known<false>());
    fence_async_proxy();
    bar_sync(1 + wg, 128);
    if (tid == 0) {
      tma_store(map, staging, 0, unit.z, unit.y, unit.x);
      tma_store_commit();
    }
  }
  if (tid == 0) tma_store_wait_read();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    conv_stem_kernel(const __grid_constant__ MapsStem maps, const __grid_constant__ ArgsStem a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  int4* units = reinterpret_cast<int4*>(shared + kUnitsAt);
  cta.init_barriers(kFull, kShared, kThreads / 32, [](int at) { return at < kEmpty ? 1 : 4; });
  if (threadIdx.x < kWarpgroups * kStages) units[threadIdx.x].w = 0;
  __syncthreads();
  // Every role calls grid_dependency_wait() before it touches global memory: so every CTA has waited when it exits.
  if (cta.warp < 16) {
    registers_up<112>();
    consume<T>(a, &maps.y, cta.smem, shared, units);
  } else {
    registers_down<32>();
    produce(a, &maps.x, cta.smem, units, cta.warp - 16);
    if (cta.warp >= 18) take_turn();
    if (cta.warp >= 18 && a.fringe) zero_fringe<T>(a);
  }
}

template <class T>
Status launch(const Conv2dParams& p, const MapsStem& maps, const ArgsStem& a, const DeviceInfo& device,
              cudaStream_t stream) {
  SBNET_TRY(allow_shared<conv_stem_kernel<T>>(kOp, device, kShared));
  const int64_t cells = p.active.capacity * a.units_per_block.divisor;
  const unsigned ctas = static_cast<unsigned>(!a.fringe && cells < device.sm_count ? cells : device.sm_count);
  SBNET_CUDA_TRY(kOp,
                 launch_dependent(device, conv_stem_kernel<T>, dim3(ctas), dim3(kThreads), kShared, stream, maps, a));
  return ok_status();
}

}  // namespace

Status conv_stem(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  ArgsStem a = {};
  fill_common(p, &a);
  a.weight = p.weight.data;
  a.units_per_row = FastDiv(p.active.grid.size[1] / kCell);
  a.units_per_block = FastDiv(p.active.grid.size[0] / kCell * (p.active.grid.size[1] / kCell));
  if (p.x.size[0] == 0 || (p.active.capacity == 0 && !a.fringe)) return ok_status();

  MapsStem maps;
  const Plane x = plane_of(p.x);
  const cuuint64_t size[3] = {cuuint64_t(p.x.size[3]) * 3, cuuint64_t(p.x.size[2]), cuuint64_t(p.x.size[0])};
  const cuuint64_t stride[2] = {cuuint64_t(x.y) * 2, cuuint64_t(x.n) * 2};
  const cuuint32_t box[3] = {72, kPatch, 1};
  SBNET_TRY(make_map(&maps.x, p.x.dtype, "x", 3, x.data, size, stride, box, CU_TENSOR_MAP_SWIZZLE_NONE));
  SBNET_TRY(plane_map(&maps.y, "out", p.y, kCell, kCell));
  return p.x.dtype == DType::kBF16 ? launch<__nv_bfloat16>(p, maps, a, device, stream)
                                   : launch<__half>(p, maps, a, device, stream);
}

}  // namespace sbnet::sm90

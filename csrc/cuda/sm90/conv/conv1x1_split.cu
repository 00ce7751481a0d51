// The Hopper 1x1 convolution of few pixels and many input channels, where one CTA would take long to sum them all: C a
// multiple of 64, K of 128, or 64, the other half of which is zeros. Taps far apart (conv_general.cu) are input
// channels, too.
//
// A job is 128 pixels (two tiles of 64, a warpgroup each) x 128 output channels. While there are jobs for every CTA
// each takes whole ones, and two neighbours share the weights by multicast. The jobs left over, with a short list all
// of them, are split: two or four CTAs of a cluster sum a part of the input channels each, send the others their sums
// of the output channels that those finish, and finish their own. A CTA has at most one such job in a launch, so that
// memory for sums is written once and needs no check that it is free. A full list whose jobs are little more than one
// for each CTA is cut as one row of pixels: conv1x1_split.cuh.
//
//   warps 0-7    WGMMA, exchange of sums, epilogue
//   warp 8       schedule, input, weights
//   warps 10-11  zero the fringe
#include "cuda/sm90/conv/conv.h"
#include "cuda/sm90/conv/conv1x1_split.cuh"

namespace sbnet::sm90 {
namespace {

using namespace conv1x1_detail;

constexpr int kSplitThreads = 384, kMaxLogSplit = 2, kMates = 2;
constexpr int kRingAt = kSumsAt + 2 * kSumsOfOthers, kStage = 4 * kSlab;
constexpr int kStages = (kSharedLimit - kRingAt) / kStage, kSplitShared = kRingAt + kStages * kStage;
static_assert(kRingAt % 1024 == 0 && kStages >= 4 && kStages <= kMaxStages);

// The w of a unit, besides kEnd and kFlat: kAlone if the weights are not shared, log2 of the CTAs that share the job,
// its output channels.
constexpr int kAlone = 2, kSplitShift = 3, kChannelsShift = 5;
constexpr int kRowFlag = 1 << 30;

struct Job {
  bool live, alone;
  int tiles, ktile;  // the first of two tiles of pixels; which output channels
};

// The jobs of this CTA. Two that share weights have as many whole ones.
struct Jobs {
  const Args& a;
  int pairs, whole, total, rounds, log_split = 0;
  __device__ __forceinline__ Jobs(const Args& args, int tiles) : a(args) {
    const int ctas = a.ctas.divisor;
    pairs = (tiles + 1) / 2;
    whole = pairs / 2 * 2 * a.ktiles.divisor;  // those that come two by two with the same output channels
    total = pairs * a.ktiles.divisor;
    rounds = a.ctas.quotient(whole);
    while (log_split < a.log_cluster && (total - rounds * ctas) << (log_split + 1) <= ctas) ++log_split;
  }
  __device__ __forceinline__ Job at(int i) const {
    const int ctas = a.ctas.divisor;
    const bool alone = i >= rounds;
    const int rest = (blockIdx.x >> log_split) + (i - rounds) * (ctas >> log_split);
    return job(alone ? rounds * ctas + rest : i * ctas + blockIdx.x, alone);
  }
  __device__ __forceinline__ Job job(int j, bool alone) const {
    const int quad = a.ktiles.quotient(j >> 1);
    if (j < whole) return {true, alone, (quad * 2 + (j & 1)) * 2, (j >> 1) - quad * static_cast<int>(a.ktiles.divisor)};
    return {j < total, alone, (pairs - 1) * 2, j - whole};
  }
};

// Warp 8.
template <int kRow>
__device__ __forceinline__ void produce_split(const Args& a, const Maps& maps, uint32_t smem, int4* units) {
  Finder finder(a);
  const int lane = finder.lane, wg = finder.ahead() & 1, rank = a.log_cluster ? cluster_rank() : 0;
  // Where a short list's first job lies, so that its rows are asked for together with the count.
  const int job = blockIdx.x >> a.log_cluster, guess = a.ktiles.quotient(job >> 1) * 4 + (job & 1) * 2 + finder.ahead();
  finder.aim(guess);
  const Jobs jobs(a, finder.begin());
  if constexpr (kRow != 0) {
    if (finder.flat) {
      if (finder.ahead() < 2) announce_unit(smem, units, wg, 0, finder.member, make_int4(0, 0, 0, kRowFlag));
      return produce_row<kRow>(a, maps, smem);
    }
  }
  int first = 0, stage = 0, phase = 1, i = 0;
  for (;; ++i) {
    const Job job = jobs.at(i);
    if (!job.live) break;
    if (i == 0 || i * 2 >= first + finder.batch()) {
      first = i * 2;
      const Job ahead = jobs.at(i + finder.ahead() / 2);
      const int tile = ahead.live ? ahead.tiles + wg : 1 << 24;
      if (i > 0 || tile != guess) {
        finder.aim(tile);
        finder.find();
      }
    }
    const int log_split = job.alone ? jobs.log_split : 0, part = blockIdx.x & ((1 << log_split) - 1);
    const bool mine = finder.ahead() / 2 == i - first / 2, shares = !job.alone && a.log_cluster;
    int4 unit = finder.unit;
    unit.w |= (shares ? 0 : kAlone) | log_split << kSplitShift | job.ktile << kChannelsShift;
    if (mine) announce_unit(smem, units, wg, i, finder.member, unit);
    const int end = a.slices * (part + 1) >> log_split, k0 = job.ktile * kSplitChannels;
    const int begin = a.slices * part >> log_split;
    auto expect = [&](int stage, int c) {  // one lane: slice c, and its weights
      const uint32_t full = smem + kFull + 8 * stage, to = smem + kRingAt + stage * kStage;
      mbar_expect(full, kStage);
      for (int s = 0; s < 2; ++s) {
        const uint32_t at = to + (2 + s) * kSlab;
        if (!shares)
          tma_load(at, &maps.w, full, c * 64, k0 + s * 64);
        else if (s == (rank & 1))
          tma_multicast(at, &maps.w, full, c * 64, k0 + s * 64, 3u << (rank & ~1));
      }
    };
    // The first weights set out before the launch ahead has ended.
    const int ahead = i == 0 ? min(end - begin, kStages) : 0;
    if (i == 0) {
      if (lane == 0)
        for (int s = 0; s < ahead; ++s) expect(s, begin + s);
      grid_dependency_wait();
    }
    for (int c = begin; c < end; ++c) {
      if (lane == 0 && c >= begin + ahead) {
        mbar_wait(smem + kEmpty + 8 * stage, phase);
        expect(stage, c);
      }
      __syncwarp();
      const uint32_t full = smem + kFull + 8 * stage, to = smem + kRingAt + stage * kStage;
      if (mine) load_input(a, to + wg * kSlab + finder.member * a.cell, &maps.of[finder.flat].x, full, c, unit);
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  }
  if (finder.ahead() < 2) announce_unit(smem, units, wg, i, finder.member, make_int4(0, 0, 0, kEnd));
  // Never exit while the other CTA may still report here what it has read.
  for (int s = 0; s < kStages; ++s) {
    if (lane == 0) mbar_wait(smem + kEmpty + 8 * stage, phase);
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
}

// Warps 0-7. A warpgroup computes D[64 pixels, 128 channels] = X[64 pixels, C] * W[128 channels, C]^T.
template <class T, int kRow>
__device__ void consume(const Args& a, const Maps& maps, uint32_t smem, uint8_t* shared, const int4* units) {
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), w4 = warp & 3, wg = warp >> 2;
  const int rank = a.log_cluster ? cluster_rank() : 0;
  uint8_t* staging = shared + kStagingAt + warp * kRows;
  const uint32_t pixels = wgmma_operand(smem + kRingAt + wg * kSlab);
  const uint32_t weights = wgmma_operand(smem + kRingAt + 2 * kSlab);
  grid_dependency_wait();

  int stage = 0, phase = 0;
  for (int i = 0;; ++i) {
    const int slot = wg * kTileSlots + i % kTileSlots;
    mbar_wait(smem + kTileFull + 8 * slot, (i / kTileSlots) & 1);
    int4 unit = {};
    if (lane == 0) {  // the lane that reports the tile as read is the one that reads it
      unit = units[slot * kMaxUnits + (a.side == 8 ? 0 : w4)];
      mbar_arrive(smem + kTileEmpty + 8 * slot);
    }
    unit = make_int4(__shfl_sync(0xffffffff, unit.x, 0), __shfl_sync(0xffffffff, unit.y, 0),
                     __shfl_sync(0xffffffff, unit.z, 0), __shfl_sync(0xffffffff, unit.w, 0));
    if (unit.w & kEnd) break;
    if constexpr (kRow != 0)
      if (unit.w & kRowFlag) return consume_row<T, kRow>(a, maps, smem);
    const bool alone = unit.w & kAlone;
    const int log_split = unit.w >> kSplitShift & 3, part = rank & ((1 << log_split) - 1);
    const int k0 = (unit.w >> kChannelsShift) * kSplitChannels;
    const WarpPixels at(a, unit, w4);
    const int channel = k0 + part * (kSplitChannels >> log_split), passes = kSplitChannels / kChannels >> log_split;
    Words added[kSplitChannels / kChannels] = {};
#pragma unroll
    for (int q = 0; q < kSplitChannels / kChannels; ++q)
      if (a.residual.data && q < passes && channel + q * kChannels < a.K)
        added[q] = fetch_residual<T>(a, at, channel + q * kChannels);
    float2 held[2];  // bias of the 16 groups of 8 channels, by lanes of the same place in a group
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = k0 + (h * 8 + lane / 4) * 8 + lane % 4 * 2;
      held[h] = make_float2(load_bias<T>(a, k), load_bias<T>(a, k + 1));
    }

    auto release = [&](uint32_t empty) {  // in every CTA that may load into it
      if (!alone && lane < kMates) mbar_arrive_at(empty, (rank & ~1) + lane);
      if (alone && lane == 0) mbar_arrive(empty, a.log_cluster ? kMates : 1);
    };
    float acc[64];
    uint32_t read = 0;  // barrier of the stage that the slice before the last one issued has read
    const int begin = a.slices * part >> log_split, end = a.slices * (part + 1) >> log_split;
    for (int c = begin; c < end; ++c) {
      mbar_wait(smem + kFull + 8 * stage, phase);
      const uint32_t dp = pixels + stage * (kStage >> 4), dw = weights + stage * (kStage >> 4);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        wgmma<T, kSplitChannels>(acc, wgmma_layout(1024) | (dp + k * 2), wgmma_layout(1024) | (dw + k * 2),
                                 (c - begin) | k);
      wgmma_commit();
      wgmma_wait<1>();
      if (read) release(read);
      read = smem + kEmpty + 8 * stage;
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    release(read);

    if (log_split == 1) exchange<2>(smem, acc);
    if (log_split == 2) exchange<4>(smem, acc);
#pragma unroll 1
    for (int q = 0; q < passes && channel + q * kChannels < a.K;
         ++q) {  // runs once per tile: instruction fetch would dominate
      float2 bias[kChannels / 8];
#pragma unroll
      for (int g = 0; g < kChannels / 8; ++g) {
        const int group = (channel - k0) / 8 + q * (kChannels / 8) + g, from = group % 8 * 4 + lane % 4;
        const float2 b = group < 8 ? held[0] : held[1];
        bias[g] = make_float2(__shfl_sync(0xffffffff, b.x, from), __shfl_sync(0xffffffff, b.y, from));
      }
      finish<T>(a, at, channel + q * kChannels, acc, bias, added[0], staging);
#pragma unroll
      for (int e = 0; e < 64 - kChannels / 2; ++e) acc[e] = acc[e + kChannels / 2];
#pragma unroll
      for (int e = 0; e < kSplitChannels / kChannels - 1; ++e) added[e] = added[e + 1];
    }
  }
}

template <class T, int kRow>
__global__ void __launch_bounds__(kSplitThreads, 1)
    conv1x1_split_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Cta cta(shared);
  if (threadIdx.x == 0) {
    prefetch_map(&maps.w);
    prefetch_map(&maps.of[0].x);
    if (kRow != 0) prefetch_map(&maps.row), prefetch_map(&maps.of[1].y);
  }
  init_barriers<kSplitThreads>(a, cta, 8 << (a.log_cluster > 0), 4);
  if (a.log_cluster) cluster_sync();
  // Every role calls grid_dependency_wait() before it touches feature maps, some in every CTA.
  if (cta.warp < 8) {  // 384 threads start with 168 registers each
    registers_up<216>();
    consume<T, kRow>(a, maps, cta.smem, shared, units_of(shared));
  } else {
    registers_down<40>();
    if (cta.warp == 8) {
      produce_split<kRow>(a, maps, cta.smem, units_of(shared));
    } else {
      take_turn();
      if (cta.warp >= 10 && a.fringe) zero_fringe<T>(a);
    }
  }
}

// ---------------------------------------------------------------- host

// kRow: pixels of a job if all blocks are active, where that is one for each CTA; or 0.
template <class T, int kRow>
Status launch(const Conv2dParams& p, Args a, const DeviceInfo& device, cudaStream_t stream) {
  constexpr auto kernel = conv1x1_split_kernel<T, kRow>;
  int clusters = 0, log_cluster = a.log_cluster;
  SBNET_TRY(clusters_that_fit<kernel>(device, kSplitThreads, kSplitShared, &log_cluster, &clusters));
  const int ctas = clusters << log_cluster;
  Maps maps = {};
  if constexpr (kRow != 0) {
    static_assert(Row<kRow>::kShared <= kSplitShared && kRowChannels == kSplitChannels);
    if (!log_cluster || !row_pays(p, a, kRow, ctas)) return launch<T, kRow == 144 ? 192 : 0>(p, a, device, stream);
    SBNET_TRY(row_maps(&maps, p, a, kRow));
  } else {
    allow_flat(p, &a);  // no larger jobs: as elsewhere
  }
  SBNET_TRY(weight_map(&maps.w, p));
  SBNET_TRY(input_maps(&maps, p, a));
  a.log_cluster = log_cluster;
  a.ctas = FastDiv(ctas);
  const ClusterLaunch launch(ctas, kSplitThreads, kSplitShared, log_cluster, stream);
  SBNET_CUDA_TRY(kOp, cudaLaunchKernelEx(&launch.config, kernel, maps, a));
  return ok_status();
}

template <class T>
Status launch_of(const Conv2dParams& p, const Args& a, const DeviceInfo& device, cudaStream_t stream) {
  return row_takes(p, a) ? launch<T, 144>(p, a, device, stream) : launch<T, 0>(p, a, device, stream);
}

}  // namespace

bool conv1x1_split_takes(const Conv2dParams& p) {
  // Sums travel for some 1.5 us: it takes many input channels to make up for that.
  const int64_t C = reduction_of(p), K = p.weight.size[0];
  const double pixels = static_cast<double>(p.active.capacity) * p.active.grid.size[0] * p.active.grid.size[1];
  const bool half = K == kSplitChannels / 2 && pixels <= 1 << 14;  // long lists would multiply zeros
  return C % 64 == 0 && C >= 1536 && (K % kSplitChannels == 0 || half);
}

Status conv1x1_split(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream) {
  Args a = {};
  fill_common(p, &a);
  cut_cells(p, &a);
  allow_flat(p, &a, true);
  a.units = 64 / (a.side * a.side);
  a.ktiles = FastDiv((p.weight.size[0] + kSplitChannels - 1) / kSplitChannels);
  a.log_cluster = kMaxLogSplit;
  SBNET_CHECK(a.slices >> kMaxLogSplit, "%s: plan (a bug): expected enough input channels to split, got %d", kOp, a.C);
  if (p.x.size[0] == 0 || (p.active.capacity == 0 && !a.fringe)) return ok_status();
  return p.x.dtype == DType::kBF16 ? launch_of<__nv_bfloat16>(p, a, device, stream)
                                   : launch_of<__half>(p, a, device, stream);
}

}  // namespace sbnet::sm90

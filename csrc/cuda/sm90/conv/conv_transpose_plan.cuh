// Transposed convolution for Hopper: jobs, shared memory layout, arguments.
#pragma once
#include "cuda/sm90/conv/conv_general_finish.cuh"

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

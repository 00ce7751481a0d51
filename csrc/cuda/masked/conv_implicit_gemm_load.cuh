// The tile loader of conv_implicit_gemm.cu: stages of x, gathered tap by tap, and of weights.
#pragma once
#include "cuda/masked/conv_portable.cuh"
#include "cuda/mma.cuh"

namespace sbnet::portable {
namespace {

constexpr int kThreads = 128;  // four warps, two by two; also one thread per pixel of the tile
constexpr int kTileM = 128;
constexpr int kRowBytes = 128;
constexpr int kStages = 3;
constexpr int kRowsPerPass = kThreads / 8;  // eight threads fetch a row

template <int kTileN>
struct Shared {
  // All stages of x, then all of the weights: the epilogue takes the place of x, and leaves the weights of the narrow
  // tile alone.
  static constexpr int kStageX = kTileM * kRowBytes, kStageWeight = kTileN * kRowBytes;
  static constexpr int kWeights = kStages * kStageX;
  static constexpr int kPitch = kTileN + 8;  // floats per pixel of the staged sums: conflict-free for the mma layout
  static constexpr int kSums = kTileM * kPitch * 4;
  static constexpr int kSources = kWeights + kStages * kStageWeight;                  // byte offset of the Source table
  static constexpr int kTaps = kSources + kTileM * static_cast<int>(sizeof(Source));  // TapTables, if any
  static constexpr int kBytes = kTaps;
  static constexpr bool kKeepsWeights = kSums + kTileM * static_cast<int>(sizeof(Output)) <= kWeights;
  static_assert(kSums + kTileM * static_cast<int>(sizeof(Output)) <= kSources, "the epilogue reuses the stages");
  static_assert(kBytes <= 99 * 1024, "the least that a device since sm_80 has");

  static __device__ __forceinline__ Source* sources(char* smem) { return reinterpret_cast<Source*>(smem + kSources); }
  static __device__ __forceinline__ Output* outputs(char* smem) { return reinterpret_cast<Output*>(smem + kSums); }
};

template <class T>
__device__ __forceinline__ uint32_t pack(T low, T high) {
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(low)) |
         static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(high)) << 16;
}

// How a stage is filled. Words: 16 bytes of channels of one tap by cp.async. Elements: one by one through registers.
enum class Fetch {
  kWords,     // x and weight channels_last, C/groups a multiple of kLanes
  kWordsOfX,  // x channels_last, other weight strides, or small groups that are merged
  kElements,  // any
};

// Fetch::kElements decodes the reduction elements of a stage once for all rows.
struct TapTable {
  static constexpr int kElements = kRowBytes / 2;  // of 16 bits: float32 does not come here
  Source x[kElements];                             // as a Source's distance; no plane has the row of a dead element
  int64_t weight[kElements];                       // in bytes, < 0 for a dead element
};

// Fetches one stage after another: thread t takes word t%8 of rows t/8, t/8 + 16, ... of both operands.
template <class T, int kTileN, Fetch kFetch>
struct Loader {
  using Smem = Shared<kTileN>;
  static constexpr int kPassesN = kTileN / kRowsPerPass;
  static constexpr int kPassBytes = kRowsPerPass * kRowBytes;
  const Conv2dParams& p;
  const GemmPlan& plan;
  const Source* sources;  // of row0
  const T* x;             // the group's first channel
  const T* weight;        // of the tile's output channel row0
  int64_t weight_pass;    // bytes to the next pass's output channel
  int channels;           // output channels of the tile from row0 on
  int word;
  uint32_t at;               // byte offset of (row0, word) in an operand's stage
  Tap tap;                   // of the words being fetched
  bool issue;                // false past the last step
  bool issue_weight = true;  // false also where the stages hold the weights already
  // Fetch::kElements: thread t takes row t of x, so that the lanes of a warp read neighbouring pixels.
  Source own;
  TapTable* tables;  // one per stage

  __device__ __forceinline__ Loader(const Conv2dParams& p, const GemmPlan& plan, const Source* sources,
                                    TapTable* tables)
      : p(p), plan(plan), sources(sources + threadIdx.x / 8), word(threadIdx.x % 8), tables(tables) {
    const int row0 = threadIdx.x / 8;
    at = row0 * kRowBytes + ((word ^ (row0 % 8)) << 4);
    weight_pass = p.weight.stride[0] * kRowsPerPass * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ void begin_tile(int group, int64_t k, int channels_, const Source& own_) {
    own = own_;
    const int row0 = threadIdx.x / 8;
    x = static_cast<const T*>(p.x.data) + int64_t{group} * plan.group_inputs * p.x.stride[1];
    weight = static_cast<const T*>(p.weight.data) + (k + row0) * p.weight.stride[0];
    channels = channels_ - row0;
  }

  // Decodes this thread's word of a step; every fetch of the step uses it.
  __device__ __forceinline__ void seek(int step, bool issue_, bool fresh) {
    issue = issue_;
    issue_weight = issue_ & fresh;
    if constexpr (kFetch != Fetch::kElements) tap = tap_of(p, plan.reduction, step * 8 + word);
  }
  // Fills the table of a step. A barrier stands between this and the step's fetch.
  __device__ __forceinline__ void tabulate(int step, int slot) const {
    if constexpr (kFetch == Fetch::kElements) {
      const int i = threadIdx.x;
      if (i >= TapTable::kElements) return;
      const Tap t = tap_of(p, plan.reduction, step * TapTable::kElements + i);
      const int size = static_cast<int>(sizeof(T));
      tables[slot].x[i] = {t.x_offset * size, t.in ? t.row : -(1 << 30), t.column};
      tables[slot].weight[i] = t.in ? t.weight_offset * size : -1;
    }
  }
  // A quarter of a stage, so that the fetches mix with the multiplications of the stage before.
  __device__ __forceinline__ void fetch(int slot, char* smem, int quarter) const {
    char* to_x = smem + slot * Smem::kStageX;
    char* to_weight = smem + Smem::kWeights + slot * Smem::kStageWeight;
    if constexpr (kFetch == Fetch::kElements) {
      if (issue) fetch_x_elements(tables[slot], to_x, quarter);
      if (issue_weight) fetch_weight_elements(tables[slot], to_weight, quarter);
    } else {
      fetch_x(shared_address(to_x), quarter);
      fetch_weight(to_weight, quarter);
    }
  }

 private:
  __device__ __forceinline__ void fetch_x(uint32_t to, int quarter) const {
    constexpr int kPassesM = kTileM / kRowsPerPass;
    const char* from = reinterpret_cast<const char*>(x + tap.x_offset);
#pragma unroll
    for (int pass = quarter * (kPassesM / 4); pass < (quarter + 1) * (kPassesM / 4); ++pass) {
      const Source source = load_source(sources + pass * kRowsPerPass);
      cp_async_16(to + at + pass * kPassBytes, from + source.offset, reads_plane(p, source, tap), issue);
    }
  }
  __device__ __forceinline__ void fetch_weight(char* to, int quarter) const {
    const char* from = reinterpret_cast<const char*>(weight + tap.weight_offset);
#pragma unroll
    for (int pass = quarter * (kPassesN / 4); pass < (quarter + 1) * (kPassesN / 4); ++pass) {
      const bool in = tap.in & (pass * kRowsPerPass < channels);
      if constexpr (kFetch == Fetch::kWords) {
        cp_async_16(shared_address(to) + at + pass * kPassBytes, from + pass * weight_pass, in, issue_weight);
      } else {
        // Of merged groups, an output channel has weights for its own group's input channels alone.
        const uint32_t own_group = plan.single_outputs.quotient(threadIdx.x / 8 + pass * kRowsPerPass);
        uint4 elements{0, 0, 0, 0};
        T* part = reinterpret_cast<T*>(&elements);
#pragma unroll
        for (int e = 0; e < kLanes<T>; ++e) {
          const bool same = plan.single_inputs.quotient(tap.channel + e) == own_group;
          const int64_t channel = e - static_cast<int64_t>(own_group) * plan.single_inputs.divisor;
          if (issue_weight & in & same)
            part[e] = reinterpret_cast<const T*>(from + pass * weight_pass)[channel * p.weight.stride[1]];
        }
        if (issue_weight) *reinterpret_cast<uint4*>(to + at + pass * kPassBytes) = elements;
      }
    }
  }

  static __device__ __forceinline__ T load(const T* from, int64_t bytes, bool in) {
    return in ? *reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) + bytes) : from_float<T>(0.f);
  }
  // Two words of the thread's own row.
  __device__ __forceinline__ void fetch_x_elements(const TapTable& table, char* to, int quarter) const {
#pragma unroll
    for (int w = quarter * 2; w < quarter * 2 + 2; ++w) {
      uint4 elements;
      T* part = reinterpret_cast<T*>(&elements);
#pragma unroll
      for (int e = 0; e < kLanes<T>; ++e) {
        const Source t = load_source(table.x + w * kLanes<T> + e);
        const bool in = (static_cast<unsigned>(own.row + t.row) < static_cast<unsigned>(p.x.size[2])) &
                        (static_cast<unsigned>(own.column + t.column) < static_cast<unsigned>(p.x.size[3]));
        part[e] = load(x, own.offset + t.offset, in);
      }
      *reinterpret_cast<uint4*>(to + threadIdx.x * kRowBytes + ((w ^ threadIdx.x % 8) << 4)) = elements;
    }
  }
  // Two elements of the thread's word of every row.
  __device__ __forceinline__ void fetch_weight_elements(const TapTable& table, char* to, int quarter) const {
    const int element = word * kLanes<T> + quarter * 2;
    const int64_t low = table.weight[element], high = table.weight[element + 1];
    to += at + quarter * 4;
#pragma unroll
    for (int pass = 0; pass < kPassesN; ++pass) {
      const bool in = pass * kRowsPerPass < channels;
      const int64_t row = pass * weight_pass;
      *reinterpret_cast<uint32_t*>(to + pass * kPassBytes) =
          pack(load(weight, row + low, in & (low >= 0)), load(weight, row + high, in & (high >= 0)));
    }
  }
};

}  // namespace
}  // namespace sbnet::portable

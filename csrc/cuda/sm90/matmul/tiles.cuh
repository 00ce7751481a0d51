// What the kernels of y = x . W share: which tiles a CTA computes, the stream of records that its producer follows, and
// the finish of a tile.
//
// A tile is a group of output features (core/weights/plan.h) by a run of rows of x. Groups come most work first, so
// workers (clusters of CTAs) that take tiles there and back, 0 1 2 .. 2 1 0 .., end together; where one group is
// far more than a worker's share they take runs of equal cost instead. Nothing is counted in global memory: the order
// is the same in every launch, and so are the results, bit by bit.
#pragma once
#include "core/weights/matmul.h"
#include "core/weights/plan.h"
#include "cuda/masked/conv_epilogue.cuh"
#include "cuda/sm90/matmul/ptx.cuh"

namespace sbnet::sm90::matmul {

struct TileArgs {
  const int32_t* plan;
  int plan_words, record_words, table, groups, group_features, block_size;
  int rows, tile_rows, tiles;  // of x; tiles along the rows
  int band;                    // tiles along the rows whose input stays in L2 while all groups pass
  int items, whole, units;     // tiles; how many of them are computed whole; units of work, the others by halves
  int cluster;
  int features;  // of y
  const void* bias;
  bool bias_f32;
  Activation activation;
  float activation_param;
};

// Flags of a step.
constexpr int kLast = 1, kHalf = 2, kEnd = 4;

// One stage of the ring: a record of the plan, or nothing to add (piece < 0).
struct Step {
  int piece, box;  // first input feature; this lane's box, or -1
  int row, feature, flags;
};

struct Tile {
  int record, records;  // first word in the plan; how many
  int row, feature, flags;
};

// The tiles of one worker.
class Tiles {
 public:
  __device__ __forceinline__ Tiles(const TileArgs& args, int worker, int workers)
      : a(args), worker_(worker), workers_(workers) {
    const int64_t total = static_cast<int64_t>(entry(a.groups).y) * a.tiles, most = entry(1).y;
    skewed_ = a.items > workers && most * workers > 2 * total;
    bands_ = skewed_ ? 1 : (a.tiles + a.band - 1) / a.band;
    if (skewed_) next_ = first_item(worker), end_ = first_item(worker + 1);
  }
  __device__ __forceinline__ bool next(Tile* tile) {
    for (;;) {
      int item, part = 0;  // 1, 2: a half
      if (skewed_) {
        if (next_ >= end_) return false;
        item = next_++;
      } else {
        item = next_ * workers_ + (next_ & 1 ? workers_ - 1 - worker_ : worker_);
        ++next_;
        if (item >= a.units) return false;
        if (item >= a.whole) {
          part = 1 + ((item - a.whole) & 1);
          item = a.whole + ((item - a.whole) >> 1);
        }
      }
      const int per_band = a.groups * (skewed_ ? a.tiles : a.band), band = item / per_band;
      const int first = band * a.band, width = skewed_ ? a.tiles : min(a.band, a.tiles - first);
      item -= band * per_band;
      // Every other band goes the other way, the last one down: the largest tiles do not meet in one worker.
      const int place = item / width, group = (bands_ - 1 - band) & 1 ? a.groups - 1 - place : place;
      const int half_rows = a.tile_rows / 2;
      tile->row = (first + item - place * width) * a.tile_rows + (part == 2 ? half_rows : 0);
      if (tile->row >= a.rows) continue;  // the second half of the last tile
      tile->flags = part || a.rows - tile->row <= half_rows ? kHalf : 0;
      const int3 from = entry(group);
      const int begin = min(max(from.x, 0), a.plan_words), end = min(max(entry(group + 1).x, begin), a.plan_words);
      tile->record = begin, tile->records = (end - begin) / a.record_words;
      tile->feature = static_cast<int>(static_cast<unsigned>(from.z) * a.group_features);
      return true;
    }
  }

 private:
  // The plan is older than any kernel that could run beside this one: no need to wait for the kernel before.
  __device__ __forceinline__ int3 entry(int group) const {
    const int32_t* words = a.plan + a.table + group * kGroupWords;
    return make_int3(__ldg(words), __ldg(words + 1), __ldg(words + 2));
  }
  // The first tile of the worker's run: its middle lies at or past worker / workers of all cost.
  __device__ __forceinline__ int first_item(int worker) const {
    const int lane = threadIdx.x & 31;
    if (worker >= workers_) return a.items;
    const int64_t target = static_cast<int64_t>(entry(a.groups).y) * a.tiles * worker / workers_;
    int group = 0;  // the last one that begins at or before the target
    for (int base = 1;; base += 32) {
      const bool before = base + lane < a.groups && static_cast<int64_t>(entry(base + lane).y) * a.tiles <= target;
      const int count = __popc(__ballot_sync(~0u, before));
      group += count;
      if (count < 32) break;
    }
    const int begin = entry(group).y, cost = max(entry(group + 1).y - begin, 1);
    const int64_t past = target - static_cast<int64_t>(begin) * a.tiles - cost / 2;
    const int64_t tile = past <= 0 ? 0 : (past + cost - 1) / cost;
    return group * a.tiles + static_cast<int>(min(tile, static_cast<int64_t>(a.tiles)));
  }

  const TileArgs& a;
  int worker_, workers_, next_ = 0, end_ = 0, bands_;
  bool skewed_;
};

constexpr int kProducers = 4;  // warps that load, a stage each in turn: one alone would be slower than WGMMA

// The steps of a CTA's tiles, one after the other, and kEnds steps that tell the consumers to leave; put(step) for
// every kProducers-th of them, from the `producer`-th on. kShared: CTAs of a cluster share a tile's records out, two by
// two, and every one makes the same number of steps; else each record is a step of all of them.
template <int kIds, bool kShared, int kEnds, class Put>
__device__ __forceinline__ void for_steps(const TileArgs& a, int rank, int producer, Put&& put) {
  const int lane = threadIdx.x & 31;
  Tiles tiles(a, blockIdx.x / a.cluster, gridDim.x / a.cluster);
  int before = 0;  // steps of the tiles before, modulo kProducers
  for (bool more = true; more;) {
    Tile tile = {0, 0, 0, 0, kEnd};
    more = tiles.next(&tile);
    const int per_round = kShared ? 2 * a.cluster : 1;  // records
    const int rounds = max((tile.records + per_round - 1) / per_round, 1), ends = kShared ? 2 : 1;
    const int count = more ? rounds * ends : kEnds;
    const auto load = [&](int at) {
      Step step = {-1, -1, tile.row, tile.feature, tile.flags};
      const int index = kShared ? (at >> 1) * per_round + rank * 2 + (at & 1) : at;
      if (index < tile.records) {
        const int32_t* record = a.plan + tile.record + index * a.record_words;
        step.piece = max(__ldg(record), 0);
        if (lane < kIds) step.box = __ldg(record + 1 + (kShared ? 0 : rank * kIds) + lane);
      }
      if (at >= count - ends || !more) step.flags |= kLast;  // both warpgroups that share records out see the end
      return step;
    };
    int at = (producer - before) & (kProducers - 1);
    Step next = load(at);
    while (at < count) {
      const Step step = next;
      at += kProducers;
      next = load(at);  // before the wait for an empty stage
      put(step);
    }
    before = (before + count) & (kProducers - 1);
  }
}

// ---------------------------------------------------------------- weights of small blocks, as registers
// Blocks of 16 and 32 come as they lie in memory, in rows of 128 bytes (which TMA copies at full speed, unlike rows of
// 32 or 64), swizzled. A warp reads its 16 output features x 16 of the reduction from block memory at `block`: row c of
// a block is `kUnit` features. Forward: features are columns.
template <int kUnit, bool kTransposed>
__device__ __forceinline__ void load_weights(uint32_t block, int feature, int reduction, uint32_t (&a)[4]) {
  const int lane = threadIdx.x & 31, i = lane & 7, low = lane >> 3 & 1, high = lane >> 4;
  const int c = kTransposed ? feature + low * 8 + i : reduction + high * 8 + i;
  const int k = kTransposed ? reduction + high * 8 : feature + low * 8;
  uint32_t at = block + (c * kUnit + k) * 2;
  at ^= (at >> 7 & 7) << 4;
  if constexpr (kTransposed)
    ldmatrix(at, a);
  else
    ldmatrix_trans(at, a);
}
// The fragments of a 64-deep piece for this warp of a slice, zeros where it has no block. `mask`: the slice's boxes,
// `boxes` where they lie.
template <int kUnit, bool kTransposed>
__device__ __forceinline__ void load_piece(uint32_t boxes, uint32_t mask, uint32_t (&a)[4][4]) {
  constexpr int kParts = 64 / kUnit, kBox = kUnit * kUnit * 2;
  const int feature = (threadIdx.x >> 5 & 3) * 16, part = feature / kUnit;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int sub = k * 16 / kUnit, box = sub * kParts + part;
    if (mask >> box & 1)
      load_weights<kUnit, kTransposed>(boxes + box * kBox, feature % kUnit, k * 16 % kUnit, a[k]);
    else
      a[k][0] = a[k][1] = a[k][2] = a[k][3] = 0;
  }
}
// sums += a stage's weights, of a block of 64x64, x its input: where they begin, in 16 bytes.
template <class T, int kN, bool kTransposed>
__device__ __forceinline__ void multiply_whole(float (&sums)[kN / 2], uint32_t weights, uint32_t input) {
  constexpr uint32_t kWeightStep = (kTransposed ? 32 : 16 * 128) >> 4, kInputStep = 32 >> 4;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    multiply_add<T, kN, !kTransposed, false>(sums, wgmma_layout(1024) | (weights + k * kWeightStep),
                                             wgmma_layout(1024) | (input + k * kInputStep));
  wgmma_commit();
}
// sums += the fragments of a piece x the input at `input`, of those sixteenths of the piece in which the slice has a
// block. Each choice of them is a run of its own: WGMMAs that branches part wait for each other.
template <class T, int kUnit, int kN>
__device__ __forceinline__ void multiply_piece(float (&sums)[kN / 2], const uint32_t (&a)[4][4], uint64_t input,
                                               uint32_t mask) {
  constexpr int kParts = 64 / kUnit, kBlocks = 64 / kUnit, kEach = 4 / kBlocks;
  const auto run = [&](auto blocks) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (decltype(blocks)::value >> (k / kEach) & 1) multiply_add<T, kN>(sums, a[k], input + k * (32 >> 4));
    wgmma_commit();
  };
  uint32_t blocks = 0;  // of the reduction
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
    if (mask >> (i * kParts) & ((1 << kParts) - 1)) blocks |= 1u << i;
  if constexpr (kBlocks == 2) {
    if (blocks == 1) return run(std::integral_constant<int, 1>());
    if (blocks == 2) return run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 3>());
  } else {  // one, two neighbours, or all
    if (blocks == 1) return run(std::integral_constant<int, 1>());
    if (blocks == 2) return run(std::integral_constant<int, 2>());
    if (blocks == 4) return run(std::integral_constant<int, 4>());
    if (blocks == 8) return run(std::integral_constant<int, 8>());
    if (blocks == 3) return run(std::integral_constant<int, 3>());
    if (blocks == 12) return run(std::integral_constant<int, 12>());
    if (!(blocks & 8)) return run(std::integral_constant<int, 7>());
    if (!(blocks & 1)) return run(std::integral_constant<int, 14>());
    run(std::integral_constant<int, 15>());
  }
}

// ---------------------------------------------------------------- start
// What thread 0 sets up: the ring's barriers, each stage filled by one arrival and freed by `readers`; `more` of a
// kernel's own. Then all threads of the cluster go on.
template <int kStages, class Maps, class More>
__device__ __forceinline__ void begin(const Maps& maps, const TileArgs& a, uint32_t full, uint32_t empty, int readers,
                                      const More& more) {
  grid_dependency_release();
  if (threadIdx.x == 0) {
    prefetch_map(&maps.x), prefetch_map(&maps.weight), prefetch_map(&maps.y);
    for (int i = 0; i < kStages; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, readers);
    }
    more();
    fence_mbar_init();
  }
  __syncthreads();
  if (a.cluster > 1) cluster_sync();
}

// ---------------------------------------------------------------- finish
struct Bias {
  float low, high;  // of this thread's two output features
};
template <class T>
__device__ __forceinline__ float bias_of(const TileArgs& a, int feature) {
  if (!a.bias || static_cast<unsigned>(feature) >= static_cast<unsigned>(a.features)) return 0.f;
  if (a.bias_f32) return load_float(static_cast<const float*>(a.bias) + feature);
  return unpack<T>(load_half(static_cast<const T*>(a.bias) + feature)).x;
}
template <class T>
__device__ __forceinline__ Bias load_bias(const TileArgs& a, int slice) {
  const int feature = slice + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
  return {bias_of<T>(a, feature), bias_of<T>(a, feature + 8)};
}
// Sums of kRows rows x 64 features, transposed into staging memory: kRows rows of 128 bytes, swizzled.
template <class T, int kRows>
__device__ __forceinline__ void stage_sums(const TileArgs& a, const float* sums, const Bias& bias, uint32_t staging) {
  float v[1][kRows / 2];
#pragma unroll
  for (int e = 0; e < kRows / 2; ++e) v[0][e] = sums[e] + (e & 2 ? bias.high : bias.low);
  activate<true>(a.activation, a.activation_param, v);
  const int lane = threadIdx.x & 31, w4 = threadIdx.x >> 5 & 3, i = lane & 7, mat = lane >> 3;
  const uint32_t to = staging + ((mat >> 1) * 8 + i) * 128 + (((w4 * 2 + (mat & 1)) ^ i) << 4);
#pragma unroll
  for (int j = 0; j < kRows / 8; j += 2) {
    const float* p = v[0] + j * 4;
    stmatrix_trans(to + j * 1024, pack<T>(p[0], p[1]), pack<T>(p[2], p[3]), pack<T>(p[4], p[5]), pack<T>(p[6], p[7]));
  }
}

}  // namespace sbnet::sm90::matmul

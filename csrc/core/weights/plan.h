// What lies in a plan (make_blocksparse_plan), for the kernels of csrc/cuda/sm90/matmul that read it.
//
// Forward and input gradient. The output features are cut into slices of 64; a group is the slices that a cluster of
// CTAs computes side by side. A group's records name the 64-deep pieces of the reduction in which any of its slices has
// a block, in rising order, and the boxes of weights there. A box is unit x unit weights, unit = min(block size, 64):
// a whole block, or a quarter of one of 128. A record is
//
//   [1]                    first input feature of the piece, a multiple of 64
//   [cluster][slice][input box of the piece][output box of the slice]   the box, or -1: ids boxes for each CTA
//
// Boxes of 64 count 64 x 64 quarters: block * 4 + 2 * (64 rows down) + (64 columns right), or block * 4 where a block
// is one box. Smaller ones are the block itself. The table of a plan names its groups, most work first:
//
//   [groups + 1][3]        first word of its records, cost of all groups before, group
//
// Weight gradient. A unit is 128 input features x up to four pieces of 64 output features that need not be neighbours:
//
//   [1]                    units; units of four pieces come first
//   [units]: [1] first input feature, [1] pieces (2 or 4), [4] first output features (those without a block: past the
//   end), [4][unit_blocks] the blocks of each piece, [input part][output part], or -1
// Blocks of 8 go to these kernels by fours, as blocks of 16 that the call makes of them: the plan is that of the larger
// blocks, and behind it lie the four blocks of each (or -1), [fours][upper, lower][left, right], and how many there
// are.
#pragma once
#include "core/weights/layout.h"

namespace sbnet {

// The layout that a plan is of. `blocks` stays the number of those stored: kernels ask it for the density alone.
inline BlockLayoutShape planned_shape(const BlockLayoutShape& s) {
  if (s.block_size != 8) return s;
  return {(s.block_rows + 1) / 2, (s.block_columns + 1) / 2, s.blocks, s.in_features, s.out_features, 16};
}

struct TilePlan {  // of one tile shape
  int32_t slices, cluster, unit, ids;
  int64_t groups, table;  // the first word of its table
  int32_t record_words() const { return 1 + cluster * ids; }
  int32_t cta_features() const { return slices * 64; }
};

constexpr int32_t kGroupWords = 3;

// Of the side that a pass writes.
inline int64_t output_blocks(const BlockLayoutShape& s, bool transposed) {
  return transposed ? s.block_rows : s.block_columns;
}

inline TilePlan tile_plan(const BlockLayoutShape& s, bool transposed, int slices, int cluster, int64_t table) {
  TilePlan t = {slices, cluster, s.block_size < 64 ? s.block_size : 64, 0, 0, table};
  t.ids = slices * (64 / t.unit) * (64 / t.unit);
  const int64_t features = output_blocks(s, transposed) * s.block_size, group = int64_t{64} * slices * cluster;
  t.groups = (features + group - 1) / group;
  return t;
}
// 128 output features a CTA. Small blocks at high density: two CTAs share their input by multicast, which halves what
// the L2 cache is asked for; at low density the pair's union would only grow.
inline TilePlan wide_plan(const BlockLayoutShape& s, bool transposed) {
  const bool dense = s.blocks * 5 >= s.block_rows * s.block_columns;
  return tile_plan(s, transposed, 2, s.block_size < 64 && dense ? 2 : 1, 0);
}
// 64 output features a CTA, for few rows.
inline TilePlan narrow_plan(const BlockLayoutShape& s, bool transposed) {
  const TilePlan wide = wide_plan(s, transposed);
  return tile_plan(s, transposed, 1, 1, kGroupWords * (wide.groups + 1));
}

constexpr int32_t kUnitPieces = 4;
constexpr int32_t kUnitFeatures = 128;
SBNET_HOST_DEVICE constexpr int32_t unit_blocks(int32_t block_size) {
  return (block_size >= 128 ? 1 : 128 / block_size) * (block_size >= 64 ? 1 : 64 / block_size);
}
SBNET_HOST_DEVICE constexpr int32_t unit_words(int32_t block_size) {
  return 2 + kUnitPieces + kUnitPieces * unit_blocks(block_size);
}

}  // namespace sbnet

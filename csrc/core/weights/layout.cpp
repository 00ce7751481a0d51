#include "core/weights/layout.h"

#include <algorithm>

namespace sbnet {
namespace {

// Entries of each major block (row or column), sorted by the minor one: a counting sort by minor, then by major.
// Returns the first block that is named twice, or -1.
int64_t index_blocks(const int32_t* coords, int64_t blocks, int64_t majors, int major, int32_t* start,
                     int32_t* entries) {
  std::fill_n(start, majors + 1, 0);
  for (int64_t b = 0; b < blocks; ++b) ++start[coords[2 * b + major] + 1];
  for (int64_t m = 0; m < majors; ++m) start[m + 1] += start[m];
  struct Entry {
    int32_t minor, block;
  };
  static_assert(sizeof(Entry) == 8);
  Entry* list = reinterpret_cast<Entry*>(entries);
  for (int64_t b = 0; b < blocks; ++b)  // start[m] moves to the end of m's entries, where m + 1 begins
    list[start[coords[2 * b + major]]++] = {coords[2 * b + 1 - major], static_cast<int32_t>(b)};
  for (int64_t m = majors; m > 0; --m) start[m] = start[m - 1];
  start[0] = 0;
  for (int64_t m = 0; m < majors; ++m) {
    std::sort(list + start[m], list + start[m + 1], [](const Entry& a, const Entry& b) { return a.minor < b.minor; });
    for (int64_t i = start[m] + 1; i < start[m + 1]; ++i)
      if (list[i].minor == list[i - 1].minor) return std::max(list[i].block, list[i - 1].block);
  }
  return -1;
}

Status check_features(const char* op, const char* name, int64_t features, int64_t blocks, int64_t size) {
  SBNET_CHECK(features > (blocks - 1) * size && features <= blocks * size,
              "%s: layout: expected %s features that fill %lld blocks of %lld, got %lld", op, name,
              static_cast<long long>(blocks), static_cast<long long>(size), static_cast<long long>(features));
  return ok_status();
}

}  // namespace

Status validate(const char* op, const BlockLayoutShape& s) {
  SBNET_CHECK(is_weight_block_size(s.block_size), "%s: layout: expected block_size 8, 16, 32, 64 or 128, got %d", op,
              s.block_size);
  SBNET_CHECK(s.block_rows >= 1 && s.block_columns >= 1 && s.block_rows <= (1 << 23) && s.block_columns <= (1 << 23),
              "%s: layout: expected 1 to 2^23 blocks along C and K, got %lld and %lld", op,
              static_cast<long long>(s.block_rows), static_cast<long long>(s.block_columns));
  SBNET_CHECK(s.blocks >= 0 && s.blocks <= s.block_rows * s.block_columns && s.blocks <= (1 << 30) &&
                  s.blocks * s.block_size * s.block_size <= kMaxBlockWeights,
              "%s: layout: expected at most %lld blocks (and 2^30, and 2^40 weights), got %lld", op,
              static_cast<long long>(s.block_rows * s.block_columns), static_cast<long long>(s.blocks));
  SBNET_TRY(check_features(op, "input", s.in_features, s.block_rows, s.block_size));
  return check_features(op, "output", s.out_features, s.block_columns, s.block_size);
}

int64_t block_layout_words(const BlockLayoutShape& s) { return 6 * s.blocks + s.block_columns + s.block_rows + 2; }

BlockLayoutView block_layout_view(const BlockLayoutShape& s, const int32_t* words) {
  // Pairs first: they stay aligned to 8 bytes.
  const int32_t* starts = words + 6 * s.blocks;
  return {s, words, starts, words + 2 * s.blocks, starts + s.block_columns + 1, words + 4 * s.blocks};
}

Status make_block_layout(const BlockLayoutShape& s, const int32_t* coords, int32_t* words) {
  constexpr const char* op = "block_layout";
  SBNET_TRY(validate(op, s));
  for (int64_t b = 0; b < s.blocks; ++b)
    SBNET_CHECK(coords[2 * b] >= 0 && coords[2 * b] < s.block_rows && coords[2 * b + 1] >= 0 &&
                    coords[2 * b + 1] < s.block_columns,
                "%s: coords: expected (c, k) below (%lld, %lld), got (%d, %d) for block %lld", op,
                static_cast<long long>(s.block_rows), static_cast<long long>(s.block_columns), coords[2 * b],
                coords[2 * b + 1], static_cast<long long>(b));
  const BlockLayoutView view = block_layout_view(s, words);
  const auto part = [&](const int32_t* p) { return words + (p - words); };
  std::copy_n(coords, 2 * s.blocks, words);
  const int64_t twice =
      index_blocks(coords, s.blocks, s.block_columns, 1, part(view.column_start), part(view.column_entries));
  SBNET_CHECK(twice < 0, "%s: coords: expected every block once, got (%d, %d) again as block %lld", op,
              coords[2 * twice], coords[2 * twice + 1], static_cast<long long>(twice));
  index_blocks(coords, s.blocks, s.block_rows, 0, part(view.row_start), part(view.row_entries));
  return ok_status();
}

}  // namespace sbnet

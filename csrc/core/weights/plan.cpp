#include "core/weights/plan.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace sbnet {
namespace {

constexpr int64_t kMostWords = INT32_MAX;  // the tables name words by int32

// Work of a record, against 1 for 8 KB of weights or input: the input tile and the weights of its slices. And what a
// tile costs beyond its records.
constexpr int32_t kWideInput = 4, kWideTile = 8, kNarrowInput = 1, kNarrowTile = 4;

struct Box {
  int64_t piece;   // of the reduction, 64 features each
  int32_t at, id;  // position in the record's list, box
};

// The boxes of block b, which covers output features from `out` on and reduction features from `in` on, as f(output
// feature, reduction feature, id).
template <class F>
void for_boxes(int32_t size, bool transposed, int64_t out, int64_t in, int32_t b, F&& f) {
  if (size < 64) return f(out, in, b);
  for (int i = 0; i < size; i += 64)
    for (int o = 0; o < size; o += 64) {
      const int row = transposed ? o : i, column = transposed ? i : o;  // within the block as stored, [c][k]
      f(out + o, in + i, b * 4 + row / 64 * 2 + column / 64);
    }
}

// Appends the records of every group of a tile shape and writes its table, which has its place already. False: the plan
// would be too long.
bool append_tiles(const BlockLayoutView& host, bool transposed, const TilePlan& t, int input_cost, int tile_cost,
                  std::vector<int32_t>* words) {
  const int32_t size = host.shape.block_size, parts = 64 / t.unit;
  const int32_t* start = transposed ? host.row_start : host.column_start;
  const int32_t* entries = transposed ? host.row_entries : host.column_entries;
  const int64_t group_features = int64_t{t.cta_features()} * t.cluster,
                out_blocks = output_blocks(host.shape, transposed);
  struct Group {
    std::vector<Box> boxes;
    int64_t records = 0, cost = 0;
  };
  std::vector<Group> groups(t.groups);
  for (int64_t o = 0; o < out_blocks; ++o)
    for (int32_t e = start[o]; e < start[o + 1]; ++e)
      for_boxes(size, transposed, o * size, int64_t{entries[2 * e]} * size, entries[2 * e + 1],
                [&](int64_t out, int64_t in, int32_t id) {
                  const int64_t within = out % group_features, slice = within / 64;
                  const int32_t sub = static_cast<int32_t>(in % 64) / t.unit,
                                part = static_cast<int32_t>(out % 64) / t.unit;
                  groups[out / group_features].boxes.push_back(
                      {in / 64, static_cast<int32_t>((slice * parts + sub) * parts + part), id});
                });
  for (Group& g : groups) {
    std::stable_sort(g.boxes.begin(), g.boxes.end(), [](const Box& a, const Box& b) { return a.piece < b.piece; });
    g.cost = tile_cost;
    int64_t last = -1;
    std::vector<bool> seen(t.slices * t.cluster);
    for (const Box& box : g.boxes) {
      if (box.piece != last) g.cost += input_cost, ++g.records, std::fill(seen.begin(), seen.end(), false);
      last = box.piece;
      const int slice = box.at / (parts * parts);
      if (!seen[slice]) g.cost += 1;
      seen[slice] = true;
    }
  }
  std::vector<int32_t> order(t.groups);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return groups[a].cost > groups[b].cost; });
  int64_t cost = 0, table = t.table;
  for (const int32_t index : order) {
    const Group& g = groups[index];
    const int64_t first = static_cast<int64_t>(words->size());
    if (first + g.records * t.record_words() > kMostWords || cost + g.cost > kMostWords) return false;
    const int32_t entry[kGroupWords] = {static_cast<int32_t>(first), static_cast<int32_t>(cost), index};
    std::copy_n(entry, kGroupWords, words->begin() + table), table += kGroupWords;
    words->resize(first + g.records * t.record_words(), -1);
    int64_t record = first - t.record_words(), last = -1;
    for (const Box& box : g.boxes) {
      if (box.piece != last) (*words)[record += t.record_words()] = static_cast<int32_t>(box.piece * 64);
      last = box.piece;
      (*words)[record + 1 + box.at] = box.id;
    }
    cost += g.cost;
  }
  const int32_t end[kGroupWords] = {static_cast<int32_t>(words->size()), static_cast<int32_t>(cost), 0};
  std::copy_n(end, kGroupWords, words->begin() + table);
  return true;
}

std::vector<int32_t> matmul_plan(const BlockLayoutView& host, bool transposed) {
  const TilePlan wide = wide_plan(host.shape, transposed), narrow = narrow_plan(host.shape, transposed);
  std::vector<int32_t> words(narrow.table + kGroupWords * (narrow.groups + 1));
  if (!append_tiles(host, transposed, wide, kWideInput, kWideTile, &words) ||
      !append_tiles(host, transposed, narrow, kNarrowInput, kNarrowTile, &words))
    words.clear();
  return words;
}

std::vector<int32_t> weight_grad_plan(const BlockLayoutView& host) {
  const BlockLayoutShape& s = host.shape;
  const int32_t size = s.block_size, blocks = unit_blocks(size), columns = size >= 64 ? 1 : 64 / size;
  const int64_t rows = s.block_rows * size, outputs = s.block_columns * size;
  struct Piece {
    int64_t column;  // first output feature
    std::vector<int32_t> blocks;
  };
  std::vector<int32_t> full, half;
  for (int64_t first = 0; first < rows; first += kUnitFeatures) {
    std::vector<Piece> pieces;
    std::vector<Box> boxes;  // `piece` counts 64 output features here
    for (int64_t r = first / size; r < std::min<int64_t>((first + kUnitFeatures + size - 1) / size, s.block_rows); ++r)
      for (int32_t e = host.row_start[r]; e < host.row_start[r + 1]; ++e) {
        const int64_t column = int64_t{host.row_entries[2 * e]} * size;
        const int32_t at =
            static_cast<int32_t>((r * size - first) / size * columns + (size < 64 ? column % 64 / size : 0));
        for (int64_t c = column; c < column + size; c += 64) boxes.push_back({c / 64, at, host.row_entries[2 * e + 1]});
      }
    std::stable_sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.piece < b.piece; });
    for (const Box& box : boxes) {
      if (pieces.empty() || pieces.back().column != box.piece * 64)
        pieces.push_back({box.piece * 64, std::vector<int32_t>(blocks, -1)});
      pieces.back().blocks[box.at] = box.id;
    }
    for (size_t p = 0; p < pieces.size(); p += kUnitPieces) {
      const size_t count = std::min<size_t>(kUnitPieces, pieces.size() - p);
      std::vector<int32_t>& to = count > 2 ? full : half;
      to.push_back(static_cast<int32_t>(first)), to.push_back(count > 2 ? 4 : 2);
      for (size_t i = 0; i < kUnitPieces; ++i)
        to.push_back(static_cast<int32_t>(i < count ? pieces[p + i].column : (outputs + 63) / 64 * 64));
      for (size_t i = 0; i < kUnitPieces; ++i)
        for (int32_t b = 0; b < blocks; ++b) to.push_back(i < count ? pieces[p + i].blocks[b] : -1);
    }
  }
  std::vector<int32_t> words;
  if (static_cast<int64_t>(full.size() + half.size()) >= kMostWords) return words;
  words.push_back(static_cast<int32_t>((full.size() + half.size()) / unit_words(size)));
  words.insert(words.end(), full.begin(), full.end());
  words.insert(words.end(), half.begin(), half.end());
  return words;
}

std::vector<int32_t> plan_of(const BlockLayoutView& host, MatmulPass pass);

// Of blocks of 8: the plan of blocks of 16 that hold them, numbered by rows and columns; then what they hold.
std::vector<int32_t> plan_of_fours(const BlockLayoutView& host, MatmulPass pass) {
  BlockLayoutShape shape = planned_shape(host.shape);
  std::vector<int32_t> coords, fours;
  std::vector<int32_t> at(shape.block_columns);  // the four of each block column in this block row
  for (int64_t row = 0; row < shape.block_rows; ++row) {
    std::fill(at.begin(), at.end(), -1);
    for (int64_t r = 2 * row; r < std::min(2 * row + 2, host.shape.block_rows); ++r)
      for (int32_t e = host.row_start[r]; e < host.row_start[r + 1]; ++e) {
        const int32_t column = host.row_entries[2 * e];
        int32_t& four = at[column / 2];
        if (four < 0) {
          four = static_cast<int32_t>(fours.size() / 4);
          fours.insert(fours.end(), 4, -1);
          coords.push_back(static_cast<int32_t>(row)), coords.push_back(column / 2);
        }
        fours[4 * four + (r & 1) * 2 + (column & 1)] = host.row_entries[2 * e + 1];
      }
  }
  shape.blocks = static_cast<int64_t>(fours.size() / 4);
  std::vector<int32_t> tables(block_layout_words(shape));
  if (!make_block_layout(shape, coords.data(), tables.data()).ok()) return {};  // of more blocks than there may be
  BlockLayoutView view = block_layout_view(shape, tables.data());
  view.shape.blocks = host.shape.blocks;
  std::vector<int32_t> words = plan_of(view, pass);
  if (words.empty() || static_cast<int64_t>(words.size() + fours.size()) >= kMostWords) return {};
  words.insert(words.end(), fours.begin(), fours.end());
  words.push_back(static_cast<int32_t>(fours.size() / 4));
  return words;
}

std::vector<int32_t> plan_of(const BlockLayoutView& host, MatmulPass pass) {
  const BlockLayoutShape& s = host.shape;
  const int64_t most = int64_t{1} << 30;  // features: coordinates are int32
  if (!s.blocks || s.blocks > (1 << 28) || s.in_features > most || s.out_features > most) return {};
  if (s.block_size == 8) return plan_of_fours(host, pass);
  return pass == MatmulPass::kWeightGradient ? weight_grad_plan(host)
                                             : matmul_plan(host, pass == MatmulPass::kInputGradient);
}

}  // namespace

int64_t blocksparse_plan_words(const BlockLayoutView& host, MatmulPass pass) {
  return static_cast<int64_t>(plan_of(host, pass).size());
}

void make_blocksparse_plan(const BlockLayoutView& host, MatmulPass pass, int32_t* words) {
  const std::vector<int32_t> plan = plan_of(host, pass);
  std::copy(plan.begin(), plan.end(), words);
}

}  // namespace sbnet

// What the Hopper kernel follows: tiles of output channels, and the pieces of inputs that each multiplies.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "core/masked/conv_select.h"
#include "core/memory.h"
#include "core/weights/conv.h"

namespace sbnet {
namespace {

using Words = std::vector<int32_t>;

struct GridBlock {
  int32_t place[2], id;  // of its outputs and its inputs, in blocks
};

// The blocks as squares of `size` channels on a grid; none where they are not that.
std::vector<GridBlock> grid_blocks(const BlocksparseConvLayout& layout, int32_t size) {
  std::vector<GridBlock> found;
  for (int64_t b = 0; b < layout.shape.blocks; ++b) {
    const BlocksparseConvBlock block = conv_block(layout, b);
    GridBlock at = {{}, static_cast<int32_t>(b)};
    for (int side = 0; side < 2; ++side) {
      const int32_t* list = block.list[side];
      if (block.count[side] != size || list[0] % size) return {};
      for (int32_t i = 0; i < size; ++i)
        if (list[i] != list[0] + i) return {};
      at.place[side] = list[0] / size;
    }
    found.push_back(at);
  }
  const auto by_place = [](const GridBlock& a, const GridBlock& b) {
    return std::make_pair(a.place[0], a.place[1]) < std::make_pair(b.place[0], b.place[1]);
  };
  std::sort(found.begin(), found.end(), by_place);
  for (size_t i = 1; i < found.size(); ++i)
    if (!by_place(found[i - 1], found[i])) return {};
  return found;
}

// Appends the tiles of side `to`, and returns how many pieces they have.
int64_t append_side(const BlocksparseConvShape& shape, const std::vector<GridBlock>& blocks, int to, Words* tables) {
  const int32_t size = static_cast<int32_t>(shape.block_size), sixteens = size / 16;
  std::vector<std::vector<GridBlock>> columns(static_cast<size_t>(shape.channels[to] / size));
  for (const GridBlock& b : blocks) columns[static_cast<size_t>(b.place[to])].push_back(b);
  const int32_t width = conv_tile_width(shape), parts = width / 16;
  Words start = {0}, steps, pieces;
  int32_t count = 0;
  for (int32_t first = 0; first < shape.channels[to]; first += width) {
    std::map<int32_t, Words> inputs;  // a block of each 16 outputs, by 16 inputs
    for (int32_t part = 0; part < parts; ++part) {
      const size_t column = static_cast<size_t>((first + part * 16) / size);
      if (column >= columns.size()) break;
      for (const GridBlock& b : columns[column])
        for (int32_t i = 0; i < sixteens; ++i) {
          Words& ids =
              inputs.try_emplace(b.place[1 - to] * sixteens + i, Words(static_cast<size_t>(parts), -1)).first->second;
          ids[static_cast<size_t>(part)] = b.id;
        }
    }
    steps.push_back(static_cast<int32_t>(inputs.size()));
    for (auto next = inputs.begin(); next != inputs.end(); ++count) {
      const int32_t from = next->first;
      Words piece(static_cast<size_t>(conv_piece_words(width)), -1);
      piece[0] = from * 16, piece[2] = first % size;
      for (; next != inputs.end() && next->first < from + 4; ++next) {
        const int32_t step = next->first - from;
        piece[1] = step + 1;
        for (int32_t part = 0; part < parts; ++part)
          piece[static_cast<size_t>(kPieceHead + part * 4 + step)] = next->second[static_cast<size_t>(part)];
      }
      pieces.insert(pieces.end(), piece.begin(), piece.end());
    }
    start.push_back(count);
  }
  Words order(steps.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return steps[static_cast<size_t>(a)] > steps[static_cast<size_t>(b)]; });
  tables->insert(tables->end(), start.begin(), start.end());
  tables->insert(tables->end(), order.begin(), order.end());
  tables->insert(tables->end(), pieces.begin(), pieces.end());
  return count;
}

TensorView plane(const VolumeView& t) {
  return {t.data,
          {t.size[0], t.size[1], t.size[3], t.size[4]},
          {t.stride[0], t.stride[1], t.stride[3], t.stride[4]},
          t.dtype};
}

}  // namespace

int conv_tile_width(const BlocksparseConvShape& s) {
  if (s.block_size >= 64) return 64;
  // Cycles of an output, for 64 positions x 16 inputs, as in sm90/conv/conv_general_host.cuh, and the share of pieces
  // that random blocks of this density leave. 16 is the narrowest.
  constexpr struct {
    int outputs;
    double cycles;
  } kWidths[] = {{64, 32. / 64}, {32, 24. / 32}, {16, 20. / 16}};
  const double side = static_cast<double>(s.block_size);
  const double density = static_cast<double>(s.blocks) * side * side /
                         (static_cast<double>(s.channels[0]) * static_cast<double>(s.channels[1]));
  int chosen = 64;
  double least = 0;
  for (const auto& w : kWidths) {
    if (w.outputs < s.block_size) break;
    const double cycles = w.cycles * (1 - std::pow(1 - density, w.outputs / side));
    if (least > 0 && cycles >= least) continue;
    least = cycles, chosen = w.outputs;
  }
  return chosen;
}

void append_conv_pieces(const BlocksparseConvLayout& layout, BlocksparseConvShape* shape, Words* tables) {
  const int32_t size = conv_block(layout, 0).count[0];
  if (size != 16 && size != 32 && size != 64 && size != 128) return;
  const std::vector<GridBlock> blocks = grid_blocks(layout, size);
  if (blocks.empty()) return;
  shape->block_size = size;
  for (int side = 0; side < 2; ++side) shape->pieces[side] = append_side(*shape, blocks, side, tables);
}

Conv2dParams conv_of_planes(const BlocksparseConvParams& p) {
  Conv2dParams c = {};
  c.x = plane(p.x), c.y = plane(p.y);
  const int64_t C = p.layout.shape.channels[p.from()], R = p.geometry.kernel[1], S = p.geometry.kernel[2];
  c.weight = {nullptr, {p.layout.shape.channels[p.to()], C, R, S}, {R * S * C, 1, S * C, C}, p.x.dtype};
  c.bias = p.bias, c.bias_dtype = p.bias_dtype;
  c.active = p.active;
  if (!p.active.given()) {
    const int32_t side[2] = {static_cast<int32_t>(p.y.size[3]), static_cast<int32_t>(p.y.size[4])};
    c.active = {nullptr, nullptr, nullptr, p.y.size[0], {{side[0], side[1]}, {side[0], side[1]}, {0, 0}, {1, 1}}};
  }
  for (int d = 0; d < 2; ++d) {
    const ConvGeometry& g = p.geometry;
    const int32_t padding = g.padding[1 + d], reach = (g.kernel[1 + d] - 1) * g.dilation[1 + d];
    c.padding[d] = p.transposed ? reach - padding : padding;
    c.stride[d] = g.stride[1 + d], c.dilation[d] = g.dilation[1 + d];
  }
  c.groups = 1;
  c.activation = p.activation, c.activation_param = p.activation_param;
  return c;
}

const char* hopper_blocksparse_conv_declines(const BlocksparseConvParams& p) {
  constexpr int64_t kFar = 1 << 28;
  const ConvGeometry& g = p.geometry;
  if (!p.layout.shape.block_size)
    return "blocks are no squares of a grid, 16 to 128 channels to a side, each there once";
  if (p.x.size[2] != 1 || p.y.size[2] != 1 || g.kernel[0] != 1 || g.padding[0]) return "volumes";
  if (!size_product({p.x.size[0], p.x.size[3], p.x.size[4]})) return "an empty plane";
  for (int d = 1; d < 3; ++d) {
    if (p.transposed && g.stride[d] != 1) return "a transposed convolution of another stride than 1";
    if (int64_t{g.kernel[d]} * g.dilation[d] > kFar || p.y.size[2 + d] * g.stride[d] > kFar)
      return "taps too far apart";
  }
  const Conv2dParams c = conv_of_planes(p);
  if (const char* why = hopper_general_declines(c)) return why;
  return channels_vectorize(c.x) && channels_vectorize(c.y) ? nullptr : "pixels are not 16-byte aligned";
}

}  // namespace sbnet

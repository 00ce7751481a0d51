#include "core/weights/conv.h"

#include <map>

#include "core/grid.h"

namespace sbnet {
namespace {

constexpr const char* kConv = "blocksparse_conv";
constexpr const char* kWeightGrad = "blocksparse_conv_weight_grad";
constexpr int64_t kMaxSide = int64_t{1} << 30;

Status check_volume(const char* op, const char* argument, const VolumeView& t, int64_t channels) {
  SBNET_CHECK(t.size[1] == channels, "%s: %s: expected %lld channels, got %lld", op, argument,
              static_cast<long long>(channels), static_cast<long long>(t.size[1]));
  for (int d = 0; d < 5; ++d) {
    SBNET_CHECK(t.size[d] >= 0 && t.size[d] <= kMaxSide, "%s: %s: expected sizes of at most 2^30, got %lld", op,
                argument, static_cast<long long>(t.size[d]));
    SBNET_CHECK(t.stride[d] >= 0, "%s: %s: expected strides of 0 or more, got %lld in dimension %d", op, argument,
                static_cast<long long>(t.stride[d]), d);
  }
  const int64_t elements = size_product({t.size[0], t.size[1], t.size[2], t.size[3], t.size[4]});
  SBNET_CHECK(elements <= int64_t{1} << 40, "%s: %s: expected at most 2^40 elements, got %lld", op, argument,
              static_cast<long long>(elements));
  return ok_status();
}

Status check_pair(const char* op, const VolumeView& x, const VolumeView& y, const char* name) {
  SBNET_CHECK(is_compute_dtype(x.dtype), "%s: x: expected float32, float16 or bfloat16, got %s", op,
              dtype_name(x.dtype));
  SBNET_CHECK(y.dtype == x.dtype, "%s: %s: expected %s, the dtype of x, got %s", op, name, dtype_name(x.dtype),
              dtype_name(y.dtype));
  SBNET_CHECK(y.size[0] == x.size[0], "%s: %s: expected the %lld images of x, got %lld", op, name,
              static_cast<long long>(x.size[0]), static_cast<long long>(y.size[0]));
  return ok_status();
}

Status check_geometry(const char* op, const ConvGeometry& g, int64_t taps) {
  constexpr int32_t kMost = 1 << 20;
  for (int d = 0; d < 3; ++d) {
    SBNET_CHECK(g.kernel[d] >= 1 && g.kernel[d] <= kMost, "%s: kernel_size: expected 1 to 2^20, got %d", op,
                g.kernel[d]);
    SBNET_CHECK(g.stride[d] >= 1 && g.stride[d] <= kMost, "%s: stride: expected 1 to 2^20, got %d", op, g.stride[d]);
    SBNET_CHECK(g.dilation[d] >= 1 && g.dilation[d] <= kMost, "%s: dilation: expected 1 to 2^20, got %d", op,
                g.dilation[d]);
    SBNET_CHECK(g.padding[d] >= 0 && g.padding[d] <= kMost, "%s: padding: expected 0 to 2^20, got %d", op,
                g.padding[d]);
  }
  const int64_t product = size_product({g.kernel[0], g.kernel[1], g.kernel[2]});
  SBNET_CHECK(product == taps, "%s: kernel_size: expected the layout's %lld taps, got %lld", op,
              static_cast<long long>(taps), static_cast<long long>(product));
  return ok_status();
}

Status check_layout(const char* op, const BlocksparseConvLayout& layout) {
  SBNET_TRY(validate(op, layout.shape));
  SBNET_CHECK(layout.blocks && layout.lists && layout.side[0].start && layout.side[1].start,
              "%s: layout: expected tables, got none", op);
  return ok_status();
}

}  // namespace

Status validate(const char* op, const BlocksparseConvShape& s) {
  constexpr int64_t kMost = INT32_MAX / 64;
  for (int side = 0; side < 2; ++side) {
    SBNET_CHECK(s.channels[side] >= 1 && s.channels[side] <= kMost, "%s: layout: expected 1 to 2^25 channels, got %lld",
                op, static_cast<long long>(s.channels[side]));
    SBNET_CHECK(s.groups[side] >= 1 && s.groups[side] <= s.channels[side] && s.entries[side] >= s.groups[side] &&
                    s.entries[side] <= kMost,
                "%s: layout: expected 1 group to one a channel, no more groups than entries, got %lld groups of %lld "
                "entries for %lld channels",
                op, static_cast<long long>(s.groups[side]), static_cast<long long>(s.entries[side]),
                static_cast<long long>(s.channels[side]));
  }
  SBNET_CHECK(s.blocks >= 1 && s.blocks <= kMost && s.list_words >= 2 && s.list_words <= kMost,
              "%s: layout: expected 1 to 2^25 blocks and channels in lists, got %lld and %lld", op,
              static_cast<long long>(s.blocks), static_cast<long long>(s.list_words));
  SBNET_CHECK(s.taps >= 1 && s.weights >= 1 && s.weights <= INT32_MAX,
              "%s: layout: expected at least 1 tap and 1 to 2^31 - 1 weights, got %lld and %lld", op,
              static_cast<long long>(s.taps), static_cast<long long>(s.weights));
  const int64_t size = s.block_size;
  bool grid = size == 16 || size == 32 || size == 64 || size == 128;
  for (int side = 0; side < 2; ++side)
    grid = grid && s.channels[side] % size == 0 && s.pieces[side] >= conv_tiles(s, side) && s.pieces[side] <= kMost;
  SBNET_CHECK(size ? grid && size_product({s.blocks, size, size, s.taps}) == s.weights : !s.pieces[0] && !s.pieces[1],
              "%s: layout: expected tables of blocks of one size or of lists, got blocks of %lld channels, %lld and "
              "%lld pieces",
              op, static_cast<long long>(size), static_cast<long long>(s.pieces[0]),
              static_cast<long long>(s.pieces[1]));
  return ok_status();
}

Status validate(const BlocksparseConvParams& p) {
  SBNET_TRY(check_layout(kConv, p.layout));
  SBNET_TRY(check_pair(kConv, p.x, p.y, "out"));
  SBNET_TRY(check_volume(kConv, "x", p.x, p.layout.shape.channels[p.from()]));
  SBNET_TRY(check_volume(kConv, "out", p.y, p.layout.shape.channels[p.to()]));
  SBNET_TRY(check_geometry(kConv, p.geometry, p.layout.shape.taps));
  SBNET_CHECK(p.weight, "%s: weight: expected %lld elements, got none", kConv,
              static_cast<long long>(p.layout.shape.weights));
  SBNET_TRY(check_epilogue(kConv, p.x.dtype, p.bias, p.bias_dtype, p.activation));
  SBNET_TRY(check_written(kConv, "out", p.y.size, p.y.stride));
  if (!p.active.given()) return ok_status();
  SBNET_CHECK(p.y.size[2] == 1, "%s: active: expected planes, got volumes", kConv);
  SBNET_TRY(check_active(kConv, p.active));
  return check_tiling(kConv, p.active.grid, p.y.size[3], p.y.size[4]);
}

Status validate(const BlocksparseConvWeightGradParams& p) {
  SBNET_TRY(check_layout(kWeightGrad, p.layout));
  SBNET_TRY(check_pair(kWeightGrad, p.x, p.dy, "dy"));
  SBNET_TRY(check_volume(kWeightGrad, "x", p.x, p.layout.shape.channels[1]));
  SBNET_TRY(check_volume(kWeightGrad, "dy", p.dy, p.layout.shape.channels[0]));
  SBNET_CHECK(p.dw, "%s: out: expected %lld elements, got none", kWeightGrad,
              static_cast<long long>(p.layout.shape.weights));
  return check_geometry(kWeightGrad, p.geometry, p.layout.shape.taps);
}

Status check_tables(const char* op, const BlocksparseConvLayout& host) {
  const BlocksparseConvShape& s = host.shape;
  for (int64_t b = 0; b < s.blocks; ++b) {
    const BlocksparseConvBlock block = conv_block(host, b);
    SBNET_CHECK(block.count[0] && block.count[1],
                "%s: tables: expected blocks within the channels, got block %lld without any", op,
                static_cast<long long>(b));
    for (int side = 0; side < 2; ++side)
      for (int32_t i = 0; i < block.count[side]; ++i)
        SBNET_CHECK(block.list[side][i] >= 0 && block.list[side][i] < s.channels[side],
                    "%s: tables: expected channels below %lld, got %d", op, static_cast<long long>(s.channels[side]),
                    block.list[side][i]);
  }
  for (int side = 0; side < 2; ++side) {
    const BlocksparseConvSide& t = host.side[side];
    for (int64_t g = 0; g < s.groups[side]; ++g) {
      SBNET_CHECK(t.start[g] >= 0 && t.start[g + 1] >= t.start[g] && t.start[g + 1] <= s.entries[side],
                  "%s: tables: expected groups within the entries, got group %lld beyond them", op,
                  static_cast<long long>(g));
      for (int i = 0; i < kConvGroup; ++i)
        SBNET_CHECK(t.channels[g * kConvGroup + i] < s.channels[side],
                    "%s: tables: expected channels below %lld, got %d", op, static_cast<long long>(s.channels[side]),
                    t.channels[g * kConvGroup + i]);
    }
    for (int64_t e = 0; e < s.entries[side]; ++e) {
      SBNET_CHECK(t.block[e] >= 0 && t.block[e] < s.blocks, "%s: tables: expected blocks below %lld, got %d", op,
                  static_cast<long long>(s.blocks), t.block[e]);
      const int32_t count = conv_block(host, t.block[e]).count[side];
      for (int i = 0; i < kConvGroup; ++i)
        SBNET_CHECK(t.position[e * kConvGroup + i] < count, "%s: tables: expected positions below %d, got %d", op,
                    static_cast<int>(count), t.position[e * kConvGroup + i]);
    }
  }
  return ok_status();
}

BlocksparseConvShape conv_layout_shape(const int64_t* v) {
  return {{v[0], v[1]}, v[2], v[3], v[4], v[5], {v[6], v[7]}, {v[8], v[9]}, v[10], {v[11], v[12]}};
}

int64_t conv_layout_words(const BlocksparseConvShape& s) {
  int64_t words = kConvLayoutNumbers + 5 * s.blocks + s.list_words;
  for (int side = 0; side < 2; ++side)
    words += s.groups[side] * (1 + kConvGroup) + 1 + s.entries[side] * (1 + kConvGroup);
  for (int side = 0; side < 2 && s.block_size; ++side)
    words += 2 * conv_tiles(s, side) + 1 + s.pieces[side] * conv_piece_words(conv_tile_width(s));
  return words;
}

BlocksparseConvLayout conv_layout_view(const BlocksparseConvShape& s, const int32_t* words) {
  BlocksparseConvLayout v = {};
  v.shape = s;
  const auto take = [&](int64_t count) {
    const int32_t* part = words;
    words += count;
    return part;
  };
  take(kConvLayoutNumbers);
  v.blocks = take(5 * s.blocks);
  v.lists = take(s.list_words);
  for (int side = 0; side < 2; ++side) {
    v.side[side].start = take(s.groups[side] + 1);
    v.side[side].channels = take(s.groups[side] * kConvGroup);
    v.side[side].block = take(s.entries[side]);
    v.side[side].position = take(s.entries[side] * kConvGroup);
  }
  for (int side = 0; side < 2 && s.block_size; ++side) {
    v.side[side].piece_start = take(conv_tiles(s, side) + 1);
    v.side[side].tile_order = take(conv_tiles(s, side));
    v.side[side].pieces = take(s.pieces[side] * conv_piece_words(conv_tile_width(s)));
  }
  return v;
}

namespace {

using Words = std::vector<int32_t>;

void append(Words& to, const Words& from) { to.insert(to.end(), from.begin(), from.end()); }

struct Side {
  Words start = {0}, channels, block, position;
  int64_t groups() const { return static_cast<int64_t>(start.size()) - 1; }
};

// Where a channel stands: (block, position in its list), in the order of the blocks.
using Places = std::vector<std::pair<int32_t, int32_t>>;

// Channels of equal blocks side by side, in the order of their first one, by groups of up to kConvGroup.
Side group_channels(const std::vector<Places>& places) {
  std::map<Words, size_t> set_of;
  std::vector<Words> sets;
  for (size_t c = 0; c < places.size(); ++c) {
    Words blocks;
    for (const auto& [block, position] : places[c]) blocks.push_back(block);
    const auto [found, made] = set_of.try_emplace(blocks, sets.size());
    if (made) sets.emplace_back();
    sets[found->second].push_back(static_cast<int32_t>(c));
  }
  Side side;
  for (const Words& set : sets)
    for (size_t first = 0; first < set.size(); first += kConvGroup) {
      const auto channel = [&](size_t i) { return first + i < set.size() ? set[first + i] : -1; };
      for (size_t i = 0; i < kConvGroup; ++i) side.channels.push_back(channel(i));
      const Places& own = places[static_cast<size_t>(set[first])];
      for (size_t e = 0; e < own.size(); ++e) {
        side.block.push_back(own[e].first);
        for (size_t i = 0; i < kConvGroup; ++i)
          side.position.push_back(channel(i) < 0 ? -1 : places[static_cast<size_t>(channel(i))][e].second);
      }
      side.start.push_back(static_cast<int32_t>(side.block.size()));
    }
  return side;
}

}  // namespace

Status make_conv_layout(const int32_t* lists, int64_t words, int64_t inputs, int64_t outputs, int64_t taps,
                        Words* tables) {
  constexpr const char* op = "blocksparse_conv_tables";
  constexpr int64_t kMost = INT32_MAX / 64;
  SBNET_CHECK(inputs >= 1 && inputs <= kMost && outputs >= 1 && outputs <= kMost && words <= kMost,
              "%s: layout: expected 1 to 2^25 channels, got %lld and %lld", op, static_cast<long long>(inputs),
              static_cast<long long>(outputs));
  SBNET_CHECK(taps >= 1 && taps <= kMost, "%s: taps: expected 1 to 2^25, got %lld", op, static_cast<long long>(taps));
  std::vector<Places> places[2] = {std::vector<Places>(static_cast<size_t>(outputs)),
                                   std::vector<Places>(static_cast<size_t>(inputs))};
  Words blocks, flat;
  int64_t weights = 0;
  for (int64_t at = 0; at < words;) {
    SBNET_CHECK(
        words - at >= 2 && lists[at] >= 1 && lists[at + 1] >= 1 && int64_t{lists[at]} + lists[at + 1] <= words - at - 2,
        "%s: lists: expected two numbers of channels from 1 on and as many channels for block %zu", op,
        blocks.size() / 5);
    const int32_t counts[2] = {lists[at + 1], lists[at]}, block = static_cast<int32_t>(blocks.size() / 5);
    at += 2;
    const int32_t begin = static_cast<int32_t>(flat.size());
    append(blocks, {begin, counts[1], begin + counts[1], counts[0], static_cast<int32_t>(weights)});
    for (int side : {1, 0})
      for (int32_t i = 0; i < counts[side]; ++i) {
        const int32_t channel = lists[at++];
        const int64_t channels = side ? inputs : outputs;
        SBNET_CHECK(channel >= 0 && channel < channels,
                    "%s: lists: expected %s channels below %lld, got %d in block %d", op, side ? "input" : "output",
                    static_cast<long long>(channels), channel, block);
        Places& own = places[side][static_cast<size_t>(channel)];
        SBNET_CHECK(own.empty() || own.back().first != block,
                    "%s: lists: expected a channel once in a list, got %s channel %d twice in block %d", op,
                    side ? "input" : "output", channel, block);
        own.emplace_back(block, i);
        flat.push_back(channel);
      }
    weights += int64_t{counts[0]} * counts[1] * taps;
    SBNET_CHECK(weights <= INT32_MAX, "%s: lists: expected at most 2^31 - 1 weights, got more", op);
  }
  for (int side = 0; side < 2; ++side)
    for (size_t c = 0; c < places[side].size(); ++c)
      SBNET_CHECK(!places[side][c].empty(), "%s: lists: expected every %s channel in a block, got none with %zu", op,
                  side ? "input" : "output", c);
  const Side sides[2] = {group_channels(places[0]), group_channels(places[1])};
  const int64_t numbers[kConvLayoutNumbers] = {outputs,
                                               inputs,
                                               taps,
                                               static_cast<int64_t>(blocks.size() / 5),
                                               static_cast<int64_t>(flat.size()),
                                               weights,
                                               sides[0].groups(),
                                               sides[1].groups(),
                                               static_cast<int64_t>(sides[0].block.size()),
                                               static_cast<int64_t>(sides[1].block.size())};
  BlocksparseConvShape shape = conv_layout_shape(numbers);
  SBNET_TRY(validate(op, shape));
  tables->assign(numbers, numbers + kConvLayoutNumbers);
  append(*tables, blocks);
  append(*tables, flat);
  for (const Side& side : sides)
    for (const Words* part : {&side.start, &side.channels, &side.block, &side.position}) append(*tables, *part);
  append_conv_pieces(conv_layout_view(shape, tables->data()), &shape, tables);
  (*tables)[10] = static_cast<int32_t>(shape.block_size);
  for (int side = 0; side < 2; ++side) (*tables)[11 + side] = static_cast<int32_t>(shape.pieces[side]);
  return validate(op, shape);
}

}  // namespace sbnet

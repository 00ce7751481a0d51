// What test_window_emulated.py calls: attention in windows, and the rows of tokens.
#include <cstdio>

#include "core/attention/window_attention.h"
#include "core/masked/token_rows.h"
#include "cuda/sm90/attention/listed.h"
#include "machine.h"

namespace {
sbnet::BlockGrid grid_of(const int64_t* v) {  // bsize, bstride, boffset, bcount
  const auto at = [&](int i) { return static_cast<int32_t>(v[i]); };
  return {{at(0), at(1)}, {at(2), at(3)}, {at(4), at(5)}, {at(6), at(7)}};
}
sbnet::TensorView view_of(void* data, const int64_t* v, int64_t dtype) {  // sizes, strides
  return {data, {v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}, static_cast<sbnet::DType>(dtype)};
}
sbnet::Rows rows_of(void* data, const int64_t* v) { return {data, v[0], v[1], v[2], v[3]}; }
int told(const sbnet::Status& status, char* message, int64_t room) {
  std::snprintf(message, room, "%s", status.message);
  return !status.ok();
}
void begin(int64_t seed) {
  emulator::multiprocessors = 2;
  emulator::random.seed(static_cast<int>(seed));
}
}  // namespace

extern "C" {
#define EMULATED __attribute__((visibility("default"))) int

// t: q, k, v, out, rows, keys, block_map, active_keys, bias, row_table, column_table, scales, k_fill, v_fill,
// row_order, row_lengths, key_order, key_lengths; n: dtype, four views, the grid, starts, heads, dim, value_dim,
// windows, rows, keys, windows of the bias, sides of the tables. multiprocessors: of a Hopper GPU, whose own kernel is
// wanted; 0: the kernel of every GPU is.
EMULATED emulate_window_attention(void** t, const int64_t* n, float scale, float normalize, int64_t multiprocessors,
                                  int64_t seed, char* message, int64_t room) {
  using namespace sbnet;
  WindowAttentionParams p = {};
  const int64_t dtype = *n++;
  for (TensorView* view : {&p.q, &p.k, &p.v, &p.out}) *view = view_of(*t++, n, dtype), n += 8;
  p.grid = grid_of(n), n += 8;
  for (int64_t& start : p.starts) start = *n++;
  for (int32_t* number : {&p.heads, &p.dim, &p.value_dim, &p.windows, &p.rows, &p.keys})
    *number = static_cast<int32_t>(*n++);
  p.bias_windows = n[0], p.table_rows = static_cast<int32_t>(n[1]), p.table_columns = static_cast<int32_t>(n[2]);
  p.row_index = static_cast<const int64_t*>(*t++), p.key_index = static_cast<const int64_t*>(*t++);
  p.block_map = static_cast<const int32_t*>(*t++), p.active_keys = static_cast<const uint8_t*>(*t++);
  p.bias = {*t++, p.q.dtype}, p.row_table = *t++, p.column_table = *t++, p.scales = {*t++, p.q.dtype};
  p.k_fill = *t++, p.v_fill = *t++;
  for (auto* listed : {&p.listed_rows, &p.listed_keys}) {
    listed->order = static_cast<const int64_t*>(*t++), listed->lengths = static_cast<const int32_t*>(*t++);
    listed->capacity = listed == &p.listed_rows ? p.rows : p.keys;
  }
  p.scale = scale, p.normalize = normalize;
  begin(seed);
  if (!multiprocessors) return told(sbnet_window_attention_cuda(&p, nullptr), message, room);
  const Status valid = validate_on_cuda(p);
  if (!valid.ok()) return told(valid, message, room);
  if (!sm90::listed_attention_takes(p)) return told(make_status(Code::kInvalidArgument, "not taken"), message, room);
  return told(sm90::listed_attention(p, {2, static_cast<int>(multiprocessors), 90}, nullptr), message, room);
}

// Of packed tokens, by Hopper's kernel.
EMULATED emulate_packed_attention(const sbnet::AttentionParams* p, int64_t multiprocessors, int64_t seed, char* message,
                                  int64_t room) {
  using namespace sbnet;
  begin(seed);
  const Status valid = validate(*p);
  if (!valid.ok()) return told(valid, message, room);
  if (!sm90::listed_attention_takes(*p)) return told(make_status(Code::kInvalidArgument, "not taken"), message, room);
  return told(sm90::listed_attention(*p, {2, static_cast<int>(multiprocessors), 90}, nullptr), message, room);
}

// n: the grid, batch, height, width, prefix, suffix, capacity.
EMULATED emulate_pack_tokens(const int32_t* block_map, const int64_t* n, int32_t* lengths, int64_t* order,
                             int64_t* rows, uint8_t* mask, uint8_t* filled, int64_t seed, char* message, int64_t room) {
  const auto at = [&](int i) { return static_cast<int32_t>(n[8 + i]); };
  const sbnet::PackTokensParams p = {block_map, grid_of(n), n[8],  at(1), at(2), at(3), at(4),
                                     at(5),     lengths,    order, rows,  mask,  filled};
  begin(seed);
  return told(sbnet_pack_tokens_cuda(&p, nullptr), message, room);
}

// x, table, out: images, rows, strides of both. numbers: channels, bytes of an element, start.
EMULATED emulate_move_rows(void* x, const int64_t* x_rows, void* table, const int64_t* table_rows, void* out,
                           const int64_t* out_rows, const int64_t* numbers, const int64_t* index,
                           const int32_t* lengths, const uint8_t* mask, int64_t seed, char* message, int64_t room) {
  const sbnet::MoveRowsParams p = {rows_of(x, x_rows),
                                   rows_of(table, table_rows),
                                   rows_of(out, out_rows),
                                   numbers[0],
                                   static_cast<int32_t>(numbers[1]),
                                   index,
                                   lengths,
                                   mask,
                                   numbers[2]};
  begin(seed);
  return told(sbnet_move_rows_cuda(&p, nullptr), message, room);
}
}

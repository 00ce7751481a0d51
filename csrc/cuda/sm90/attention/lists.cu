// Lists of tiles from bitmaps: a warp a tile, a lane a piece. Then, where a bitmap says how long they are, the order of
// tiles, the longest first, so that no long one is left for the end.
#include <algorithm>

#include "core/attention/visible.h"
#include "cuda/sm90/attention/lists.cuh"

namespace sbnet::sm90::attention {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kSortThreads = 512;

struct ListArgs {
  Lists lists;
  Cut cut;
  AttentionLayout layout;
  const int32_t *q_lengths, *k_lengths;
  int32_t q_length, k_length;  // all phases
};

__global__ void __launch_bounds__(kThreads) attention_lists_kernel(const ListArgs a) {
  grid_dependency_release();
  grid_dependency_wait();
  const Lists& l = a.lists;
  if (blockIdx.x == 0 && threadIdx.x == 0) *l.next = 0;
  const int64_t unit = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5), plane = unit / l.tiles;
  const int lane = threadIdx.x & 31, tile = static_cast<int>(unit - plane * l.tiles);
  if (plane >= int64_t{l.batches} * l.heads * l.phases) return;
  const int j = static_cast<int>(plane % l.phases), h = static_cast<int>(plane / l.phases % l.heads);
  const int b = static_cast<int>(plane / l.phases / l.heads);
  const int phases = a.layout.rule.phases;
  const int q_end = phase_length(a.q_lengths, b, a.q_length, phases, j);
  const int k_end = phase_length(a.k_lengths, b, a.k_length, phases, j);
  const int64_t bitmap = a.layout.plane(b, h), mask_plane = a.layout.heads > 1 ? h : 0;
  const Cut& c = a.cut;
  const int row0 = tile * c.rows, row_end = c.transposed ? k_end : q_end, column_end = c.transposed ? q_end : k_end;
  const int row_cells = c.rows / c.cell_rows, column_cells = c.columns / c.cell_columns;
  uint32_t* entries = l.entries + unit * l.capacity;
  int masked = 0, full = 0;
  const int pieces = row0 < row_end ? (column_end + c.columns - 1) / c.columns : 0;
  // From the last piece on: the one that the sequence ends within comes first.
  for (int last = pieces - 1; last >= 0; last -= 32) {
    const int piece = last - lane, column0 = piece * c.columns;
    uint32_t bits = 0;
    bool all = true;
    for (int r = 0; piece >= 0 && r < row_cells; ++r) {
      const int row = row0 + r * c.cell_rows;
      if (row >= row_end) {  // queries' results are zeros whatever they see; keys must not count
        all &= !c.transposed;
        break;
      }
      for (int s = 0; s < column_cells; ++s) {
        const int column = column0 + s * c.cell_columns;
        const Pairs cell =
            c.transposed
                ? pairs_of(a.layout, bitmap, mask_plane, column, c.cell_columns, column_end, row, c.cell_rows, row_end)
                : pairs_of(a.layout, bitmap, mask_plane, row, c.cell_rows, row_end, column, c.cell_columns, column_end);
        if (cell.any) bits |= ((1u << c.cell_bits) - 1) << (r * column_cells + s) * c.cell_bits;
        all &= cell.all;
      }
    }
    const uint32_t before = (1u << lane) - 1;
    const uint32_t masked_lanes = __ballot_sync(~0u, bits && !all), full_lanes = __ballot_sync(~0u, bits && all);
    const uint32_t entry = static_cast<uint32_t>(piece) << kEntryShift | bits;
    if (bits && !all) entries[masked + __popc(masked_lanes & before)] = entry;
    if (bits && all) entries[l.capacity - 1 - full - __popc(full_lanes & before)] = entry;
    masked += __popc(masked_lanes), full += __popc(full_lanes);
  }
  if (lane > 0) return;
  l.counts[unit] = make_int2(masked, full);
  if (!l.sorted)
    l.records[plane * l.tiles + (l.from_last ? l.tiles - 1 - tile : tile)] = make_int4(tile, masked, full, 0);
}

// A CTA a plane: a tile's place is the number of those that come before it.
__global__ void __launch_bounds__(kSortThreads) attention_order_kernel(const Lists l) {
  grid_dependency_release();
  grid_dependency_wait();
  const int2* counts = l.counts + int64_t{blockIdx.x} * l.tiles;
  for (int t = threadIdx.x; t < l.tiles; t += kSortThreads) {
    const int length = counts[t].x + counts[t].y;
    int place = 0;
    for (int other = 0; other < l.tiles; ++other) {
      const int n = counts[other].x + counts[other].y;
      place += n > length || (n == length && other < t);
    }
    l.records[int64_t{blockIdx.x} * l.tiles + place] = make_int4(t, counts[t].x, counts[t].y, 0);
  }
}

constexpr int32_t kMostSorted = 2048;  // tiles; the work grows with their square

int64_t counts_at() { return 256; }
int64_t records_at(const Lists& l) { return counts_at() + round_up(l.planes() * l.tiles * 8); }
int64_t entries_at(const Lists& l) { return records_at(l) + round_up(l.planes() * l.tiles * 16); }

}  // namespace

Lists plan_lists(const AttentionParams& p, const Cut& cut) {
  Lists l = {};
  const int32_t rows = cut.transposed ? p.phase_k_length() : p.phase_q_length();
  const int32_t columns = cut.transposed ? p.phase_q_length() : p.phase_k_length();
  const bool lengths = p.q_lengths || p.k_lengths;
  l.tiles = (rows + cut.rows - 1) / cut.rows;
  l.capacity = (columns + cut.columns - 1) / cut.columns;
  l.batches = lengths ? static_cast<int32_t>(p.batch) : p.layout.batches;
  l.heads = p.layout.heads;
  l.phases = lengths ? p.layout.rule.phases : 1;
  l.sorted = p.layout.rows && l.tiles <= kMostSorted;
  l.from_last = !cut.transposed;  // the longest first, where there is a diagonal
  return l;
}

int64_t lists_bytes(const Lists& l) { return entries_at(l) + round_up(l.planes() * l.tiles * l.capacity * 4); }

bool lists_hold(const Lists& l, const AttentionParams& p) {
  const int64_t units = p.batch * p.heads * p.layout.rule.phases * l.tiles;
  return l.capacity <= kMostPieces && units < (1 << 30) && l.planes() * l.tiles < (1 << 30) &&
         lists_bytes(l) <= int64_t{1} << 31;
}

Status make_lists(const char* op, const AttentionParams& p, const Cut& cut, void* workspace, const DeviceInfo& device,
                  cudaStream_t stream, Lists* out) {
  Lists l = plan_lists(p, cut);
  uint8_t* at = static_cast<uint8_t*>(workspace);
  l.next = reinterpret_cast<int32_t*>(at);
  l.counts = reinterpret_cast<int2*>(at + counts_at());
  l.records = reinterpret_cast<int4*>(at + records_at(l));
  l.entries = reinterpret_cast<uint32_t*>(at + entries_at(l));
  const ListArgs args = {l, cut, p.layout, p.q_lengths, p.k_lengths, p.q_length, p.k_length};
  const int64_t units = l.planes() * l.tiles;
  SBNET_CUDA_TRY(op, launch_dependent(device, attention_lists_kernel, dim3((units + kWarps - 1) / kWarps),
                                      dim3(kThreads), 0, stream, args));
  if (l.sorted)
    SBNET_CUDA_TRY(
        op, launch_dependent(device, attention_order_kernel, dim3(l.planes()), dim3(kSortThreads), 0, stream, l));
  *out = l;
  return ok_status();
}

}  // namespace sbnet::sm90::attention

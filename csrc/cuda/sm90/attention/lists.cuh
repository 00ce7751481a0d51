// What the attention kernels work through: for every tile of rows (queries; keys where lists are transposed) the pieces
// of the other side that it meets, made on the device from the layout's bitmaps, its rule and the lengths.
#pragma once
#include "core/attention/attention.h"
#include "cuda/common.cuh"

namespace sbnet::sm90::attention {

// An entry is the index of a piece << 12 and up to 12 bits: which groups of rows, of the tile or of the pair of tiles,
// meet it. Entries that need the mask begin at a list's start, the others at its end, going down.
constexpr int kEntryShift = 12;
constexpr int32_t kMostPieces = (1 << 19) - 1;
constexpr uint32_t kNoPiece = 0xFFFFF000u;  // beyond any sequence: TMA fills with zeros

// How a kernel cuts a problem: tiles of `rows` x pieces of `columns`, and which cells get a bit of an entry.
struct Cut {
  int32_t rows, columns;
  int32_t cell_rows, cell_columns;  // looked at as one
  int32_t cell_bits;                // of an entry
  bool transposed;                  // rows are keys, columns are queries
};

struct Lists {
  int32_t* next;      // of the kernel's units, one after the other; zero when it starts
  int2* counts;       // [planes, tiles]: entries that need the mask, entries that do not
  int4* records;      // [planes, tiles]: a tile and its counts, the longest tiles first
  uint32_t* entries;  // [planes, tiles, capacity]
  int32_t tiles, capacity;
  int32_t batches, heads, phases;  // 1: shared
  bool sorted, from_last;          // not sorted: from the last tile on, or from the first

  __device__ __forceinline__ int64_t plane(int b, int h, int j) const {
    return (int64_t{batches > 1 ? b : 0} * heads + (heads > 1 ? h : 0)) * phases + (phases > 1 ? j : 0);
  }
  int64_t planes() const { return int64_t{batches} * heads * phases; }
};

inline int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Without addresses.
Lists plan_lists(const AttentionParams& p, const Cut& cut);
int64_t lists_bytes(const Lists& lists);
// Can entries hold its pieces, and its units be counted?
bool lists_hold(const Lists& lists, const AttentionParams& p);
// Takes lists_bytes() from `workspace` on and fills it, on the stream.
Status make_lists(const char* op, const AttentionParams& p, const Cut& cut, void* workspace, const DeviceInfo& device,
                  cudaStream_t stream, Lists* lists);

}  // namespace sbnet::sm90::attention

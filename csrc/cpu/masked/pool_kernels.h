// The instruction-set dependent half of CPU pooling: one row of one active block.
#pragma once
#include "core/masked/pool.h"

namespace sbnet {

// Outputs (row, column ... column_end) of image n, all channels.
struct PoolRow {
  int64_t n, row, column, column_end;
};
using PoolRowFunction = void (*)(const PoolParams& p, const PoolRow& row);

extern const PoolRowFunction kPoolRowGeneric;
#if defined(__x86_64__)
extern const PoolRowFunction kPoolRowAvx2;
#endif

}  // namespace sbnet

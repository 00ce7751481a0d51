// The instruction-set dependent half of CPU pooling: one row of one active block.
#pragma once
#include "core/masked/pool.h"
#include "cpu/masked/block_row.h"

namespace sbnet {

using PoolRowFunction = void (*)(const PoolParams& p, const BlockRow& row);

extern const PoolRowFunction kPoolRowGeneric;
#if defined(__x86_64__)
extern const PoolRowFunction kPoolRowAvx2;
#endif

}  // namespace sbnet

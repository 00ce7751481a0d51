// The instruction-set dependent half of CPU block copies: all of gather, and scatter without add.
#pragma once
#include "core/masked/gather_scatter.h"

namespace sbnet {

using BlockMoveFunction = void (*)(const BlockCopyParams& p, const Parallel& parallel, int64_t item_bytes);

extern const BlockMoveFunction kBlockMoveGeneric;
#if defined(__x86_64__)
extern const BlockMoveFunction kBlockMoveAvx512;
#endif

}  // namespace sbnet

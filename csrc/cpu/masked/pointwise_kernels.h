// The instruction-set dependent half of sparse_pointwise on the CPU: one row of one active block.
#pragma once
#include "core/masked/pointwise.h"
#include "cpu/masked/block_row.h"

namespace sbnet {

using PointwiseRowFunction = void (*)(const PointwiseParams& p, const BlockRow& row);

extern const PointwiseRowFunction kPointwiseRowGeneric;
#if defined(__x86_64__)
extern const PointwiseRowFunction kPointwiseRowAvx2;
#endif

}  // namespace sbnet

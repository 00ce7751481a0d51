// The instruction-set dependent half of sparse_pointwise on the CPU: one row of one active block.
#pragma once
#include "core/masked/pointwise.h"

namespace sbnet {

// Outputs (row, column ... column_end) of image n, all channels.
struct PointwiseRow {
  int64_t n, row, column, column_end;
};
using PointwiseRowFunction = void (*)(const PointwiseParams& p, const PointwiseRow& row);

extern const PointwiseRowFunction kPointwiseRowGeneric;
#if defined(__x86_64__)
extern const PointwiseRowFunction kPointwiseRowAvx2;
#endif

}  // namespace sbnet

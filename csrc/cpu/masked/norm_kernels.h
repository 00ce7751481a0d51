// The instruction-set dependent half of normalisations on the CPU: one row of one active block.
#pragma once
#include "core/masked/norm.h"
#include "cpu/masked/block_row.h"

namespace sbnet {

// `table`: kGroup: mean, scale, shift [3, C] of the image; kLayer: weight, bias [2, C]; else not read.
using NormRowFunction = void (*)(const NormParams& p, const float* table, const BlockRow& row);

extern const NormRowFunction kNormRowGeneric;
#if defined(__x86_64__)
extern const NormRowFunction kNormRowAvx2;
#endif

}  // namespace sbnet

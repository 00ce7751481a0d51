// The instruction-set dependent half of sums, maxima and moments over active pixels: one block.
#pragma once
#include "core/masked/block_fold.h"

namespace sbnet {

// Folds a block's pixels of image n into `values` [fold_values, C], which hold those of `count` pixels before.
using FoldRect = void (*)(FoldKind kind, const TensorView& x, int64_t n, const PixelRect& rect, float* values,
                          float count);

extern const FoldRect kFoldRectGeneric;
#if defined(__x86_64__)
extern const FoldRect kFoldRectAvx2;
#endif

}  // namespace sbnet

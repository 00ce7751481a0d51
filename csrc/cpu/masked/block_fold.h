// Sums, maxima and moments over active pixels on the CPU: threads take parts.
#pragma once
#include "core/masked/block_fold.h"

namespace sbnet {

// Fills the workspace: `values` [parts, fold_values, C] and `counts` [parts].
void fold_blocks(const FoldParts& parts, FoldKind kind, void* workspace, const Parallel& parallel);

}  // namespace sbnet

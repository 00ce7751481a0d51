// Sums, maxima and moments for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA block_fold_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 4
#include "cpu/masked/block_fold_kernel.h"

namespace sbnet {
const FoldRect kFoldRectGeneric = block_fold_generic::fold_rect;
}  // namespace sbnet

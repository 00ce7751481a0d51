// Block copies for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA blocks_generic
#define SBNET_VECTOR 16
#include "cpu/masked/gather_scatter_move.h"

namespace sbnet {
const BlockMoveFunction kBlockMoveGeneric = blocks_generic::move_blocks_of;
}  // namespace sbnet

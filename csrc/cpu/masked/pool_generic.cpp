// Pooling for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA pool_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 4
#include "cpu/masked/pool_kernel.h"

namespace sbnet {
const PoolRowFunction kPoolRowGeneric = pool_generic::pool_row;
}  // namespace sbnet

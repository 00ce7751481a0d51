// Programs of steps for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA pointwise_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 4
#include "cpu/masked/pointwise_kernel.h"

namespace sbnet {
const PointwiseRowFunction kPointwiseRowGeneric = pointwise_generic::pointwise_row;
}  // namespace sbnet

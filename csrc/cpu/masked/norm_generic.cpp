// Normalisations for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA norm_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 4
#include "cpu/masked/norm_kernel.h"

namespace sbnet {
const NormRowFunction kNormRowGeneric = norm_generic::norm_row;
}  // namespace sbnet

// Convolutions with block-sparse weights for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA blocksparse_conv_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#define SBNET_GROUP 6
#include "cpu/weights/conv_fma.h"

namespace sbnet {
const BlocksparseConvKernels kBlocksparseConvKernelsGeneric = {blocksparse_conv_generic::multiply,
                                                               blocksparse_conv_generic::weight_grad};
}  // namespace sbnet

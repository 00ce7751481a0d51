// Products with block-sparse weights for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA matmul_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#define SBNET_GROUP 6
#include "cpu/weights/matmul_fma.h"

namespace sbnet {
const MatmulKernels kMatmulKernelsGeneric = {matmul_generic::kGroup,
                                             sizeof(float),
                                             matmul_generic::pack_weights,
                                             matmul_generic::multiply,
                                             1,
                                             matmul_generic::pack_rows,
                                             matmul_generic::weight_grad};
}  // namespace sbnet

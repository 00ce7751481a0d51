// Batch normalisation and elementwise gradients for any processor: 16-byte vectors, which SSE2 and NEON have.
#define SBNET_ISA row_kernels_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 4
#include "cpu/masked/row_kernel.h"

namespace sbnet {
const RowKernels kRowKernelsGeneric = {row_kernels_generic::norm, row_kernels_generic::norm_sums,
                                       row_kernels_generic::norm_grad, row_kernels_generic::activation,
                                       row_kernels_generic::activation_grad};
}  // namespace sbnet

// Convolutions with block-sparse weights for AVX-512 (-mavx512f,bw,dq,vl): 32 registers of 16 floats.
#if defined(__x86_64__)
#define SBNET_ISA blocksparse_conv_avx512
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#define SBNET_GROUP 12
#include "cpu/weights/conv_fma.h"

namespace sbnet {
const BlocksparseConvKernels kBlocksparseConvKernelsAvx512 = {blocksparse_conv_avx512::multiply,
                                                              blocksparse_conv_avx512::weight_grad};
}  // namespace sbnet
#endif

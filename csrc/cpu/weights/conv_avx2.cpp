// Convolutions with block-sparse weights for AVX2, FMA and F16C (-mavx2 -mfma -mf16c): 16 registers of 8 floats.
#if defined(__x86_64__)
#define SBNET_ISA blocksparse_conv_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#define SBNET_GROUP 6
#include "cpu/weights/conv_fma.h"

namespace sbnet {
const BlocksparseConvKernels kBlocksparseConvKernelsAvx2 = {blocksparse_conv_avx2::multiply,
                                                            blocksparse_conv_avx2::weight_grad};
}  // namespace sbnet
#endif

// Products with block-sparse weights for AVX-512 (-mavx512f,bw,dq,vl): 32 registers of 16 floats.
#if defined(__x86_64__)
#define SBNET_ISA matmul_avx512
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#define SBNET_GROUP 12
#include "cpu/weights/matmul_fma.h"

namespace sbnet {
const MatmulKernels kMatmulKernelsAvx512 = {matmul_avx512::kGroup,
                                            sizeof(float),
                                            matmul_avx512::pack_weights,
                                            matmul_avx512::multiply,
                                            1,
                                            matmul_avx512::pack_rows,
                                            matmul_avx512::weight_grad};
}  // namespace sbnet
#endif

// Products with block-sparse weights for AVX2, FMA and F16C (-mavx2 -mfma -mf16c): 16 registers of 8 floats.
#if defined(__x86_64__)
#define SBNET_ISA matmul_avx2
#define SBNET_LANES 8
#define SBNET_VECTORS 2
#define SBNET_GROUP 6
#include "cpu/weights/matmul_fma.h"

namespace sbnet {
const MatmulKernels kMatmulKernelsAvx2 = {
    matmul_avx2::kGroup,    sizeof(float),           matmul_avx2::pack_weights, matmul_avx2::multiply, 1,
    matmul_avx2::pack_rows, matmul_avx2::weight_grad};
}  // namespace sbnet
#endif

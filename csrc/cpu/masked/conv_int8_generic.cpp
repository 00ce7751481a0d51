// The convolution of int8 for any processor, in 16-byte vectors.
#define SBNET_ISA conv_int8_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#include "cpu/masked/conv_int8.h"

namespace sbnet {
const ConvKernels kConvInt8KernelsGeneric = {
    {SBNET_LANES, SBNET_VECTORS, conv_int8_generic::kDepth, sizeof(conv_int8_generic::Element), 0},
    conv_int8_generic::pack_all,
    conv_int8_generic::run_job,
    nullptr};
}  // namespace sbnet

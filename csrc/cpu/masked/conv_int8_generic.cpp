// The convolution of int8 for any processor, in 16-byte vectors.
#define SBNET_ISA conv_int8_generic
#define SBNET_LANES 4
#define SBNET_VECTORS 2
#include "cpu/masked/conv_int8.h"

const sbnet::ConvKernels sbnet::kConvInt8KernelsGeneric = sbnet::conv_int8_generic::kTable;

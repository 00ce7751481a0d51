// Which CUDA kernel serves a layer, and why no faster one does: the one table that launchers, runner, exporter and
// `sbnet info --layer` ask. It looks at host facts only (shapes, strides, alignment), so machines without a GPU have
// the answer too.
#pragma once
#include "core/masked/bottleneck.h"
#include "core/masked/conv_quantized.h"

namespace sbnet {

enum class ConvKernel : int32_t {
  kHopper3x3,
  kHopper1x1,
  kHopperStem,
  kFewChannels,
  kHopperGeneral,
  kDepthwise,
  kFirst,
  kGroups3x3,
  kPatch3x3,
  kRows,
  kImplicitGemm,
  kSimtWords,
  kSimt
};

struct ConvKernelRow {
  ConvKernel kernel;
  const char* name;
  int32_t capability;                              // the one compute capability it is made for; 0: any
  const char* (*declines)(const Conv2dParams& p);  // why it does not take p, which is valid; null: it does
};

// First match wins; implicit GEMM accepts all of 16 bits, the last row all float32.
constexpr int kConvKernels = 13;
// Pixels of x that a cell of 8x8 outputs reads, at most, in "first layer".
constexpr int64_t kMostFirstPatch = 48 * 48;
extern const ConvKernelRow kConvTable[kConvKernels];

// capability: of the device, as 90; 0 keeps to the portable kernels.
const ConvKernelRow& select_conv(const Conv2dParams& p, int32_t capability);

// Why the general Hopper kernel does not take p; null: it does. It looks at p's tensors alone: p.y may be any plane
// that a padding of p leads to (a phase of a transposed convolution), so p need not be valid.
const char* hopper_general_declines(const Conv2dParams& p);

// Of a convolution that the general Hopper kernel takes: may it run as a product of the wide and split 1x1 kernels,
// which sums one tap after the other?
bool hopper_taps_fit(const Conv2dParams& p);

// A convolution of bytes whose x is of bytes, too, with two neighbouring channels as one of 16 bits: what its operands
// are to code that only moves them. y and residual are as they were.
Conv2dParams byte_pairs(const QuantizedConv2dParams& p);

// The same of layers of int8 and float8. An x of floats is declined by all but the last: their launcher rounds it to
// bytes first where another takes those.
enum class BytesKernel : int32_t { kHopper1x1, kHopper, kPatch3x3, kRows, kPortable };

struct BytesKernelRow {
  BytesKernel kernel;
  const char* name;
  int32_t capability;
  const char* (*declines)(const QuantizedConv2dParams& p);
};

constexpr int kBytesKernels = 5;
extern const BytesKernelRow kBytesTable[kBytesKernels];

const BytesKernelRow& select_bytes(const QuantizedConv2dParams& p, int32_t capability);

// Why the Hopper kernel of whole bottleneck blocks does not take p; null: it does.
const char* hopper_bottleneck_declines(const BottleneckParams& p);

// Side of the square cells that 1x1 tiles are made of; 0 where blocks cannot be cut into any.
int conv1x1_cell(const BlockGrid& grid);

}  // namespace sbnet

extern "C" {
// A layer by numbers, its tensors packed channels-last and aligned, all blocks of its output plane in the list.
struct SbnetConvQuery {
  int64_t dtype, batch, channels, height, width, out_channels, kernel[2], stride[2], padding[2], dilation[2], groups,
      block[2], residual, slope, allow_tf32, capability;
};
// Write the name of the kernel and a line "name: reason" for each one above it in the table; of a CPU, which is this
// machine's, "name: how it cuts the work" first.
SBNET_EXPORT sbnet::Status sbnet_select_conv2d_cuda(const SbnetConvQuery* query, char* text, int64_t room);
SBNET_EXPORT sbnet::Status sbnet_select_conv2d_cpu(const SbnetConvQuery* query, char* text, int64_t room);
// 1: one kernel takes a bottleneck block of these channels, hidden channels and blocks in 16-bit floats on Hopper.
SBNET_EXPORT int32_t sbnet_select_bottleneck2d(int64_t channels, int64_t hidden, int64_t block_h, int64_t block_w);
}

namespace sbnet {
// The layer, which has tensors without memory. dtype: one of floats, int8 or float8.
Status read_query(const SbnetConvQuery& q, Conv2dParams* p);

// Asked about, never read: any aligned address that is not null.
inline TensorView channels_last(DType dtype, int64_t n, int64_t c, int64_t h, int64_t w) {
  return {reinterpret_cast<void*>(uintptr_t{1} << 20), {n, c, h, w}, {h * w * c, 1, w * c, c}, dtype};
}

// Sizes, which are less than 2^log2_longest, dtype, which is one of `dtypes` if `known`, and groups of a query.
Status check_query(const char* op, const SbnetConvQuery& q, int log2_longest, bool known, const char* dtypes);

// What a query says of a convolution and of a transposed one alike: all but weights and window. out: sides of y.
template <class Params>
void fill_query(const SbnetConvQuery& q, const int64_t (&out)[2], Params* p) {
  const DType dtype = static_cast<DType>(q.dtype);
  for (int d = 0; d < 2; ++d) {
    BlockGrid& g = p->active.grid;
    g.size[d] = g.stride[d] = static_cast<int32_t>(q.block[d]);
    g.count[d] = static_cast<int32_t>((out[d] + q.block[d] - 1) / q.block[d]);
  }
  p->groups = static_cast<int32_t>(q.groups);
  p->x = channels_last(dtype, q.batch, q.channels, q.height, q.width);
  p->y = channels_last(dtype, q.batch, q.out_channels, out[0], out[1]);
  if (q.residual) p->residual = p->y;
  if (q.slope) p->activation = Activation::kLeakyRelu, p->slope = p->y.data, p->slope_dtype = dtype;
  p->allow_tf32 = q.allow_tf32 != 0;
  p->active.capacity = q.batch * p->active.grid.count[0] * p->active.grid.count[1];
}
}  // namespace sbnet

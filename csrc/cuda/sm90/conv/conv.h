// The Hopper convolutions, by TMA and WGMMA. All launch on `stream` of the current device, which `device` describes; as
// far as no workspace is handed in, they need none.
#pragma once
#include "core/masked/bottleneck.h"
#include "core/masked/conv.h"
#include "core/masked/conv_quantized.h"
#include "core/masked/conv_transpose.h"
#include "core/weights/conv.h"

struct CUstream_st;
namespace sbnet {
struct DeviceInfo;
}

namespace sbnet::sm90 {

// What select_conv() has chosen: fp16 and bf16, and float32 in tf32.
// 3x3, stride 1 or 2, padding 1. Partial sums travel through the shared memory of a thread block cluster.
Status conv3x3(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);
// Of a convolution of stride 2 that conv3x3 serves: is this the faster way?
bool conv3x3_stride2_pays(const Conv2dParams& p, const DeviceInfo& device);
Status conv3x3_stride2(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

// 1x1 and 3x3 as those, of so few tiles that several CTAs share one.
bool conv_few_takes(const Conv2dParams& p, const DeviceInfo& device);
Status conv_few(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

// 1x1, stride 1 or 2, no padding; or as large a kernel as the stride.
Status conv1x1(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);
// Of a convolution that conv1x1 serves, as as_patches() gives it (core/masked/conv_patches.h), with many tiles and many
// channels: is this the faster way?
bool conv1x1_wide_pays(const Conv2dParams& p, const DeviceInfo& device);
Status conv1x1_wide(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);
// Are there input channels enough for this one? With few tiles it is the faster way then.
bool conv1x1_split_takes(const Conv2dParams& p);
Status conv1x1_split(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

// A network's first convolution: 7x7, stride 2, padding 3, three input channels, up to 64 output channels.
Status conv_stem(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

// Any kernel, stride, dilation, groups, channels and blocks that hopper_general_declines() has not refused. It takes
// any strides of rows and columns, so y may be a phase of a larger plane: p.padding is what lies before a row or column
// (negative: that much is left out), y's size how far the output goes; neither has to follow from the other.
Status conv_general(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);
Status conv_tf32(const Conv2dParams& p, const DeviceInfo& device, CUstream_st* stream);  // of float32

// A whole bottleneck block in one kernel. hopper_bottleneck_declines(p) must not.
Status bottleneck(const BottleneckParams& p, const DeviceInfo& device, CUstream_st* stream);

// All phases of the output in one launch. hopper_transpose_declines() has not refused p, which is valid.
Status conv_transpose(const ConvTransposeParams& p, const DeviceInfo& device, CUstream_st* stream);

// Of bytes: any kernel, stride, dilation and blocks (BytesKernel::kHopper), and 1x1 of either type (kHopper1x1).
Status conv_int8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream);
Status conv_float8(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream);
Status conv1x1_bytes(const QuantizedConv2dParams& p, const DeviceInfo& device, CUstream_st* stream);

// With block-sparse weights whose blocks are squares of a grid. Bytes of the filters as these kernels read them, side
// `to` the outputs: the workspace where a call brings none.
int64_t conv_blocksparse_packed_bytes(const BlocksparseConvShape& s, int to);
Status pack_blocksparse(const BlocksparsePackParams& p, const DeviceInfo& device, CUstream_st* stream);
// hopper_blocksparse_conv_declines() must not have refused p.
Status conv_blocksparse(const BlocksparseConvParams& p, const DeviceInfo& device, void* workspace, CUstream_st* stream);

}  // namespace sbnet::sm90

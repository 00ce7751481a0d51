// The instruction-set dependent half of the CPU convolution, as plain functions behind a table.
#pragma once
#include "cpu/masked/conv_plan.h"

namespace sbnet {

// One tile and some of its output channels.
struct ConvJob {
  int64_t group, first_panel, panels;
  const void* weights;  // packed, of the whole layer, without their tag
  void* patch;          // [rects][slots][patch_channels]
  float* inputs;        // Winograd's: [points][squares][input channels, in whole vectors]
  float* sums;          // [panels][plan.sum_rows][panel width]; Winograd's: [points][squares][panel width]
  const ConvRect* rects;
  int64_t rect_count;
  struct ConvPixels* pixels;
};

// The pixels of a tile, in the order of the accumulators. The list is padded to whole microtiles with copies of its
// last pixel.
struct ConvPixels {
  int32_t count;
  int32_t rect[kTileCapacity], row[kTileCapacity], column[kTileCapacity];  // row, column: within the rect
  int64_t patch[kTileCapacity];                                            // first tap's first element in the patch
  int64_t y[kTileCapacity], residual[kTileCapacity];                       // element offsets of channel 0
};

struct ConvKernels {
  ConvShape shape;
  // Packs the weights of vectors [begin, end) of groups x ceil(group_out / lanes) output channels: per panel [chunk]
  // [tap][channels of the chunk x output channels of the panel], zeros in the tail lanes.
  void (*pack_weights)(const ConvLayout& layout, void* packed, int64_t begin, int64_t end);
  void (*run_job)(const ConvPlan& plan, const ConvJob& job);
  // Fills panel.weights from the filters of its runs; null where there is no Winograd's form.
  void (*pack_panel)(const WinogradPanel& panel, DType dtype);
};

extern const ConvKernels kConvKernelsGeneric;
extern const ConvKernels kConvInt8KernelsGeneric;  // int8 weights only
#if defined(__x86_64__)
extern const ConvKernels kConvInt8KernelsAvx2;
extern const ConvKernels kConvInt8KernelsVnni;
extern const ConvKernels kConvKernelsAvx2;
extern const ConvKernels kConvKernelsAvx512;
#endif
#if defined(SBNET_AMX)
extern const ConvKernels kConvKernelsAmx;  // 16-bit elements only
extern const ConvKernels kConvInt8KernelsAmx;
#endif

}  // namespace sbnet

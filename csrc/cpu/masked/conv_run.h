// A convolution as part of another layer: its params are that layer's to validate.
#pragma once
#include "core/masked/conv.h"
#include "cpu/masked/conv_kernels.h"

namespace sbnet {

int64_t conv_workspace_bytes(const Conv2dParams& p, int32_t threads);
void run_conv(const Conv2dParams& p, void* workspace, const Parallel& parallel);

// Its parts, for layers that cut it in another way. The kernels of a weight, which alone decides.
const ConvKernels& conv_kernels(const TensorView& weight);
// Rect `index` counts the tiles of the active blocks, block by block; false where it is empty or its block is bad.
bool find_rect(const ConvPlan& plan, int64_t index, ConvRect* rect);
// A job without rects and panels, in a thread's scratch.
ConvJob conv_job(const ConvPlan& plan, const void* weights, char* scratch);

// Convolutions whose weights are panels in Winograd's form. p.weight has the shape of the dense ones, and no memory.
struct PanelShape {
  int32_t lanes, width;  // floats of a vector; output channels of a panel, at most
};
PanelShape panel_shape();
bool suits_panels(const Conv2dParams& p);
int64_t panel_conv_workspace_bytes(const Conv2dParams& p, int64_t panels, int32_t threads);
// Packs the weights of the panels, whose other members are set, and convolves.
void run_panel_conv(const Conv2dParams& p, const WinogradPanel* panels, int64_t count, void* workspace,
                    const Parallel& parallel);

}  // namespace sbnet

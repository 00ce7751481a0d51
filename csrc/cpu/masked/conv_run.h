// A convolution as part of another layer: its params are that layer's to validate.
#pragma once
#include "core/masked/conv.h"
#include "cpu/masked/conv_panels.h"

namespace sbnet {

int64_t conv_workspace_bytes(const Conv2dParams& p, int32_t threads);
void run_conv(const Conv2dParams& p, void* workspace, const Parallel& parallel);

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

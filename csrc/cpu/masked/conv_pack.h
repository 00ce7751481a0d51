// Weights in the order in which the microkernels of an instruction set read them. That set defines, before it includes
// this: Stored<T>, kZeroByte and kDepth (conv_patch.h), and pack_tap, which packs one tap of kLanes output channels.
#pragma once
#include "cpu/masked/conv_patch.h"

namespace sbnet {
namespace SBNET_ISA {

// All input channels and taps of kLanes output channels from k0 on.
template <class T>
static void pack_lanes(const ConvLayout& layout, int64_t group, int64_t k0, Stored<T>* packed) {
  const TensorView& w = layout.weight;
  const int64_t R = w.size[2], S = w.size[3], C = layout.group_in, panel = k0 / kPanelWidth;
  const int64_t width = layout.width_of_panel(panel), used = smaller(kLanes, layout.group_out - k0);
  const int64_t chunks = (C + layout.chunk - 1) / layout.chunk;
  const bool by_chunk = w.stride[1] != 1;  // follow the order of the weights in memory
  const T* source = static_cast<const T*>(w.data) + (group * layout.group_out + k0) * w.stride[0];
  Stored<T>* to = packed + layout.panel_offset(group, panel);
  int64_t taps_done = 0;
  for (int64_t r0 = 0; r0 < R; r0 += kMaxAxisTaps)
    for (int64_t s0 = 0; s0 < S; s0 += kMaxAxisTaps) {
      const int64_t columns = smaller(kMaxAxisTaps, S - s0), taps = smaller(kMaxAxisTaps, R - r0) * columns;
      for (int64_t i = 0; i < taps * chunks; ++i) {
        const int64_t tap = by_chunk ? i % taps : i / chunks, c0 = (by_chunk ? i / taps : i % chunks) * layout.chunk;
        const int64_t r = r0 + tap / columns, s = s0 + tap % columns;
        const int64_t channels = smaller(layout.chunk, C - c0);
        pack_tap(source + c0 * w.stride[1] + r * w.stride[2] + s * w.stride[3], w.stride[0], w.stride[1], used,
                 channels, to + (c0 * R * S + (taps_done + tap) * whole_depths(channels)) * width, width,
                 k0 % kPanelWidth);
      }
      taps_done += taps;
    }
}

// Vectors [begin, end) of all groups' output channels.
template <class T>
static void pack_weights(const ConvLayout& layout, void* packed, int64_t begin, int64_t end) {
  const int64_t per_group = (layout.group_out + kLanes - 1) / kLanes;
  for (int64_t i = begin; i < end; ++i)
    pack_lanes<T>(layout, i / per_group, i % per_group * kLanes, static_cast<Stored<T>*>(packed));
}

}  // namespace SBNET_ISA
}  // namespace sbnet

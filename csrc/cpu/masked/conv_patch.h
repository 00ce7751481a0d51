// Patches: the input that a tile's outputs read, channels innermost, zero-padded. The instruction set defines, before
// it includes this: Stored<T>, the element of patches and packed weights (put and put_row convert, to integers by
// `per_unit`, how many of them 1 of x is), kZeroByte, each byte of a zero in a patch, and kDepth, the number of
// channels that one product sums (a pixel's channels are filled up to a multiple of it with zeros).
#pragma once
#include "cpu/masked/conv_simd.h"

namespace sbnet {
namespace SBNET_ISA {

SBNET_INLINE int64_t whole_depths(int64_t channels) { return (channels + kDepth - 1) / kDepth * kDepth; }

// What a patch slot holds: input channels first, first + 1, ... or, for lanewise, those of each output channel
// (depthwise: a channel `multiplier` times in a row).
struct PatchChannels {
  int64_t first, count, multiplier;
};

template <class S>
static void zero_slots(S* to, int64_t slots, int64_t slot) {
  if (slots > 0 && slot > 0) __builtin_memset(to, kZeroByte, slots * slot * sizeof(S));
}

// `count` slots from input pixels `step` elements apart, all of them in the plane.
template <class T>
static void copy_slots(Stored<T>* to, int64_t slot, const T* from, int64_t step, int64_t count, int64_t channel_stride,
                       const PatchChannels& ch, float per_unit) {
  if (ch.multiplier > 1) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < ch.count; ++c)
        put(to + i * slot + c, from[i * step + (ch.first + c) / ch.multiplier * channel_stride], per_unit);
    return;
  }
  from += ch.first * channel_stride;
  if (channel_stride == 1 && step == ch.count && slot == ch.count) return put_row(to, from, count * ch.count, per_unit);
  if (channel_stride == 1) {
    for (int64_t i = 0; i < count; ++i, to += slot, from += step) {
      __builtin_prefetch(from + ch.count);  // the next chunk of this pixel
      put_row(to, from, ch.count, per_unit);
      zero_slots(to + ch.count, 1, whole_depths(ch.count) - ch.count);
    }
    return;
  }
  for (int64_t c = 0; c < ch.count; ++c)  // NCHW memory: neighbours in a row are neighbours in memory
    for (int64_t i = 0; i < count; ++i) put(to + i * slot + c, from[c * channel_stride + i * step], per_unit);
  for (int64_t i = 0; i < count; ++i) zero_slots(to + i * slot + ch.count, 1, whole_depths(ch.count) - ch.count);
}

// The patch of one rect: slots of rows x slots of columns, zeros where the input plane ends. Slots that only outputs
// beyond a clipped rect would read are left out.
template <class T>
static __attribute__((noinline)) void fill_patch(const ConvPlan& plan, const ConvRect& rect, const AxisTaps& rows,
                                                 const AxisTaps& columns, const PatchChannels& ch, Stored<T>* patch) {
  const TensorView& x = plan.p.x;
  const int64_t slot = plan.patch_channels, H = x.size[2], W = x.size[3];
  const int64_t row_step = rows.input_step, column_step = columns.input_step;
  const int64_t top = rect.row * plan.p.stride[0] - plan.p.padding[0];
  const int64_t left = rect.column * plan.p.stride[1] - plan.p.padding[1];
  const int64_t unused_rows = (plan.tile[0] - rect.height) * rows.output_step;
  const int64_t unused_columns = (plan.tile[1] - rect.width) * columns.output_step;
  const T* image = static_cast<const T*>(x.data) + rect.n * x.stride[0];
  for (int v = 0; v < rows.segments; ++v)
    for (int64_t i = 0; i < rows.segment[v].count - unused_rows; ++i) {
      Stored<T>* to_row = patch + (rows.segment[v].slot + i) * columns.slots * slot;
      const int64_t row = top + rows.segment[v].coordinate + i * row_step;
      for (int u = 0; u < columns.segments; ++u) {
        Stored<T>* to = to_row + columns.segment[u].slot * slot;
        const int64_t count = columns.segment[u].count - unused_columns;
        const int64_t first = left + columns.segment[u].coordinate;
        if (row < 0 || row >= H) {
          zero_slots(to, count, slot);
          continue;
        }
        const int64_t before = first < 0 ? smaller(count, (-first + column_step - 1) / column_step) : 0;
        const int64_t until = first < W ? smaller(count, (W - first + column_step - 1) / column_step) : 0;
        const int64_t inside = larger(until, before);
        zero_slots(to, before, slot);
        if (inside > before)
          copy_slots(to + before * slot, slot, image + row * x.stride[2] + (first + before * column_step) * x.stride[3],
                     column_step * x.stride[3], inside - before, x.stride[1], ch, plan.per_unit);
        zero_slots(to + inside * slot, count - inside, slot);
      }
    }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

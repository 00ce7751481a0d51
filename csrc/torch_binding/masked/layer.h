// What every layer on active blocks takes from torch and gives back: list, fringe, output. See core/layer.h.
#pragma once
#include "core/grid.h"
#include "core/layer.h"
#include "torch_binding/recording.h"

namespace sbnet::binding {

using Ints = std::vector<int64_t>;

// The tensors of a call besides those that a family has of its own.
struct LayerCall {
  const char* op;  // as it was called: errors begin with it
  Tensor x, indices, count;
  Ints grid;
  Tensor out;
  std::optional<Tensor> fringe_pixels = {}, fringe_count = {};
  std::optional<Tensor> block_map = {};  // for kernels that read it
};

// x, y, active and fringe of a family's params.
template <class Params>
void set_layer(const Call& call, const LayerCall& a, Params* p) {
  call.same_device("out", a.out);
  p->x = view4(a.op, "x", a.x);
  p->y = view4(a.op, "out", a.out);
  p->active = to_active(call, a.indices, a.count, a.block_map ? &*a.block_map : nullptr, a.grid, a.x.size(0));
  SBNET_TORCH_EXPECT(a.fringe_pixels.has_value() == a.fringe_count.has_value(), a.op, "fringe",
                     "pixels and count, got one of them");
  if (!a.fringe_pixels) return;
  p->fringe.capacity = a.fringe_pixels->numel();
  p->fringe.pixels = call.int32("fringe", *a.fringe_pixels, p->fringe.capacity);
  p->fringe.count = call.int32("fringe", *a.fringe_count, 1);
}

// Status to exception, under the name of the op that was called.
inline void check(const char* op, const Status& status) { check(named(op, status)); }

// The [channels] bias of a layer, contiguous; null where there is none. `kept` holds a copy, where one is needed.
inline const void* bias_of(const Call& call, const char* argument, std::optional<Tensor>& kept, int64_t channels,
                           DType* dtype) {
  if (!kept) return nullptr;
  call.same_device(argument, *kept);
  SBNET_TORCH_EXPECT(kept->dim() == 1 && kept->size(0) == channels, call.op(), argument, "[", channels, "], got ",
                     kept->numel(), " elements in ", kept->dim(), " dimensions");
  if (!kept->is_contiguous()) kept = torch::stable::contiguous(*kept);
  *dtype = to_dtype(call.op(), argument, *kept);
  return address_of(kept->const_data_ptr());
}

// The list of x's own plane, which its gradient is wanted on: all of it, or none.
inline void check_list_of_x(const char* op, const Tensor& x, const std::optional<Tensor>& indices,
                            const std::optional<Tensor>& count, const std::optional<Tensor>& map, const Ints& grid) {
  if (!indices && !count && !map) return;
  SBNET_TORCH_EXPECT(indices && count && map, op, "x_indices, x_count, x_map", "all of them, got some");
  const Call call(op, "x", x);
  const ActiveView list = to_active(call, *indices, *count, &*map, grid, x.size(0));
  check(check_active(op, list));
  check(check_tiling(op, list.grid, x.size(2), x.size(3)));
}

// What a functional form writes: zeros, in the memory format of x and its dtype or another. The grid, whose numbers say
// how large it is, is checked before.
inline Tensor zeros_for(const char* op, const Tensor& x, int64_t channels, const int64_t (&side)[2],
                        const Tensor& block_map, const Ints& grid, std::optional<ScalarType> dtype = {}) {
  check_batch(op, block_map, x);
  const BlockGrid blocks = to_grid(op, grid);
  check(check_grid(op, blocks));
  check(check_tiling(op, blocks, side[0], side[1]));
  return zeros4(x, {x.size(0), channels, side[0], side[1]}, is_channels_last(x), dtype);
}

}  // namespace sbnet::binding

#include "core/lists/fringe.h"

#include <memory>

#include "torch_binding/recording.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;

std::tuple<Tensor, Tensor> fringe(Tensor producer_map, Tensor consumer_map, Ints size, Ints producer_grid,
                                  Ints consumer_size, Ints consumer_grid, Ints window, int64_t capacity) {
  const char* op = "fringe";
  const Call call(op, "producer_map", producer_map);
  check_rank(op, "producer_map", producer_map, 3);
  SBNET_TORCH_EXPECT(size.size() == 2 && consumer_size.size() == 2, op, "size, consumer_size", "(height, width), got ",
                     size.size(), " and ", consumer_size.size(), " numbers");
  FringeParams p = {};
  p.batch = producer_map.size(0);
  p.height = size[0], p.width = size[1];
  p.out_height = consumer_size[0], p.out_width = consumer_size[1];
  p.window = to_window(op, window);
  p.capacity = capacity;
  // Only the maps are read: the lists need not travel with them.
  static constexpr int32_t unused = 0;
  const auto map_only = [&](const char* argument, const Tensor& map, const Ints& grid) {
    ActiveView a{};
    a.grid = to_grid(op, grid);
    a.block_map = call.int32(argument, map, blocks_of(a.grid, p.batch));
    a.count = &unused;
    return a;
  };
  p.producer = map_only("producer_map", producer_map, producer_grid);
  p.consumer = map_only("consumer_map", consumer_map, consumer_grid);
  check(validate(p));
  Tensor pixels = empty_int32(producer_map, {capacity}), count = empty_int32(producer_map, {1});
  p.pixels = static_cast<int32_t*>(pixels.data_ptr());
  p.count = static_cast<int32_t*>(count.data_ptr());
  const Tensor scratch = workspace(producer_map, sbnet_fringe_workspace_bytes(&p));
  const auto lasting = std::make_shared<FringeParams>(p);
  const auto kernel = [lasting](void* own, const Parallel& parallel) {
    const Status status = sbnet_fringe_cpu(lasting.get(), own, &parallel);
    lasting->kept = status.ok();  // a recording's next run finds its own list
    return status;
  };
  check(call.cuda() ? SBNET_KERNELS(fringe)(call, &p, scratch.data_ptr())
                    : run_on_cpu(op, &scratch, kernel, producer_map, consumer_map, pixels, count));
  return {pixels, count};
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "fringe(Tensor producer_map, Tensor consumer_map, SymInt[] size, SymInt[] producer_grid, SymInt[] consumer_size, "
      "SymInt[] consumer_grid, SymInt[] window, SymInt capacity) -> (Tensor pixels, Tensor count)",
      TORCH_BOX(&fringe));
}

}  // namespace
}  // namespace sbnet::binding

#include "core/lists/pyramid.h"

#include <memory>

#include "torch_binding/recording.h"

namespace sbnet::binding {
namespace {

using Ints = std::vector<int64_t>;

std::vector<Tensor> mask_pyramid(Tensor mask, Ints planes, double tol, Ints fringes, int64_t margin) {
  const char* op = "mask_pyramid";
  const Call call(op, "mask", mask);
  check_rank(op, "mask", mask, 3);
  const auto tables = std::make_shared<PyramidTables>();  // kernels that are recorded point there
  check(tables->read(
      {planes.data(), static_cast<int64_t>(planes.size()), fringes.data(), static_cast<int64_t>(fringes.size())}));
  PyramidParams& p = tables->params;
  p.mask = mask.const_data_ptr();
  p.mask_dtype = to_dtype(op, "mask", mask);
  for (int d = 0; d < 3; ++d) p.size[d] = mask.size(d), p.stride[d] = mask.stride(d);
  p.tol = tol, p.margin = margin;
  check(validate(p));
  std::vector<Tensor> lists;
  set_lists(p, [&](const std::initializer_list<int64_t>& size) {
    lists.push_back(empty_int32(mask, size));
    return static_cast<int32_t*>(lists.back().data_ptr());
  });
  const Tensor scratch = workspace(mask, sbnet_mask_pyramid_workspace_bytes(&p));
  const auto kernel = [tables](void* own, const Parallel& parallel) {
    const Status status = sbnet_mask_pyramid_cpu(&tables->params, own, &parallel);
    tables->params.kept = status.ok();  // a recording's next run finds its own lists
    return status;
  };
  check(call.cuda() ? SBNET_KERNELS(mask_pyramid)(call, &p, scratch.data_ptr())
                    : run_on_cpu(op, &scratch, kernel, mask, lists));
  return lists;
}

SBNET_TORCH_OPS(ops) {
  ops.add(
      "mask_pyramid(Tensor mask, SymInt[] planes, float tol, SymInt[] fringes, SymInt margin=0) -> "
      "Tensor[]",
      TORCH_BOX(&mask_pyramid));
}

}  // namespace
}  // namespace sbnet::binding

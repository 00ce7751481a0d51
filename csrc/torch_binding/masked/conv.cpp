// What is done once for many convolutions; the convolutions themselves: plain_layers.cpp.
#include "torch_binding/common.h"

namespace sbnet::binding {
namespace {

Tensor pack_conv_weight(Tensor weight, int64_t groups) {
  const char* op = "pack_conv_weight";
  const Call call(op, "weight", weight);
  const ConvPackParams p = {view4(op, "weight", weight), to_int32(op, "groups", groups)};
  check(validate(p));
  const int64_t bytes = call.cuda() ? 0 : packed_bytes(p);
  const Tensor packed = torch::stable::new_zeros(weight, {&bytes, 1}, ScalarType::Byte);  // gaps are equal too
  const Parallel parallel = call.parallel();
  if (!call.cuda()) check(sbnet_pack_conv_weight_cpu(&p, packed.data_ptr(), &parallel));
  return packed;
}

SBNET_TORCH_OPS(ops) {
  ops.add("pack_conv_weight(Tensor weight, SymInt groups) -> Tensor", TORCH_BOX(&pack_conv_weight));
}

}  // namespace
}  // namespace sbnet::binding

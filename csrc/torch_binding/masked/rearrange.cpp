#include "core/masked/rearrange.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

struct Numbers {
  int64_t up, down, groups;
  const Ints& pad;
  double value;
};

RearrangeParams read(const char* op, const Numbers& a) {
  RearrangeParams p = {};
  const int64_t numbers[] = {a.up, a.down, a.groups};
  int32_t* const to[] = {&p.up, &p.down, &p.groups};
  for (int k = 0; k < 3; ++k) {
    SBNET_TORCH_CHECK(numbers[k] >= 1 && numbers[k] <= INT32_MAX, "sbnet::", op,
                      ": up, down, groups: expected at least 1, got ", numbers[k]);
    *to[k] = static_cast<int32_t>(numbers[k]);
  }
  SBNET_TORCH_CHECK(a.pad.size() == 4, "sbnet::", op, ": pad: expected left, right, top, bottom, got ", a.pad.size(),
                    " numbers");
  for (size_t k = 0; k < 4; ++k) {
    SBNET_TORCH_CHECK(a.pad[k] > -(1 << 24) && a.pad[k] < 1 << 24, "sbnet::", op,
                      ": pad: expected numbers below 2^24, got ", a.pad[k]);
    p.pad[k] = static_cast<int32_t>(a.pad[k]);
  }
  p.value = static_cast<float>(a.value);
  return p;
}

void run(const LayerCall& layer, const Numbers& numbers) {
  RearrangeParams p = read(layer.op, numbers);
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  const auto kernel = [=](void*, const Parallel& parallel) { return sbnet_sparse_rearrange_cpu(&p, &parallel); };
  check(layer.op, SBNET_ON_DEVICE(call, run_on_cpu(layer.op, nullptr, kernel, layer),
                                  sbnet_sparse_rearrange_cuda(&p, call.stream())));
}

Tensor sparse_rearrange(Tensor x, Tensor indices, Tensor count, Tensor block_map, Ints grid, int64_t up, int64_t down,
                        int64_t groups, Ints pad, double value) {
  const char* op = "sparse_rearrange";
  check_rank(op, "x", x, 4);
  const Numbers numbers = {up, down, groups, pad, value};
  const RearrangeParams p = read(op, numbers);
  int64_t channels, side[2];
  check(rearrange_channels(op, p, x.size(1), &channels));
  for (int d = 0; d < 2; ++d) check(rearrange_side(op, p, d, x.size(2 + d), &side[d]));
  const Tensor y = zeros_for(op, x, channels, side, block_map, grid);
  run({op, x, indices, count, grid, y}, numbers);
  return y;
}

void sparse_rearrange_(Tensor x, Tensor indices, Tensor count, Ints grid, int64_t up, int64_t down, int64_t groups,
                       Ints pad, double value, Tensor out, std::optional<Tensor> fringe_pixels,
                       std::optional<Tensor> fringe_count) {
  run({"sparse_rearrange_", x, indices, count, grid, out, fringe_pixels, fringe_count}, {up, down, groups, pad, value});
}

void list_ops(OpList& ops) {
  // `pad`: left, right, top, bottom, as in F.pad.
  ops.add(
      "sparse_rearrange(Tensor x, Tensor indices, Tensor count, Tensor block_map, SymInt[] grid, int up, int down, int "
      "groups, SymInt[] pad, float value) -> Tensor",
      TORCH_BOX(&sparse_rearrange));
  ops.add(
      "sparse_rearrange_(Tensor x, Tensor indices, Tensor count, SymInt[] grid, int up, int down, int groups, SymInt[] "
      "pad, float value, Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count) -> ()",
      TORCH_BOX(&sparse_rearrange_));
}

}  // namespace
}  // namespace sbnet::binding

SBNET_TORCH_OPS(sbnet::binding::list_ops)

#include "core/masked/batch_norm.h"

#include "core/grid.h"

namespace sbnet {
namespace {

LayerShape shape_of(const TensorView& x) { return {{x.size[0], x.size[1], x.size[2], x.size[3]}, "that of x"}; }

template <class Params>
Status check_norm(const char* op, const Params& p) {
  const TensorView& x = p.x;
  SBNET_TRY(check_layer(op, x, p.y, shape_of(x), p.active, p.fringe));
  SBNET_CHECK((!p.weight && !p.bias) || p.param_dtype == x.dtype || p.param_dtype == DType::kF32,
              "%s: weight, bias: dtype: expected that of x, %s, or float32, got %s", op, dtype_name(x.dtype),
              dtype_name(p.param_dtype));
  SBNET_CHECK(p.eps >= 0, "%s: eps: expected at least 0, got %g", op, static_cast<double>(p.eps));
  SBNET_TRY(check_epilogue(op, x.dtype, nullptr, DType::kF32, p.activation));
  SBNET_CHECK(p.active.block_map || !x.size[0], "%s: active: expected a block map, got none", op);
  return ok_status();
}

// Of a tensor that a kernel reads or writes beside y: its memory is apart from y's.
Status check_beside(const char* op, const char* name, const TensorView& t, const TensorView& x, const TensorView& y) {
  SBNET_TRY(check_shape(op, name, t, x.dtype, shape_of(x)));
  SBNET_CHECK(!x.size[0] || !may_overlap(t, y), "%s: out: expected memory of its own, got that of %s", op, name);
  return ok_status();
}

}  // namespace

Status validate(const BatchNormParams& p) {
  constexpr const char* op = "sparse_batch_norm2d";
  SBNET_TRY(check_norm(op, p));
  return p.residual.data ? check_residual(op, p.residual, p.y) : ok_status();
}

Status validate(const BatchNormGradParams& p) {
  constexpr const char* op = "sparse_batch_norm2d_backward";
  SBNET_TRY(check_norm(op, p));
  SBNET_TRY(check_beside(op, "grad", p.grad, p.x, p.y));
  if (p.given.data) {
    SBNET_TRY(check_beside(op, "given", p.given, p.x, p.y));
    SBNET_CHECK(told_by_result(p.activation, p.activation_param),
                "%s: given: expected the result of relu, relu6 or leaky_relu with a slope above 0, got that of another "
                "activation",
                op);
  }
  if (p.grad_residual.data) {
    const TensorView& g = p.grad_residual;
    SBNET_TRY(check_beside(op, "grad_residual", g, p.x, p.y));
    SBNET_TRY(check_written(op, "grad_residual", g.size, g.stride));
    SBNET_CHECK(!g.size[0] || (!may_overlap(g, p.grad) && !may_overlap(g, p.x)),
                "%s: grad_residual: expected memory of its own, got that of grad or x", op);
    SBNET_CHECK(p.given.data || p.activation == Activation::kNone,
                "%s: given: expected what the activation gave, as it has a residual, got none", op);
  }
  return ok_status();
}

}  // namespace sbnet

// What a GPU's CTAs find; a CPU's moments, then mean, scale and shift of each channel.
int64_t sbnet_sparse_batch_norm2d_workspace_bytes(const sbnet::BatchNormParams* p) {
  using namespace sbnet;
  if (!p->x.size[0]) return 0;
  const int64_t on_gpu = norm_bytes(p->x), channels = p->x.size[1];
  const int64_t of_plane = fold_bytes(parts_of(*p, kCpuPartPixels), FoldKind::kMoments);
  const int64_t on_cpu = of_plane + size_product({3, channels, 4});
  return on_gpu > on_cpu ? on_gpu : on_cpu;
}

// What a GPU's CTAs find; a CPU's [parts, 2, C] sums of g and g (x - mean) in double, six numbers a channel, sums of a
// block.
int64_t sbnet_sparse_batch_norm2d_backward_workspace_bytes(const sbnet::BatchNormGradParams* p) {
  using namespace sbnet;
  const int64_t on_gpu = norm_bytes(p->x), on_cpu = size_product({kMostNormParts * 6 + 6, p->x.size[1], 4});
  return on_gpu > on_cpu ? on_gpu : on_cpu;
}

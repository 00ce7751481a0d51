#include "core/masked/pointwise.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

struct SparsePointwise : PlainLayer<SparsePointwise, PointwiseParams, kOperands> {
  static constexpr const char* kName = "sparse_pointwise";
  static constexpr auto kInputs = layer_inputs(
      {{"x", kT}}, {{"a", kT, kOptional}, {"b", kT, kOptional}, {"c", kT, kOptional}, {"d", kT, kOptional}});

  explicit SparsePointwise(const Attributes& a) : PlainLayer(a) {
    check(read_program(kName, a.text("program", "").c_str(), &params_));
  }

  void read(const Context& c, const Tensor& x, PointwiseParams* p) const {
    const TensorView like = plane_view(nullptr, x.shape, x.dtype);
    for (size_t k = 0; k < kOperands; ++k) {
      const Tensor other = c.input(kFirstFurther + k, 4);
      if (!other.present) continue;
      p->other[k] = plane_view(other);
      broadcast(like, &p->other[k]);
    }
  }
  Status launch(const Context& c, const PointwiseParams& p, const Parallel& parallel) const {
    return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_pointwise_cpu(&p, &parallel),
                               sbnet_sparse_pointwise_cuda(&p, c.stream()));
  }
};

}  // namespace

SBNET_ORT_OPS(SparsePointwise)

}  // namespace sbnet::ort

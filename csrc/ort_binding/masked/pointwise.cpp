#include "core/masked/pointwise.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

enum Position { kX, kIndices, kCount, kBlockMap, kA, kFringePixels = kA + kOperands, kFringeCount, kBase };

class SparsePointwise {
 public:
  static constexpr const char* kName = "sparse_pointwise";
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"indices", kInt32},
                                         {"count", kInt32},
                                         {"block_map", kInt32},
                                         {"a", kT, kOptional},
                                         {"b", kT, kOptional},
                                         {"c", kT, kOptional},
                                         {"d", kT, kOptional},
                                         {"fringe_pixels", kInt32, kOptional},
                                         {"fringe_count", kInt32, kOptional},
                                         {"base", kT, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr Types kTypes[] = {{kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}};
  static constexpr int kInPlace = kBase;

  explicit SparsePointwise(const Attributes& a) : layer_(a, {kIndices, kFringePixels}) {
    check(read_program(kName, a.text("program", "").c_str(), &params_));
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4);
    layer_.infer(s, x.empty() ? Dims(4) : x);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4);
    PointwiseParams p = params_;
    const TensorView like = plane_view(nullptr, x.shape, x.dtype);
    for (int k = 0; k < kOperands; ++k) {
      const Tensor other = c.input(kA + k);
      if (!other.present) continue;
      c.input(kA + k, 4);
      p.other[k] = plane_view(other);
      broadcast(like, &p.other[k]);
    }
    layer_.compute(c, p, x.shape, [&](const Parallel& parallel) {
      return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_pointwise_cpu(&p, &parallel),
                                 sbnet_sparse_pointwise_cuda(&p, c.stream()));
    });
  }

 private:
  MaskedLayer layer_;
  PointwiseParams params_ = {};
};

}  // namespace

void add_pointwise_ops(const Runtime& runtime) { add_op<SparsePointwise>(runtime); }

}  // namespace sbnet::ort

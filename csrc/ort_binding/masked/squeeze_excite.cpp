#include "core/masked/squeeze_excite.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

struct SparseSqueezeExcite2d {
  static constexpr const char* kName = "sparse_squeeze_excite2d";
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"weight1", kT},
                                         {"weight2", kT},
                                         {"bias1", kBias, kOptional},
                                         {"bias2", kBias, kOptional},
                                         {"block_map", kInt32}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kBiasTypes;
  static constexpr int kInPlace = -1;

  GridAttributes grid;
  StepCode activation, gate;

  explicit SparseSqueezeExcite2d(const Attributes& a) : grid(a) {
    check(read_gate_step(kName, "activation", a.text("activation", "relu").c_str(), &activation));
    check(read_gate_step(kName, "gate", a.text("gate", "sigmoid").c_str(), &gate));
  }

  void infer(ShapeContext& s) const {
    s.input(1, 2);
    s.input(2, 2);
    s.input(5, 3);
    const Dims x = s.input(0, 4);
    if (!x.empty()) s.output(0, {x[0], Dim(1), Dim(1), x[3]});
  }

  void compute(Context& c) const {
    const Tensor x = c.input(0, 4), weight1 = c.input(1, 2), weight2 = c.input(2, 2), map = c.input(5, 3);
    const std::vector<int64_t> shape = {x.shape[0], 1, 1, x.shape[3]};
    SqueezeExciteParams p = {};
    p.x = plane_view(x);
    p.y = plane_view(nullptr, shape, x.dtype);
    p.hidden = weight1.shape[0];
    if (weight1.shape[1] != x.shape[3] || weight2.shape[0] != x.shape[3] || weight2.shape[1] != p.hidden)
      raise("sbnet::", kName, ": weight1, weight2: expected [R,", x.shape[3], "] and [", x.shape[3], ",R], got [",
            p.hidden, ",", weight1.shape[1], "] and [", weight2.shape[0], ",", weight2.shape[1], "]");
    p.weight1 = weight1.data, p.weight2 = weight2.data;
    p.bias_dtype = x.dtype;
    p.bias1 = bias_of(c, 3, p.hidden, &p.bias_dtype);
    p.bias2 = bias_of(c, 4, x.shape[3], &p.bias_dtype);
    p.activation = activation, p.gate = gate;
    p.grid = grid.over(x.shape[1], x.shape[2]);
    p.block_map = c.int32(map, {x.shape[0], p.grid.count[0], p.grid.count[1]});
    p.y.data = c.output(0, shape);
    check(validate(p));
    run(c, SBNET_KERNELS(sparse_squeeze_excite2d), p, sbnet_sparse_squeeze_excite2d_workspace_bytes(&p));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseSqueezeExcite2d)

}  // namespace sbnet::ort

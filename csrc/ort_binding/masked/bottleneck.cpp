#include "core/masked/bottleneck.h"

#include "ort_binding/masked/layer.h"
#include "ort_binding/masked/packed_weight.h"

namespace sbnet::ort {
namespace {

struct SparseBottleneck2d {
  static constexpr const char* kName = "sparse_bottleneck2d";
  enum Position {
    kX,
    kWeights,
    kIndices = kWeights + 3,
    kBiases = kIndices + 3,
    kFringePixels = kBiases + 3,
    kBase = kFringePixels + 2
  };
  static constexpr auto kInputs =
      layer_inputs({{"x", kT}, {"weight1", kT}, {"weight2", kT}, {"weight3", kT}},
                   {{"bias1", kBias, kOptional}, {"bias2", kBias, kOptional}, {"bias3", kBias, kOptional}});
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kBiasTypes;
  static constexpr int kInPlace = kBase;

  MaskedLayer layer;
  Activation activation;
  float negative_slope;
  bool allow_tf32;
  PackedWeight packed_weights[3];

  explicit SparseBottleneck2d(const Attributes& a)
      : layer(a, {kIndices, kFringePixels}),
        activation(to_activation(kName, a.text("activation", "relu"))),
        negative_slope(a.real("negative_slope", 0.01f)),
        allow_tf32(a.flag("allow_tf32", false)),
        packed_weights{{a, "weight1", kWeights, 1}, {a, "weight2", kWeights + 1, 1}, {a, "weight3", kWeights + 2, 1}} {}

  void infer(ShapeContext& s) const {
    Dims y = s.input(kX, 4);
    for (size_t k = 0; k < 3; ++k) s.input(kWeights + k, 4);
    layer.infer(s, y.empty() ? Dims(4) : y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4);
    BottleneckParams p = {};
    for (size_t k = 0; k < 3; ++k) {
      const Tensor weight = c.input(kWeights + k, 4);
      p.weight[k] = plane_view(weight);
      p.bias[k] = bias_of(c, kBiases + k, weight.shape[0], &p.bias_dtype);
      p.packed[k] = packed_weights[k].data();
    }
    p.activation = activation;
    p.activation_param = negative_slope;
    p.allow_tf32 = allow_tf32;
    layer.compute(c, p, x.shape, [&] {
      const Workspace scratch(c, SBNET_KERNELS(sparse_bottleneck2d_workspace_bytes).bytes(c, &p));
      return SBNET_KERNELS(sparse_bottleneck2d)(c, &p, scratch.data());
    });
  }
};

}  // namespace

SBNET_ORT_OPS(SparseBottleneck2d)

}  // namespace sbnet::ort

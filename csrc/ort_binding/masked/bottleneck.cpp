#include "core/masked/bottleneck.h"

#include "core/masked/fill.h"
#include "ort_binding/common.h"
#include "ort_binding/masked/packed_weight.h"

namespace sbnet::ort {
namespace {

struct SparseBottleneck2d {
  static constexpr const char* kName = "sparse_bottleneck2d";
  enum Position {
    kX,
    kWeights,
    kIndices = kWeights + 3,
    kCount,
    kBlockMap,
    kBiases,
    kFringePixels = kBiases + 3,
    kFringeCount,
    kBase
  };
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"weight1", kT},
                                         {"weight2", kT},
                                         {"weight3", kT},
                                         {"indices", kInt32},
                                         {"count", kInt32},
                                         {"block_map", kInt32},
                                         {"bias1", kBias, kOptional},
                                         {"bias2", kBias, kOptional},
                                         {"bias3", kBias, kOptional},
                                         {"fringe_pixels", kInt32, kOptional},
                                         {"fringe_count", kInt32, kOptional},
                                         {"base", kT, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr Types kTypes[] = {
      {kFloat, kFloat}, {kFloat16, kFloat16}, {kFloat16, kFloat}, {kBFloat16, kBFloat16}, {kBFloat16, kFloat}};
  static constexpr int kInPlace = kBase;

  GridAttributes grid;
  Activation activation;
  float negative_slope;
  bool allow_tf32, zero_outside;
  PackedWeight packed_weights[3];

  explicit SparseBottleneck2d(const Attributes& a)
      : grid(a),
        activation(to_activation(kName, a.text("activation", "relu"))),
        negative_slope(a.real("negative_slope", 0.01f)),
        allow_tf32(a.flag("allow_tf32", false)),
        zero_outside(a.flag("zero_outside", false)),
        packed_weights{{a, "weight1", kWeights, 1}, {a, "weight2", kWeights + 1, 1}, {a, "weight3", kWeights + 2, 1}} {}

  void infer(ShapeContext& s) const {
    Dims y = s.input(kX, 4);
    for (size_t k = 0; k < 3; ++k) s.input(kWeights + k, 4);
    s.input(kIndices, 2);
    s.input(kBlockMap, 3);
    const Dims base = s.input(kBase, 4);
    if (y.empty()) y = base;
    if (!y.empty()) s.output(0, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4), fringe_pixels = c.input(kFringePixels, 1), fringe_count = c.input(kFringeCount),
                 base = c.input(kBase, 4);
    BottleneckParams p = {};
    p.x = plane_view(x);
    for (size_t k = 0; k < 3; ++k) {
      const Tensor weight = c.input(kWeights + k, 4), bias = c.input(kBiases + k, 1);
      p.weight[k] = plane_view(weight);
      if (!bias.present) continue;
      if (bias.shape[0] != weight.shape[0])
        raise("sbnet::", kName, ": ", bias.name, ": ", bias.shape[0], " elements; ", weight.shape[0], " are wanted");
      p.bias[k] = bias.data;
      p.bias_dtype = bias.dtype;
    }
    p.activation = activation;
    p.activation_param = negative_slope;
    p.allow_tf32 = allow_tf32;
    if (fringe_pixels.present != fringe_count.present)
      raise("sbnet::", kName, ": fringe: pixels and count go together");
    if (fringe_pixels.present) {
      p.fringe.capacity = fringe_pixels.shape[0];
      p.fringe.pixels = c.int32(fringe_pixels, {p.fringe.capacity});
      p.fringe.count = c.int32(fringe_count, {1});
    }
    if (base.present && zero_outside) raise("sbnet::", kName, ": base: not with zero_outside=1");

    const int64_t plane[2] = {x.shape[1], x.shape[2]};
    const ActiveInputs active = active_inputs(c, {kIndices, kCount, kBlockMap}, grid, plane);
    if (active.batch != x.shape[0])
      raise("sbnet::", kName, ": block_map: ", active.batch, " images; those of x, ", x.shape[0], ", are wanted");
    p.active = active.view;
    p.y = plane_view(nullptr, x.shape, x.dtype);
    check(validate(p));
    if (base.present && base.shape != x.shape) {
      p.y = plane_view(base);
      check(validate(p));
    }
    p.y.data = c.output(0, x.shape);
    if (base.present) c.copy(p.y.data, base.data, base.bytes());

    const Parallel parallel = c.parallel();
    const void* packed[3];
    for (size_t k = 0; k < 3; ++k) packed[k] = packed_weights[k].data();
    const Workspace scratch(
        c, SBNET_ORT_ON_DEVICE(c, sbnet_sparse_bottleneck2d_workspace_bytes_cpu(&p, packed, parallel.threads),
                               sbnet_sparse_bottleneck2d_workspace_bytes_cuda(&p)));
    check(SBNET_ORT_ON_DEVICE(c, sbnet_sparse_bottleneck2d_cpu(&p, packed, scratch.data(), &parallel),
                              sbnet_sparse_bottleneck2d_cuda(&p, scratch.data(), c.stream())));
    if (!zero_outside) return;
    FillParams f = {};
    f.x = f.y = p.y;
    f.block_map = p.active.block_map;
    f.grid = p.active.grid;
    check(SBNET_ORT_ON_DEVICE(c, sbnet_sparse_fill_cpu(&f, &parallel), sbnet_sparse_fill_cuda(&f, c.stream())));
  }
};

}  // namespace

void add_bottleneck_ops(const Runtime& runtime) { add_op<SparseBottleneck2d>(runtime); }

}  // namespace sbnet::ort

#include "core/masked/conv.h"

#include "core/masked/fill.h"
#include "ort_binding/common.h"
#include "ort_binding/masked/packed_weight.h"

namespace sbnet::ort {

Activation to_activation(const char* op, const std::string& name) {
  constexpr const char* kNames[] = {"none", "relu", "relu6", "leaky_relu", "silu", "gelu", "hardswish"};
  for (int k = 0; k < 7; ++k)
    if (name == kNames[k]) return static_cast<Activation>(k);
  raise("sbnet::", op, ": activation: '", name, "'; none, relu, relu6, leaky_relu, silu, gelu or hardswish is wanted");
}

namespace {

struct SparseConv2d {
  static constexpr const char* kName = "sparse_conv2d";
  enum Position { kX, kWeight, kIndices, kCount, kBlockMap, kBiasInput, kResidual, kFringePixels, kFringeCount, kBase };
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"weight", kT},
                                         {"indices", kInt32},
                                         {"count", kInt32},
                                         {"block_map", kInt32},
                                         {"bias", kBias, kOptional},
                                         {"residual", kT, kOptional},
                                         {"fringe_pixels", kInt32, kOptional},
                                         {"fringe_count", kInt32, kOptional},
                                         {"base", kT, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr Types kTypes[] = {
      {kFloat, kFloat}, {kFloat16, kFloat16}, {kFloat16, kFloat}, {kBFloat16, kBFloat16}, {kBFloat16, kFloat}};
  static constexpr int kInPlace = kBase;

  GridAttributes grid;
  Pair stride, padding, dilation;
  int64_t groups;
  Activation activation;
  float negative_slope;
  bool allow_tf32, zero_outside;
  PackedWeight packed_weight;

  explicit SparseConv2d(const Attributes& a)
      : grid(a),
        stride(a.pair("stride", 1)),
        padding(a.pair("padding", 0)),
        dilation(a.pair("dilation", 1)),
        groups(a.integer("groups", 1)),
        activation(to_activation(kName, a.text("activation", "none"))),
        negative_slope(a.real("negative_slope", 0.01f)),
        allow_tf32(a.flag("allow_tf32", false)),
        zero_outside(a.flag("zero_outside", false)),
        packed_weight(a, "weight", kWeight, groups) {
    for (size_t d = 0; d < 2; ++d)
      if (stride[d] < 1 || dilation[d] < 1)
        raise("sbnet::", kName, ": stride, dilation: ", stride[d], ", ", dilation[d], "; at least 1 is wanted");
    if (groups < 1 || groups > INT32_MAX) raise("sbnet::", kName, ": groups: ", groups, "; at least 1 is wanted");
  }

  int64_t output_size(size_t d, int64_t side, int64_t taps) const {
    const int64_t reach = side + 2 * int64_t{padding[d]} - int64_t{dilation[d]} * (taps - 1) - 1;
    if (reach < 0)
      raise("sbnet::", kName, ": x: side ", side, " with padding ", padding[d], " is smaller than the kernel's reach");
    return reach / stride[d] + 1;
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4), weight = s.input(kWeight, 4);
    s.input(kIndices, 2);
    s.input(kBlockMap, 3);
    // The size of y is that of residual and base: their symbols, if they have any, say more than a formula would.
    Dims y(4), like = s.input(kBase, 4);
    if (like.empty()) like = s.input(kResidual, 4);
    if (!x.empty()) y[0] = x[0];
    if (!weight.empty()) y[3] = weight[0];
    for (size_t d = 0; d < 2; ++d)
      if (!x.empty() && !weight.empty() && weight[1 + d].known()) {
        const int64_t taps = weight[1 + d].value;
        const bool same = stride[d] == 1 && 2 * int64_t{padding[d]} == int64_t{dilation[d]} * (taps - 1);
        y[1 + d] = same ? x[1 + d] : x[1 + d].map([&](int64_t side) { return output_size(d, side, taps); });
      }
    for (size_t d = 0; d < 4; ++d)
      if (!like.empty() && !y[d].known()) y[d] = like[d];
    s.output(0, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4), weight = c.input(kWeight, 4), bias = c.input(kBiasInput, 1),
                 residual = c.input(kResidual, 4), fringe_pixels = c.input(kFringePixels, 1),
                 fringe_count = c.input(kFringeCount), base = c.input(kBase, 4);
    Conv2dParams p = {};
    p.x = plane_view(x);
    p.weight = plane_view(weight);
    if (bias.present) {
      if (bias.shape[0] != weight.shape[0])
        raise("sbnet::", kName, ": bias: ", bias.shape[0], " elements; ", weight.shape[0], " are wanted");
      p.bias = bias.data;
      p.bias_dtype = bias.dtype;
    }
    if (residual.present) p.residual = plane_view(residual);
    for (size_t d = 0; d < 2; ++d) p.stride[d] = stride[d], p.padding[d] = padding[d], p.dilation[d] = dilation[d];
    p.groups = static_cast<int32_t>(groups);
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

    const std::vector<int64_t> shape = {x.shape[0], output_size(0, x.shape[1], weight.shape[1]),
                                        output_size(1, x.shape[2], weight.shape[2]), weight.shape[0]};
    const int64_t plane[2] = {shape[1], shape[2]};
    const ActiveInputs active = active_inputs(c, {kIndices, kCount, kBlockMap}, grid, plane);
    if (active.batch != x.shape[0])
      raise("sbnet::", kName, ": block_map: ", active.batch, " images; those of x, ", x.shape[0], ", are wanted");
    p.active = active.view;
    p.y = plane_view(nullptr, shape, x.dtype);
    check(validate(p));  // before an output of an absurd size is asked for
    if (base.present && base.shape != shape) {
      Conv2dParams as_base = p;
      as_base.y = plane_view(base);
      check(validate(as_base));
    }
    p.y.data = c.output(0, shape);
    if (base.present) c.copy(p.y.data, base.data, base.bytes());

    const Parallel parallel = c.parallel();
    const void* packed = packed_weight.data();
    const Workspace scratch(c, c.cuda() ? 0 : sbnet_sparse_conv2d_workspace_bytes_cpu(&p, packed, parallel.threads));
    check(SBNET_ORT_ON_DEVICE(c, sbnet_sparse_conv2d_cpu(&p, packed, scratch.data(), &parallel),
                              sbnet_sparse_conv2d_cuda(&p, c.stream())));
    if (!zero_outside) return;
    FillParams f = {};
    f.x = f.y = p.y;
    f.block_map = p.active.block_map;
    f.grid = p.active.grid;
    check(SBNET_ORT_ON_DEVICE(c, sbnet_sparse_fill_cpu(&f, &parallel), sbnet_sparse_fill_cuda(&f, c.stream())));
  }
};

}  // namespace

void add_conv_ops(const Runtime& runtime) { add_op<SparseConv2d>(runtime); }

}  // namespace sbnet::ort

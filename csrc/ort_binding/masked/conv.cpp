#include "core/masked/conv_quantized.h"
#include "ort_binding/masked/layer.h"
#include "ort_binding/masked/packed_weight.h"

namespace sbnet::ort {
namespace {

// Of the window, and what it makes of a plane.
struct Sides {
  const char* op;
  Pair stride, padding, dilation;

  explicit Sides(const Attributes& a)
      : op(a.op()), stride(a.pair("stride", 1)), padding(a.pair("padding", 0)), dilation(a.pair("dilation", 1)) {
    for (size_t d = 0; d < 2; ++d)
      if (stride[d] < 1 || dilation[d] < 1)
        raise_expected(op, "stride, dilation", "at least 1, got ", stride[d], ", ", dilation[d]);
  }

  int64_t output_size(size_t d, int64_t side, int64_t taps) const {
    const int64_t reach = side + 2 * int64_t{padding[d]} - int64_t{dilation[d]} * (taps - 1) - 1;
    if (reach < 0)
      raise_expected(op, "x", "a side of at least the kernel's reach, got ", side, " with padding ", padding[d]);
    return reach / stride[d] + 1;
  }

  std::vector<int64_t> output(const Tensor& x, const Tensor& weight) const {
    return {x.shape[0], output_size(0, x.shape[1], weight.shape[1]), output_size(1, x.shape[2], weight.shape[2]),
            weight.shape[0]};
  }

  Dims infer(const Dims& x, const Dims& weight) const {
    Dims y(4);
    if (!x.empty()) y[0] = x[0];
    if (!weight.empty()) y[3] = weight[0];
    for (size_t d = 0; d < 2; ++d)
      if (!x.empty() && !weight.empty() && weight[1 + d].known()) {
        const int64_t taps = weight[1 + d].value;
        const bool same = stride[d] == 1 && 2 * int64_t{padding[d]} == int64_t{dilation[d]} * (taps - 1);
        y[1 + d] = same ? x[1 + d] : x[1 + d].map([&](int64_t side) { return output_size(d, side, taps); });
      }
    return y;
  }

  void set(Conv2dParams* p) const {
    for (size_t d = 0; d < 2; ++d) p->stride[d] = stride[d], p->padding[d] = padding[d], p->dilation[d] = dilation[d];
  }
};

// What convolutions of floats and of less are told, and how they run. `Signature`: their inputs.
template <class Signature>
struct Convolution : Signature {
  using S = Signature;

  MaskedLayer layer;
  Sides sides;
  int64_t groups;
  Activation activation;
  float negative_slope;
  bool residual_after;
  PackedWeight packed_weight;

  explicit Convolution(const Attributes& a)
      : layer(a, {S::kIndices, S::kFringePixels}),
        sides(a),
        groups(a.integer("groups", 1)),
        activation(to_activation(a.op(), a.text("activation", "none"))),
        negative_slope(a.real("negative_slope", 0.01f)),
        residual_after(a.flag("residual_after", false)),
        packed_weight(a, "weight", S::kWeight, groups) {
    if (groups < 1 || groups > INT32_MAX) raise_expected(a.op(), "groups", "at least 1, got ", groups);
  }

  void infer(ShapeContext& s) const {
    layer.infer(s, sides.infer(s.input(S::kX, 4), s.input(S::kWeight, 4)), s.input(S::kResidual, 4));
  }

  // p's other numbers must be there.
  template <class Params, class Bytes, class Op>
  void compute(Context& c, Params& p, const Bytes& bytes, const Op& kernels, std::optional<DType> y_dtype = {}) const {
    const Tensor weight = c.input(S::kWeight, 4), residual = c.input(S::kResidual, 4);
    p.weight = plane_view(weight);
    p.bias = bias_of(c, S::kBiasInput, weight.shape[0], &p.bias_dtype);
    p.slope = bias_of(c, S::kSlope, weight.shape[0], &p.slope_dtype);
    if (residual.present) p.residual = plane_view(residual);
    sides.set(&p);
    p.groups = static_cast<int32_t>(groups);
    p.activation = activation;
    p.activation_param = negative_slope;
    p.residual_after = residual_after;
    p.packed = packed_weight.data();
    layer.compute(
        c, p, sides.output(c.input(S::kX, 4), weight),
        [&] {
          const Workspace scratch(c, bytes.bytes(c, &p));
          return kernels(c, &p, scratch.data());
        },
        y_dtype);
  }
};

struct SparseConv2d : Convolution<ConvSignature> {
  static constexpr const char* kName = "sparse_conv2d";

  bool allow_tf32;

  explicit SparseConv2d(const Attributes& a) : Convolution(a), allow_tf32(a.flag("allow_tf32", false)) {}

  void compute(Context& c) const {
    Conv2dParams p = {};
    p.allow_tf32 = allow_tf32;
    Convolution::compute(c, p, SBNET_KERNELS(sparse_conv2d_workspace_bytes), SBNET_KERNELS(sparse_conv2d));
  }
};

// An op for each kind of output, which ONNX Runtime cannot read off the inputs: float, or what weights are.
template <bool kRounds>
struct QuantizedSignature : ConvPositions<3> {
  static constexpr size_t kScale = kWeight + 1;
  static constexpr auto kInputs =
      layer_inputs({{"x", kT}, {"weight", kWeightT}, {"scale", kFloat}},
                   {{"bias", kFloat, kOptional}, {"residual", kBias, kOptional}, {"slope", kFloat, kOptional}},
                   kRounds ? kWeightT : kFloat);
  static constexpr Argument kOutputs[] = {{"y", kRounds ? kWeightT : kFloat}};
  static constexpr Types kTypes[] = {
      {kInt8, kInt8, kInt8},       {kInt8, kFloat, kInt8},     {kFloat, kInt8, kInt8},     {kFloat, kFloat, kInt8},
      {kFloat8, kFloat8, kFloat8}, {kFloat8, kFloat, kFloat8}, {kFloat, kFloat8, kFloat8}, {kFloat, kFloat, kFloat8}};
};

template <bool kRounds>
struct SparseConv2dQuantized : Convolution<QuantizedSignature<kRounds>> {
  static constexpr const char* kName = kRounds ? "sparse_conv2d_quantized" : "sparse_conv2d_dequantized";
  using Base = Convolution<QuantizedSignature<kRounds>>;

  float x_scale, residual_scale, out_scale;

  explicit SparseConv2dQuantized(const Attributes& a)
      : Base(a),
        x_scale(a.real("x_scale", 0)),
        residual_scale(a.real("residual_scale", 1)),
        out_scale(kRounds ? a.real("out_scale", 0) : 0) {}

  void compute(Context& c) const {
    const int64_t channels = c.input(Base::kWeight, 4).shape[0];
    QuantizedConv2dParams p = {};
    DType float32 = DType::kF32;
    p.scale = static_cast<const float*>(bias_of(c, Base::kScale, channels, &float32));
    p.x_scale = x_scale;
    p.residual_scale = residual_scale;
    p.out_scale = out_scale;
    Base::compute(c, p, SBNET_KERNELS(sparse_conv2d_quantized_workspace_bytes), SBNET_KERNELS(sparse_conv2d_quantized),
                  kRounds ? c.input(Base::kWeight, 4).dtype : DType::kF32);
  }
};

}  // namespace

SBNET_ORT_OPS(SparseConv2d, SparseConv2dQuantized<true>, SparseConv2dQuantized<false>)

}  // namespace sbnet::ort

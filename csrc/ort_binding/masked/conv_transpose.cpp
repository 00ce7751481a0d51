#include "core/masked/conv_transpose.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

struct SparseConvTranspose2d : ConvSignature {
  static constexpr const char* kName = "sparse_conv_transpose2d";

  MaskedLayer layer;
  ConvTransposeParams numbers = {};

  explicit SparseConvTranspose2d(const Attributes& a) : layer(a, {kIndices, kFringePixels}) {
    const Pair stride = a.pair("stride", 1), padding = a.pair("padding", 0),
               output_padding = a.pair("output_padding", 0), dilation = a.pair("dilation", 1);
    for (size_t d = 0; d < 2; ++d) {
      numbers.stride[d] = stride[d], numbers.padding[d] = padding[d];
      numbers.output_padding[d] = output_padding[d], numbers.dilation[d] = dilation[d];
    }
    const int64_t groups = a.integer("groups", 1);
    if (groups < 1 || groups > INT32_MAX) raise_expected(kName, "groups", "at least 1, got ", groups);
    numbers.groups = static_cast<int32_t>(groups);
    numbers.activation = to_activation(kName, a.text("activation", "none"));
    numbers.activation_param = a.real("negative_slope", 0.01f);
    numbers.allow_tf32 = a.flag("allow_tf32", false);
  }

  // Of an x of this side and a kernel of this many taps; the numbers are checked on the way.
  int64_t output_side(int d, int64_t side, int64_t taps) const {
    ConvTransposeParams p = numbers;
    p.weight.size[2] = p.weight.size[3] = taps;
    check(check_transpose_window(p));
    const int64_t out = conv_transpose_output_side(p, d, side);
    if (out < 1) raise_expected(kName, "x", "a plane that gives pixels, got side ", side);
    return out;
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4), weight = s.input(kWeight, 4);
    Dims y(4);
    if (!x.empty()) y[0] = x[0];
    if (!weight.empty()) y[3] = weight[3].map([&](int64_t k) { return size_product({k, numbers.groups}); });
    for (size_t d = 0; d < 2; ++d)
      if (!x.empty() && !weight.empty() && weight[1 + d].known())
        y[1 + d] =
            x[1 + d].map([&](int64_t side) { return output_side(static_cast<int>(d), side, weight[1 + d].value); });
    layer.infer(s, y, s.input(kResidual, 4));
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4), weight = c.input(kWeight, 4), residual = c.input(kResidual, 4);
    ConvTransposeParams p = numbers;
    p.weight = plane_view(weight);
    const int64_t channels = size_product({weight.shape[3], numbers.groups});
    p.bias = bias_of(c, kBiasInput, channels, &p.bias_dtype);
    p.slope = bias_of(c, kSlope, channels, &p.slope_dtype);
    if (residual.present) p.residual = plane_view(residual);
    const std::vector<int64_t> shape = {x.shape[0], output_side(0, x.shape[1], weight.shape[1]),
                                        output_side(1, x.shape[2], weight.shape[2]), channels};
    layer.compute(c, p, shape, [&] {
      const Workspace scratch(c, SBNET_KERNELS(sparse_conv_transpose2d_workspace_bytes).bytes(c, &p));
      return SBNET_KERNELS(sparse_conv_transpose2d)(c, &p, scratch.data());
    });
  }
};

}  // namespace

SBNET_ORT_OPS(SparseConvTranspose2d)

}  // namespace sbnet::ort

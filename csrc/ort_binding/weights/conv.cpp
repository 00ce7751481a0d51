#include "core/weights/conv.h"

#include <algorithm>

#include "ort_binding/weights/tables.h"

namespace sbnet::ort {
namespace {

// [N, D, H, W, C] as kernels see it.
VolumeView volume(void* data, const std::vector<int64_t>& shape, DType dtype) {
  const int64_t D = shape[1], H = shape[2], W = shape[3], C = shape[4];
  return {data, {shape[0], C, D, H, W}, {D * H * W * C, 1, H * W * C, W * C, C}, dtype};
}

struct BlocksparseConv {
  static constexpr const char* kName = "blocksparse_conv";
  enum Position { kX, kWeight, kLists, kBiasInput };
  static constexpr Argument kInputs[] = {
      {"x", kT}, {"weight", kT}, {"lists", kInt32, kRequired, kCpuInput}, {"bias", kBias, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kBiasTypes;
  static constexpr int kInPlace = -1;

  int64_t in_channels, out_channels;
  std::vector<int64_t> kernel_size, stride, padding, dilation, size;
  bool transposed;
  Activation activation;
  float negative_slope;
  bool constant_lists;
  std::shared_ptr<Tables> constant_tables = std::make_shared<Tables>();

  explicit BlocksparseConv(const Attributes& a)
      : in_channels(a.required_integer("in_channels")),
        out_channels(a.required_integer("out_channels")),
        kernel_size(a.required_integers("kernel_size")),
        stride(a.integers("stride")),
        padding(a.integers("padding")),
        dilation(a.integers("dilation")),
        size(a.integers("size")),
        transposed(a.flag("transposed", false)),
        activation(to_activation(kName, a.text("activation", "none"))),
        negative_slope(a.real("negative_slope", 0.01f)),
        constant_lists(a.is_constant(kLists)) {}

  static void triple(const char* name, const std::vector<int64_t>& v, int32_t otherwise, int32_t* out) {
    if (!v.empty() && v.size() != 3) raise_expected(kName, name, "3 numbers, got ", v.size());
    for (size_t d = 0; d < 3; ++d) {
      const int64_t number = v.empty() ? otherwise : v[d];
      if (number < 0 || number > (1 << 20)) raise_expected(kName, name, "0 to 2^20, got ", number);
      out[d] = static_cast<int32_t>(number);
    }
  }
  ConvGeometry geometry() const {
    ConvGeometry g;
    triple("kernel_size", kernel_size, 1, g.kernel);
    triple("stride", stride, 1, g.stride);
    triple("padding", padding, 0, g.padding);
    triple("dilation", dilation, 1, g.dilation);
    if (size.size() != 3 && (transposed || !size.empty()))
      raise_expected(kName, "size", "3 numbers, got ", size.size());
    return g;
  }

  int64_t inputs() const { return transposed ? out_channels : in_channels; }
  int64_t outputs() const { return transposed ? in_channels : out_channels; }

  int64_t output_side(const ConvGeometry& g, int d, int64_t side) const {
    if (!size.empty()) return size[static_cast<size_t>(d)];
    const int64_t window = int64_t{g.kernel[d] - 1} * g.dilation[d] + 1;
    const int64_t room = side + 2 * int64_t{g.padding[d]} - window;
    return room < 0 ? 0 : room / std::max(g.stride[d], 1) + 1;
  }

  void infer(ShapeContext& s) const {
    Dims y = s.input(kX, 5);
    s.input(kWeight, 1);
    s.input(kLists, 1);
    if (y.empty()) return;
    const ConvGeometry g = geometry();
    for (int d = 0; d < 3; ++d) y[1 + d] = y[1 + d].map([&](int64_t side) { return output_side(g, d, side); });
    y[4] = outputs();
    s.output(0, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 5), weight = c.input(kWeight, 1), lists = c.input(kLists, 1),
                 bias = c.input(kBiasInput, 1);
    Tables of_this_run;
    Tables& tables = constant_lists ? *constant_tables : of_this_run;
    const ConvGeometry g = geometry();
    BlocksparseConvParams p = {};
    p.geometry = g;
    const int32_t* words = tables.get(c, [&] {
      std::vector<int32_t> made;
      check(make_conv_layout(c.int32(lists, lists.shape), lists.elements(), in_channels, out_channels,
                             size_product({g.kernel[0], g.kernel[1], g.kernel[2]}), &made));
      return made;
    });
    int64_t numbers[kConvLayoutNumbers];
    std::copy_n(tables.host().begin(), kConvLayoutNumbers, numbers);
    p.layout = conv_layout_view(conv_layout_shape(numbers), words);
    p.transposed = transposed;
    if (weight.shape[0] != p.layout.shape.weights)
      raise_expected(kName, "weight", p.layout.shape.weights, " elements, got ", weight.shape[0]);
    p.weight = weight.data;
    set_bias(c, bias, outputs(), &p);
    p.activation = activation;
    p.activation_param = negative_slope;
    std::vector<int64_t> y = x.shape;
    for (int d = 0; d < 3; ++d) {
      const size_t at = static_cast<size_t>(1 + d);
      y[at] = output_side(g, d, x.shape[at]);
      if (y[at] < 0) raise_expected(kName, "size", "0 or more, got ", y[at]);
    }
    y[4] = outputs();
    p.x = volume(const_cast<void*>(x.data), x.shape, x.dtype);
    p.y = volume(nullptr, y, x.dtype);
    check(validate(p));  // before an output of an absurd size is asked for
    p.y.data = c.output(0, y);
    run(c, SBNET_KERNELS(blocksparse_conv), p, SBNET_KERNELS(blocksparse_conv_workspace_bytes).bytes(c, &p));
  }
};

}  // namespace

SBNET_ORT_OPS(BlocksparseConv)

}  // namespace sbnet::ort

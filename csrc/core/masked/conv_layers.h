// What convolutions say of themselves: their tensors, numbers and sizes. See LayerOf in core/layer.h.
#pragma once
#include <limits>

#include "core/layer.h"
#include "core/masked/bottleneck.h"
#include "core/masked/conv_quantized.h"
#include "core/masked/conv_transpose.h"

namespace sbnet {

template <class P, class Read>
void activation_numbers(P& p, Read& read, const char* otherwise) {
  read.text("activation", otherwise,
            [&](const char* op, const char* name) { return read_activation(op, name, &p.activation); });
  read.real("negative_slope", &p.activation_param, 0.01f);
}

// Strides, paddings, dilations and groups; a side of y, or its channels (d = 1).
SBNET_EXPORT Status check_conv_numbers(const char* op, const Conv2dParams& p);
SBNET_EXPORT Status conv_size(const char* op, const Conv2dParams& p, int d, int64_t x, int64_t* y);

template <class P>
struct ConvLayerOf : LayerOf<P> {
  template <class Read>
  static void numbers(P& p, Read& read) {
    read.integers("stride", p.stride, 1);
    read.integers("padding", p.padding, 0);
    read.integers("dilation", p.dilation, 1);
    read.integer("groups", &p.groups, 1);
    activation_numbers(p, read, "none");
    read.flag("residual_after", &p.residual_after, false);
  }
  static constexpr int32_t groups(const P& p) { return p.groups; }
};

struct Conv2dLayer : ConvLayerOf<Conv2dParams> {
  static constexpr const char* kName = "sparse_conv2d";
  static constexpr bool kListOfX = true;
  template <class Read>
  static constexpr void tensors(Conv2dParams& p, Read& read) {
    read.weight("weight", &p.weight, &p.packed);
    read.vector("bias", &p.bias, &p.bias_dtype);
    read.plane("residual", &p.residual);
    read.vector("slope", &p.slope, &p.slope_dtype);
  }
  template <class Read>
  static void numbers(Conv2dParams& p, Read& read) {
    ConvLayerOf::numbers(p, read);
    read.flag("allow_tf32", &p.allow_tf32, false);
  }
  static Status check(const Conv2dParams& p) { return check_conv_numbers(kName, p); }
  static Status size(const Conv2dParams& p, int d, int64_t x, int64_t* y) { return conv_size(kName, p, d, x, y); }
  static constexpr auto workspace = SBNET_KERNELS(sparse_conv2d_workspace_bytes);
  static constexpr auto kernels = SBNET_KERNELS(sparse_conv2d);
};

// Of int8 or float8. Its functional form writes the weight's dtype; that of floats is an op of its own, as ONNX reads
// an output's type off the op.
struct QuantizedConv2dLayer : ConvLayerOf<QuantizedConv2dParams> {
  static constexpr const char* kName = "sparse_conv2d_quantized";
  static constexpr OutputType kOutput = OutputType::kOfWeight;
  template <class Read>
  static constexpr void tensors(QuantizedConv2dParams& p, Read& read) {
    read.weight("weight", &p.weight, &p.packed);
    read.scales("scale", &p.scale);
    read.vector("bias", &p.bias, &p.bias_dtype);
    read.plane("residual", &p.residual);
    read.vector("slope", &p.slope, &p.slope_dtype);
  }
  template <class Read>
  static void numbers(QuantizedConv2dParams& p, Read& read) {
    input_numbers(p, read);
    read.real("out_scale", &p.out_scale, std::numeric_limits<float>::quiet_NaN());
  }
  template <class Read>
  static void input_numbers(QuantizedConv2dParams& p, Read& read) {
    ConvLayerOf::numbers(p, read);
    read.real("x_scale", &p.x_scale, 0);
    read.real("residual_scale", &p.residual_scale, 1);
  }
  static Status check(const QuantizedConv2dParams& p) { return check_conv_numbers(kName, p); }
  static Status size(const QuantizedConv2dParams& p, int d, int64_t x, int64_t* y) {
    return conv_size(kName, p, d, x, y);
  }
  static constexpr auto workspace = SBNET_KERNELS(sparse_conv2d_quantized_workspace_bytes);
  static constexpr auto kernels = SBNET_KERNELS(sparse_conv2d_quantized);
};

struct DequantizedConv2dLayer : QuantizedConv2dLayer {
  static constexpr const char* kName = "sparse_conv2d_dequantized";
  static constexpr OutputType kOutput = OutputType::kTold;
  static constexpr bool kInPlace = false;
  template <class Read>
  static void numbers(QuantizedConv2dParams& p, Read& read) {
    input_numbers(p, read);
    read.dtype("dtype", &p.y.dtype);
  }
  static Status check(const QuantizedConv2dParams& p) { return check_conv_numbers(kName, p); }
  static Status size(const QuantizedConv2dParams& p, int d, int64_t x, int64_t* y) {
    return conv_size(kName, p, d, x, y);
  }
};

struct ConvTransposeLayer : LayerOf<ConvTransposeParams> {
  static constexpr const char* kName = "sparse_conv_transpose2d";
  static constexpr bool kListOfX = true;
  template <class Read>
  static constexpr void tensors(ConvTransposeParams& p, Read& read) {
    read.weight("weight", &p.weight, nullptr);
    read.vector("bias", &p.bias, &p.bias_dtype);
    read.plane("residual", &p.residual);
    read.vector("slope", &p.slope, &p.slope_dtype);
  }
  template <class Read>
  static void numbers(ConvTransposeParams& p, Read& read) {
    read.integers("stride", p.stride, 1);
    read.integers("padding", p.padding, 0);
    read.integers("output_padding", p.output_padding, 0);
    read.integers("dilation", p.dilation, 1);
    read.integer("groups", &p.groups, 1);
    activation_numbers(p, read, "none");
    read.flag("allow_tf32", &p.allow_tf32, false);
  }
  SBNET_EXPORT static Status check(const ConvTransposeParams& p);
  SBNET_EXPORT static Status size(const ConvTransposeParams& p, int d, int64_t x, int64_t* y);
  static constexpr auto workspace = SBNET_KERNELS(sparse_conv_transpose2d_workspace_bytes);
  static constexpr auto kernels = SBNET_KERNELS(sparse_conv_transpose2d);
};

struct BottleneckLayer : LayerOf<BottleneckParams> {
  static constexpr const char* kName = "sparse_bottleneck2d";
  static constexpr bool kReadsMap = true;
  template <class Read>
  static constexpr void tensors(BottleneckParams& p, Read& read) {
    read.weight("weight1", &p.weight[0], &p.packed[0]);
    read.weight("weight2", &p.weight[1], &p.packed[1]);
    read.weight("weight3", &p.weight[2], &p.packed[2]);
    read.vector("bias1", &p.bias[0], &p.bias_dtype, &p.weight[0].size[0]);
    read.vector("bias2", &p.bias[1], &p.bias_dtype, &p.weight[1].size[0]);
    read.vector("bias3", &p.bias[2], &p.bias_dtype, &p.weight[2].size[0]);
  }
  template <class Read>
  static void numbers(BottleneckParams& p, Read& read) {
    activation_numbers(p, read, "relu");
    read.flag("allow_tf32", &p.allow_tf32, false);
  }
  static constexpr auto workspace = SBNET_KERNELS(sparse_bottleneck2d_workspace_bytes);
  static constexpr auto kernels = SBNET_KERNELS(sparse_bottleneck2d);
};

}  // namespace sbnet

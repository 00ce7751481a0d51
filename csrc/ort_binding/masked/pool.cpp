#include "core/masked/pool.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

enum Position { kX, kIndices, kCount, kBlockMap, kFringePixels, kFringeCount, kBase };

// What both pools share. The ops below add their names, tables and attributes.
class Pool {
 protected:
  Pool(PoolKind kind, const Attributes& a) : layer_(a, {kIndices, kFringePixels}) {
    params_.kind = kind;
    const Pair kernel = a.required_pair("kernel_size"), stride = a.pair("stride").value_or(kernel),
               padding = a.pair("padding", 0);
    for (size_t d = 0; d < 2; ++d) {
      params_.kernel[d] = kernel[d], params_.stride[d] = stride[d], params_.padding[d] = padding[d];
      params_.dilation[d] = 1;
    }
    params_.ceil_mode = a.flag("ceil_mode", false);
  }

  PoolParams params_ = {};

 public:
  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4);
    Dims y(4);
    if (!x.empty()) {
      y[0] = x[0], y[3] = x[3];
      for (size_t d = 0; d < 2; ++d) y[1 + d] = x[1 + d].map([&](int64_t side) { return output_side(d, side); });
    }
    layer_.infer(s, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4);
    PoolParams p = params_;
    const std::vector<int64_t> shape = {x.shape[0], output_side(0, x.shape[1]), output_side(1, x.shape[2]), x.shape[3]};
    layer_.compute(c, p, shape, [&](const Parallel& parallel) {
      return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_pool2d_cpu(&p, &parallel), sbnet_sparse_pool2d_cuda(&p, c.stream()));
    });
  }

 private:
  int64_t output_side(size_t d, int64_t side) const {
    const int64_t out = pool_output_side(side, params_.kernel[d], params_.stride[d], params_.padding[d],
                                         params_.dilation[d], params_.ceil_mode);
    if (out < 1)
      raise("sbnet::", pool_name(params_.kind), ": x: side ", side, " with padding ", params_.padding[d],
            " is smaller than the kernel's reach");
    return out;
  }

  MaskedLayer layer_;
};

struct SparseMaxPool2d : Pool {
  static constexpr const char* kName = "sparse_max_pool2d";
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"indices", kInt32},
                                         {"count", kInt32},
                                         {"block_map", kInt32},
                                         {"fringe_pixels", kInt32, kOptional},
                                         {"fringe_count", kInt32, kOptional},
                                         {"base", kT, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr Types kTypes[] = {{kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}};
  static constexpr int kInPlace = kBase;

  explicit SparseMaxPool2d(const Attributes& a) : Pool(PoolKind::kMax, a) {
    const Pair dilation = a.pair("dilation", 1);
    for (size_t d = 0; d < 2; ++d) params_.dilation[d] = dilation[d];
    check(check_pool_window(params_));
  }
};

struct SparseAvgPool2d : Pool {
  static constexpr const char* kName = "sparse_avg_pool2d";
  static constexpr Argument kInputs[] = {{"x", kT},
                                         {"indices", kInt32},
                                         {"count", kInt32},
                                         {"block_map", kInt32},
                                         {"fringe_pixels", kInt32, kOptional},
                                         {"fringe_count", kInt32, kOptional},
                                         {"base", kT, kOptional}};
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr Types kTypes[] = {{kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}};
  static constexpr int kInPlace = kBase;

  explicit SparseAvgPool2d(const Attributes& a) : Pool(PoolKind::kAverage, a) {
    params_.count_include_pad = a.flag("count_include_pad", true);
    const int64_t divisor = a.integer("divisor_override", 0);
    if (divisor < INT32_MIN || divisor > INT32_MAX)
      raise("sbnet::", kName, ": divisor_override: ", divisor, " does not fit 32 bits");
    params_.divisor_override = static_cast<int32_t>(divisor);
    check(check_pool_window(params_));
  }
};

}  // namespace

void add_pool_ops(const Runtime& runtime) {
  add_op<SparseMaxPool2d>(runtime);
  add_op<SparseAvgPool2d>(runtime);
}

}  // namespace sbnet::ort

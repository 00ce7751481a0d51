#include "core/masked/pool.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

// What both pools share. The ops below add their names and attributes.
class Pool : public PlainLayer<Pool, PoolParams> {
 public:
  Dim side(int d, const Dim& x) const {
    return x.map([&](int64_t side) {
      const PoolParams& p = params_;
      const int64_t out = pool_output_side(side, p.kernel[d], p.stride[d], p.padding[d], p.dilation[d], p.ceil_mode);
      if (out < 1)
        raise("sbnet::", pool_name(p.kind), ": x: expected at least the kernel's reach, got side ", side,
              " with padding ", p.padding[d]);
      return out;
    });
  }
  Status launch(const Context& c, const PoolParams& p, const Parallel& parallel) const {
    return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_pool2d_cpu(&p, &parallel), sbnet_sparse_pool2d_cuda(&p, c.stream()));
  }

 protected:
  Pool(PoolKind kind, const Attributes& a) : PlainLayer(a) {
    params_.kind = kind;
    const Pair kernel = a.required_pair("kernel_size"), stride = a.pair("stride").value_or(kernel),
               padding = a.pair("padding", 0);
    for (size_t d = 0; d < 2; ++d) {
      params_.kernel[d] = kernel[d], params_.stride[d] = stride[d], params_.padding[d] = padding[d];
      params_.dilation[d] = 1;
    }
    params_.ceil_mode = a.flag("ceil_mode", false);
  }
};

struct SparseMaxPool2d : Pool {
  static constexpr const char* kName = "sparse_max_pool2d";
  explicit SparseMaxPool2d(const Attributes& a) : Pool(PoolKind::kMax, a) {
    const Pair dilation = a.pair("dilation", 1);
    for (size_t d = 0; d < 2; ++d) params_.dilation[d] = dilation[d];
    check(check_pool_window(params_));
  }
};

struct SparseAvgPool2d : Pool {
  static constexpr const char* kName = "sparse_avg_pool2d";
  explicit SparseAvgPool2d(const Attributes& a) : Pool(PoolKind::kAverage, a) {
    params_.count_include_pad = a.flag("count_include_pad", true);
    const int64_t divisor = a.integer("divisor_override", 0);
    if (divisor < INT32_MIN || divisor > INT32_MAX)
      raise("sbnet::", kName, ": divisor_override: expected a number of 32 bits, got ", divisor);
    params_.divisor_override = static_cast<int32_t>(divisor);
    check(check_pool_window(params_));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseMaxPool2d, SparseAvgPool2d)

}  // namespace sbnet::ort

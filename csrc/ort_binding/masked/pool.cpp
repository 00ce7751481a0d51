#include "core/masked/pool.h"

#include "core/masked/fill.h"
#include "ort_binding/common.h"

namespace sbnet::ort {
namespace {

enum Position { kX, kIndices, kCount, kBlockMap, kFringePixels, kFringeCount, kBase };

// What both pools share. The ops below add their names, tables and attributes.
class Pool {
 protected:
  Pool(PoolKind kind, const Attributes& a) : grid_(a), zero_outside_(a.flag("zero_outside", false)) {
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
    s.input(kIndices, 2);
    s.input(kBlockMap, 3);
    // The size of y is that of base: its symbols, if it has any, say more than a formula would.
    Dims y(4), base = s.input(kBase, 4);
    if (!x.empty()) {
      y[0] = x[0], y[3] = x[3];
      for (size_t d = 0; d < 2; ++d) y[1 + d] = x[1 + d].map([&](int64_t side) { return output_side(d, side); });
    }
    for (size_t d = 0; d < 4; ++d)
      if (!base.empty() && !y[d].known()) y[d] = base[d];
    s.output(0, y);
  }

  void compute(Context& c) const {
    const char* op = pool_name(params_.kind);
    const Tensor x = c.input(kX, 4), fringe_pixels = c.input(kFringePixels, 1), fringe_count = c.input(kFringeCount),
                 base = c.input(kBase, 4);
    PoolParams p = params_;
    p.x = plane_view(x);
    if (fringe_pixels.present != fringe_count.present) raise("sbnet::", op, ": fringe: pixels and count go together");
    if (fringe_pixels.present) {
      p.fringe.capacity = fringe_pixels.shape[0];
      p.fringe.pixels = c.int32(fringe_pixels, {p.fringe.capacity});
      p.fringe.count = c.int32(fringe_count, {1});
    }
    if (base.present && zero_outside_) raise("sbnet::", op, ": base: not with zero_outside=1");

    const std::vector<int64_t> shape = {x.shape[0], output_side(0, x.shape[1]), output_side(1, x.shape[2]), x.shape[3]};
    const int64_t plane[2] = {shape[1], shape[2]};
    const ActiveInputs active = active_inputs(c, {kIndices, kCount, kBlockMap}, grid_, plane);
    if (active.batch != x.shape[0])
      raise("sbnet::", op, ": block_map: ", active.batch, " images; those of x, ", x.shape[0], ", are wanted");
    p.active = active.view;
    p.y = plane_view(nullptr, shape, x.dtype);
    check(validate(p));  // before an output of an absurd size is asked for
    if (base.present && base.shape != shape) {
      p.y = plane_view(base);
      check(validate(p));
    }
    p.y.data = c.output(0, shape);
    if (base.present) c.copy(p.y.data, base.data, base.bytes());

    const Parallel parallel = c.parallel();
    check(SBNET_ORT_ON_DEVICE(c, sbnet_sparse_pool2d_cpu(&p, &parallel), sbnet_sparse_pool2d_cuda(&p, c.stream())));
    if (!zero_outside_) return;
    FillParams f = {};
    f.x = f.y = p.y;
    f.block_map = p.active.block_map;
    f.grid = p.active.grid;
    check(SBNET_ORT_ON_DEVICE(c, sbnet_sparse_fill_cpu(&f, &parallel), sbnet_sparse_fill_cuda(&f, c.stream())));
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

  GridAttributes grid_;
  bool zero_outside_;
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

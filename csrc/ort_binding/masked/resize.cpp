#include "core/masked/resize.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

enum Position { kX, kIndices, kCount, kBlockMap, kFringePixels, kFringeCount, kBase };

class SparseResize2d {
 public:
  static constexpr const char* kName = "sparse_resize2d";
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

  explicit SparseResize2d(const Attributes& a) : layer_(a, {kIndices, kFringePixels}), size_(a.pair("size")) {
    check(read_resize_mode(kName, a.text("mode", "nearest").c_str(), &params_.mode));
    params_.align_corners = a.flag("align_corners", false);
    params_.ratio[0] = a.real("ratio_h", 0), params_.ratio[1] = a.real("ratio_w", 0);
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4);
    Dims y(4);
    for (size_t d = 0; d < 2; ++d) {
      if (size_)
        y[1 + d] = Dim((*size_)[d]);
      else if (!x.empty())
        y[1 + d] = x[1 + d].map([&](int64_t side) { return output_side(d, side); });
    }
    if (!x.empty()) y[0] = x[0], y[3] = x[3];
    layer_.infer(s, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4);
    ResizeParams p = params_;
    const std::vector<int64_t> shape = {x.shape[0], output_side(0, x.shape[1]), output_side(1, x.shape[2]), x.shape[3]};
    layer_.compute(c, p, shape, [&](const Parallel& parallel) {
      return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_resize2d_cpu(&p, &parallel),
                                 sbnet_sparse_resize2d_cuda(&p, c.stream()));
    });
  }

 private:
  // By the ratio, a float near the reciprocal of a scale: quotients that miss a whole number by its rounding are it.
  int64_t output_side(size_t d, int64_t side) const {
    if (size_) return (*size_)[d];
    const double ratio = params_.ratio[d];
    if (!(ratio > 0)) raise("sbnet::", kName, ": size: expected it, or ratio_h and ratio_w above 0");
    const double out = std::floor(static_cast<double>(side) / ratio * (1 + 0x1p-22));
    if (!(out < 1 << 24)) raise("sbnet::", kName, ": ratio: expected sides below 2^24, got ", out);
    return static_cast<int64_t>(out);
  }

  MaskedLayer layer_;
  std::optional<Pair> size_;
  ResizeParams params_ = {};
};

}  // namespace

void add_resize_ops(const Runtime& runtime) { add_op<SparseResize2d>(runtime); }

}  // namespace sbnet::ort

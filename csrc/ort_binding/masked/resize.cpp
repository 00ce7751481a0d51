#include "core/masked/resize.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

struct SparseResize2d : PlainLayer<SparseResize2d, ResizeParams> {
  static constexpr const char* kName = "sparse_resize2d";
  std::optional<Pair> size;

  explicit SparseResize2d(const Attributes& a) : PlainLayer(a), size(a.pair("size")) {
    check(read_resize_mode(kName, a.text("mode", "nearest").c_str(), &params_.mode));
    params_.align_corners = a.flag("align_corners", false);
    params_.ratio[0] = a.real("ratio_h", 0), params_.ratio[1] = a.real("ratio_w", 0);
  }

  // By the ratio, a float near the reciprocal of a scale: quotients that miss a whole number by its rounding are it.
  Dim side(int d, const Dim& x) const {
    if (size) return Dim((*size)[static_cast<size_t>(d)]);
    return x.map([&](int64_t side) {
      const double ratio = params_.ratio[d];
      if (!(ratio > 0)) raise("sbnet::", kName, ": size: expected it, or ratio_h and ratio_w above 0");
      const double out = std::floor(static_cast<double>(side) / ratio * (1 + 0x1p-22));
      if (!(out < 1 << 24)) raise("sbnet::", kName, ": ratio: expected sides below 2^24, got ", out);
      return static_cast<int64_t>(out);
    });
  }
  Status launch(const Context& c, const ResizeParams& p, const Parallel& parallel) const {
    return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_resize2d_cpu(&p, &parallel), sbnet_sparse_resize2d_cuda(&p, c.stream()));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseResize2d)

}  // namespace sbnet::ort

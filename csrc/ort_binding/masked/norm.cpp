#include "core/masked/norm.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

enum Position { kX, kIndices, kCount, kBlockMap, kWeight, kBiasInput, kFringePixels, kFringeCount, kBase };

class SparseNorm2d {
 public:
  static constexpr const char* kName = "sparse_norm2d";
  static constexpr auto kInputs = layer_inputs({{"x", kT}}, {{"weight", kBias, kOptional}, {"bias", kBias, kOptional}});
  static constexpr Argument kOutputs[] = {{"y", kT}};
  static constexpr auto kTypes = kBiasTypes;
  static constexpr int kInPlace = kBase;

  explicit SparseNorm2d(const Attributes& a) : layer_(a, {kIndices, kFringePixels}) {
    check(read_norm_kind(kName, a.text("mode", "group").c_str(), &params_.kind));
    const int64_t groups = a.integer("groups", 1);
    if (groups < 1 || groups > INT32_MAX) raise("sbnet::", kName, ": groups: expected at least 1, got ", groups);
    params_.groups = static_cast<int32_t>(groups);
    params_.eps = a.real("eps", 1e-5f);
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4);
    layer_.infer(s, x.empty() ? Dims(4) : x);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4);
    NormParams p = params_;
    p.param_dtype = x.dtype;
    p.weight = bias_of(c, kWeight, x.shape[3], &p.param_dtype);
    p.bias = bias_of(c, kBiasInput, x.shape[3], &p.param_dtype);
    layer_.compute(c, p, x.shape, [&](const Parallel& parallel) {
      const Workspace scratch(c, sbnet_sparse_norm2d_workspace_bytes(&p));
      return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_norm2d_cpu(&p, scratch.data(), &parallel),
                                 sbnet_sparse_norm2d_cuda(&p, scratch.data(), c.stream()));
    });
  }

 private:
  MaskedLayer layer_;
  NormParams params_ = {};
};

}  // namespace

SBNET_ORT_OPS(SparseNorm2d)

}  // namespace sbnet::ort

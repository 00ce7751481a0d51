#include "core/masked/rearrange.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

enum Position { kX, kIndices, kCount, kBlockMap, kFringePixels, kFringeCount, kBase };

class SparseRearrange {
 public:
  static constexpr const char* kName = "sparse_rearrange";
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

  explicit SparseRearrange(const Attributes& a) : layer_(a, {kIndices, kFringePixels}) {
    constexpr const char* kNames[] = {"up", "down", "groups"};
    int32_t* const to[] = {&params_.up, &params_.down, &params_.groups};
    for (int k = 0; k < 3; ++k) {
      const int64_t number = a.integer(kNames[k], 1);
      if (number < 1 || number > INT32_MAX)
        raise("sbnet::", kName, ": ", kNames[k], ": expected at least 1, got ", number);
      *to[k] = static_cast<int32_t>(number);
    }
    const std::vector<int64_t> pad = a.integers("pad");
    if (!pad.empty() && pad.size() != 4)
      raise("sbnet::", kName, ": pad: expected left, right, top, bottom, got ", pad.size(), " numbers");
    for (size_t k = 0; k < pad.size(); ++k) {
      if (pad[k] <= -(1 << 24) || pad[k] >= 1 << 24)
        raise("sbnet::", kName, ": pad: expected numbers below 2^24, got ", pad[k]);
      params_.pad[k] = static_cast<int32_t>(pad[k]);
    }
    params_.value = a.real("value", 0);
  }

  void infer(ShapeContext& s) const {
    const Dims x = s.input(kX, 4);
    Dims y(4);
    if (!x.empty()) {
      y[0] = x[0], y[3] = x[3].map([&](int64_t size) { return channels(size); });
      for (int d = 0; d < 2; ++d) y[1 + d] = x[1 + d].map([&](int64_t size) { return side(d, size); });
    }
    layer_.infer(s, y);
  }

  void compute(Context& c) const {
    const Tensor x = c.input(kX, 4);
    RearrangeParams p = params_;
    const std::vector<int64_t> shape = {x.shape[0], side(0, x.shape[1]), side(1, x.shape[2]), channels(x.shape[3])};
    layer_.compute(c, p, shape, [&](const Parallel& parallel) {
      return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_rearrange_cpu(&p, &parallel),
                                 sbnet_sparse_rearrange_cuda(&p, c.stream()));
    });
  }

 private:
  int64_t channels(int64_t size) const {
    int64_t out;
    check(rearrange_channels(kName, params_, size, &out));
    return out;
  }
  int64_t side(int d, int64_t size) const {
    int64_t out;
    check(rearrange_side(kName, params_, d, size, &out));
    return out;
  }

  MaskedLayer layer_;
  RearrangeParams params_ = {};
};

}  // namespace

void add_rearrange_ops(const Runtime& runtime) { add_op<SparseRearrange>(runtime); }

}  // namespace sbnet::ort

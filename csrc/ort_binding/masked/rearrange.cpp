#include "core/masked/rearrange.h"

#include "ort_binding/masked/layer.h"

namespace sbnet::ort {
namespace {

struct SparseRearrange : PlainLayer<SparseRearrange, RearrangeParams> {
  static constexpr const char* kName = "sparse_rearrange";

  explicit SparseRearrange(const Attributes& a) : PlainLayer(a) {
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

  Dim channels(const Dim& x) const {
    return x.map([&](int64_t size) {
      int64_t out;
      check(rearrange_channels(kName, params_, size, &out));
      return out;
    });
  }
  Dim side(int d, const Dim& x) const {
    return x.map([&](int64_t size) {
      int64_t out;
      check(rearrange_side(kName, params_, d, size, &out));
      return out;
    });
  }
  Status launch(const Context& c, const RearrangeParams& p, const Parallel& parallel) const {
    return SBNET_ORT_ON_DEVICE(c, sbnet_sparse_rearrange_cpu(&p, &parallel),
                               sbnet_sparse_rearrange_cuda(&p, c.stream()));
  }
};

}  // namespace

SBNET_ORT_OPS(SparseRearrange)

}  // namespace sbnet::ort

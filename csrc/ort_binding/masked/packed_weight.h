// A constant weight as the CPU's kernels read it: packed when the session is made, for all of its runs.
#pragma once
#include "ort_binding/common.h"

namespace sbnet::ort {

class PackedWeight {
 public:
  PackedWeight(const Attributes& a, const char* name, size_t input, int64_t groups) {
    const Tensor weight = a.constant_on_cpu(name, input);
    if (!weight.present || weight.shape.size() != 4 || groups < 1 || groups > INT32_MAX) return;
    const ConvPackParams p = {plane_view(weight), static_cast<int32_t>(groups)};
    if (!validate(p).ok()) return;  // the run says what is wrong, in the op's name
    data_.reset(new char[static_cast<size_t>(packed_bytes(p))]);
    const Parallel alone = {nullptr, nullptr, 1};  // ORT lends its threads to runs only
    check(sbnet_pack_conv_weight_cpu(&p, data_.get(), &alone));
  }
  // Null: the weight is no constant, or the kernel one of CUDA.
  const void* data() const { return data_.get(); }

 private:
  std::shared_ptr<char[]> data_;
};

}  // namespace sbnet::ort

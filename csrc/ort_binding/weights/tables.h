// The tables of a layout of block-sparse weights, as nodes keep them.
#pragma once
#include <mutex>

#include "core/weights/matmul.h"
#include "ort_binding/common.h"

namespace sbnet::ort {

// On the kernel's device, made once: of constant inputs by the first run, for all that follow (CUDA graphs are captured
// by a later one).
class Tables {
 public:
  Tables() = default;
  Tables(const Tables&) = delete;
  ~Tables() {  // waits for the kernels that read them
#ifdef SBNET_WITH_CUDA
    sbnet_block_layout_free_cuda(device_);
#endif
  }
  // make() gives their words; on the CPU they stay at host().
  template <class Make>
  const int32_t* get([[maybe_unused]] const Context& c, const Make& make) {
    std::call_once(once_, [&] {
      host_ = make();
      at_ = host_.data();
#ifdef SBNET_WITH_CUDA
      if (c.cuda()) {
        check(sbnet_block_layout_upload_cuda(host_.data(), static_cast<int64_t>(host_.size()), &device_));
        at_ = device_;
      }
#endif
    });
    return at_;
  }
  const std::vector<int32_t>& host() const { return host_; }

 private:
  std::once_flag once_;
  std::vector<int32_t> host_;
  int32_t* device_ = nullptr;
  const int32_t* at_ = nullptr;
};

// The [elements] bias of an op, if there is one.
template <class Params>
void set_bias(const Context& c, const Tensor& bias, int64_t elements, Params* p) {
  if (!bias.present) return;
  if (bias.shape[0] != elements) raise_expected(c.op(), "bias", elements, " elements, got ", bias.shape[0]);
  p->bias = bias.data;
  p->bias_dtype = bias.dtype;
}

}  // namespace sbnet::ort

// The functions behind the table of int8 convolutions (conv_kernels.h), over run_slice of vectors or of tiles.
#pragma once
#include "cpu/masked/conv_job.h"

namespace sbnet {
namespace SBNET_ISA {

static void run_job(const ConvPlan& plan, const ConvJob& job) {
  plan.p.x.dtype == DType::kF32 ? run<float>(plan, job) : run<int8_t>(plan, job);
}

static void pack_all(const ConvLayout& layout, void* packed, int64_t begin, int64_t end) {
  pack_weights<int8_t>(layout, packed, begin, end);
  const TensorView& w = layout.weight;
  int32_t* offsets = reinterpret_cast<int32_t*>(static_cast<char*>(packed) + layout.offsets_at);
  const int64_t per_group = (layout.group_out + kLanes - 1) / kLanes;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i / per_group * layout.group_out, k0 = i % per_group * kLanes;
    for (int64_t k = first + k0; k < first + smaller(k0 + kLanes, layout.group_out); ++k) {
      int32_t sum = 0;
      for (int64_t c = 0; c < w.size[1]; ++c)
        for (int64_t r = 0; r < w.size[2]; ++r)
          for (int64_t s = 0; s < w.size[3]; ++s)
            sum += static_cast<const int8_t*>(
                w.data)[k * w.stride[0] + c * w.stride[1] + r * w.stride[2] + s * w.stride[3]];
      offsets[k] = -kOffset * sum;
    }
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

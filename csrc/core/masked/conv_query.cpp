// A layer by its numbers alone, as `sbnet info --layer` asks which kernel serves it.
#include "core/masked/conv_select.h"
#include "core/memory.h"

namespace sbnet {

Status check_query(const char* op, const SbnetConvQuery& q, int log2_longest, bool known, const char* dtypes) {
  const int64_t numbers[] = {q.batch,       q.channels,  q.height,    q.width,     q.out_channels,
                             q.kernel[0],   q.kernel[1], q.stride[0], q.stride[1], q.dilation[0],
                             q.dilation[1], q.groups,    q.block[0],  q.block[1]};
  for (const int64_t v : numbers)
    SBNET_CHECK(v > 0 && v < int64_t{1} << log2_longest, "%s: expected sizes from 1 to 2^%d, got %lld", op,
                log2_longest, static_cast<long long>(v));
  SBNET_CHECK(known, "%s: dtype: expected %s, got number %lld", op, dtypes, static_cast<long long>(q.dtype));
  SBNET_CHECK(q.channels % q.groups == 0 && q.out_channels % q.groups == 0,
              "%s: groups: expected a divisor of %lld and %lld channels, got %lld", op,
              static_cast<long long>(q.channels), static_cast<long long>(q.out_channels),
              static_cast<long long>(q.groups));
  return ok_status();
}

Status read_query(const SbnetConvQuery& q, Conv2dParams* to) {
  constexpr int kLog2Longest = 20;  // so that no product below overflows
  const DType dtype = static_cast<DType>(q.dtype);
  const bool known = is_compute_dtype(dtype) || dtype == DType::kI8 || dtype == DType::kF8;
  SBNET_TRY(check_query("select_conv2d", q, kLog2Longest, known, "float32, float16, bfloat16, int8 or float8_e4m3fn"));
  Conv2dParams p = {};
  int64_t out[2];
  const int64_t in[2] = {q.height, q.width};
  for (int d = 0; d < 2; ++d) {
    SBNET_CHECK(q.padding[d] >= 0 && q.padding[d] >> kLog2Longest == 0,
                "select_conv2d: padding: expected 0 to 2^20, got %lld", static_cast<long long>(q.padding[d]));
    const int64_t span = in[d] + 2 * q.padding[d] - q.dilation[d] * (q.kernel[d] - 1) - 1;
    SBNET_CHECK(span >= 0, "select_conv2d: layer: expected a kernel within the padded plane, got a larger one");
    out[d] = span / q.stride[d] + 1;
    p.stride[d] = static_cast<int32_t>(q.stride[d]), p.padding[d] = static_cast<int32_t>(q.padding[d]);
    p.dilation[d] = static_cast<int32_t>(q.dilation[d]);
  }
  fill_query(q, out, &p);
  p.weight = channels_last(dtype, q.out_channels, q.channels / q.groups, q.kernel[0], q.kernel[1]);
  *to = p;
  return ok_status();
}

}  // namespace sbnet

// sparse_fill on the CPU: threads take rows, runs of blocks of one kind are one copy or one fill.
#include "core/masked/fill.h"

#include <algorithm>
#include <cstring>

#include "cpu/simd/half.h"

namespace sbnet {
namespace {

// `count` elements of a row from column x0 on, of a channel or (channels next to each other) of all channels at once.
template <class T>
void write_run(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t count, bool active, T value) {
  if (!active && to_stride == 1) {
    std::fill_n(to, count, value);
  } else if (!active) {
    for (int64_t k = 0; k < count; ++k) to[k * to_stride] = value;
  } else if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  } else {
    for (int64_t k = 0; k < count; ++k) to[k * to_stride] = from[k * from_stride];
  }
}

template <class T>
void fill_row(const FillParams& p, int64_t n, int64_t row, T value) {
  const TensorView &x = p.x, &y = p.y;
  const int64_t C = y.size[1], W = y.size[3], columns = p.grid.count[1];
  const int32_t* map = p.block_map + (n * p.grid.count[0] + row / p.grid.size[0]) * columns;
  const T* from = static_cast<const T*>(x.data) + n * x.stride[0] + row * x.stride[2];
  T* to = static_cast<T*>(y.data) + n * y.stride[0] + row * y.stride[2];
  const bool packed = x.stride[1] == 1 && y.stride[1] == 1 && x.stride[3] == C && y.stride[3] == C;
  for (int64_t j = 0; j < columns;) {
    const bool active = map[j] >= 0;
    const int64_t first = j;
    while (j < columns && (map[j] >= 0) == active) ++j;
    if (active && p.in_place()) continue;
    const int64_t begin = first * p.grid.size[1], end = std::min(W, j * p.grid.size[1]);
    if (packed) {
      write_run(to + begin * C, 1, from + begin * C, 1, (end - begin) * C, active, value);
    } else if (y.stride[1] == 1) {
      for (int64_t w = begin; w < end; ++w)
        write_run(to + w * y.stride[3], 1, from + w * x.stride[3], x.stride[1], C, active, value);
    } else {
      for (int64_t c = 0; c < C; ++c)
        write_run(to + c * y.stride[1] + begin * y.stride[3], y.stride[3], from + c * x.stride[1] + begin * x.stride[3],
                  x.stride[3], end - begin, active, value);
    }
  }
}

template <class T>
void fill(const FillParams& p, const Parallel& parallel, T value) {
  const int64_t H = p.y.size[2], row_elements = std::max<int64_t>(p.y.size[1] * p.y.size[3], 1);
  if (!p.y.size[1] || !p.y.size[3]) return;
  const int64_t grain = std::max<int64_t>(32768 / row_elements, 1);
  parallel_for(parallel, p.y.size[0] * H, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) fill_row<T>(p, r / H, r % H, value);
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_fill_cpu(const sbnet::FillParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  switch (p->x.dtype) {
    case DType::kF32:
      fill<uint32_t>(*p, *parallel, float_to_bits(p->value));
      break;
    case DType::kI8:
    case DType::kF8:
      fill<uint8_t>(*p, *parallel, 0);
      break;
    case DType::kF16:
      fill<uint16_t>(*p, *parallel, from_float<Half>(p->value).bits);
      break;
    default:
      fill<uint16_t>(*p, *parallel, from_float<BFloat16>(p->value).bits);
      break;
  }
  return ok_status();
}

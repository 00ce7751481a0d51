#include "core/memory.h"

#include <initializer_list>

namespace sbnet {

PixelStrides pixel_strides(const TensorView& t) {
  PixelStrides s{t.stride[0], t.stride[2], t.stride[3]};
  if (t.size[3] == 1) s.x = t.size[1];
  if (t.size[2] == 1) s.y = s.x * t.size[3];
  if (t.size[0] == 1) s.n = s.y * t.size[2];
  return s;
}

bool tma_reads(const TensorView& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16 || t.stride[1] != 1) return false;
  const PixelStrides p = pixel_strides(t);
  for (const int64_t s : {p.n, p.y, p.x})
    if (s <= 0 || s % 8 || s >= (int64_t{1} << 38)) return false;
  for (int d = 0; d < 4; ++d)
    if (t.size[d] >= INT32_MAX / 2) return false;
  return true;
}

bool weights_packed(const TensorView& w) {
  const int64_t C = w.size[1], S = w.size[3], R = w.size[2];
  return (w.stride[1] == 1 || C == 1) && (w.stride[3] == C || S == 1) && (w.stride[2] == S * C || R == 1) &&
         (w.stride[0] == R * S * C || w.size[0] == 1) && reinterpret_cast<uintptr_t>(w.data) % 16 == 0;
}

bool channels_vectorize(const TensorView& t) {
  const int64_t lanes = 16 / dtype_size(t.dtype);
  if (t.stride[1] != 1 || reinterpret_cast<uintptr_t>(t.data) % 16) return false;
  for (int d : {0, 2, 3})
    if (t.size[d] > 1 && t.stride[d] % lanes) return false;
  return true;
}

}  // namespace sbnet

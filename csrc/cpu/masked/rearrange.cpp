// sparse_rearrange on the CPU: threads take rows of active blocks.
#include "core/masked/rearrange.h"

#include <cstring>

#include "cpu/masked/pixels.h"

namespace sbnet {
namespace {

template <class T>
void strided(const T* from, int64_t from_step, T* to, int64_t to_step, int64_t count) {
  if (from_step == 1 && to_step == 1)
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  else
    for (int64_t k = 0; k < count; ++k) to[k * to_step] = from[k * from_step];
}

// One pixel of y, all of its channels: every down^2 of them come from one pixel of x, up^2 channels apart. `row` and
// `column` lie between the paddings.
template <class T>
void one_pixel(const RearrangeParams& p, const RearrangeMap& map, const T* x, int row, int column, T* to) {
  const int64_t sx = p.x.stride[1], sy = p.y.stride[1], factor = int64_t{p.down} * p.down, parts = int64_t{p.up} * p.up;
  for (int i = 0; i < p.down; ++i)
    for (int j = 0; j < p.down; ++j) {
      const int h = row * p.down + i, w = column * p.down + j, part = h % p.up * p.up + w % p.up;
      const T* from = x + h / p.up * p.x.stride[2] + w / p.up * p.x.stride[3] + part * sx;
      const int64_t first = i * p.down + j, per_pixel = p.y.size[1] / factor;
      if (map.groups.divisor == 1) {
        strided(from, parts * sx, to + first * sy, factor * sy, per_pixel);
      } else if (factor == 1) {
        for (int g = 0; g < p.groups; ++g)
          strided(from + int64_t{g} * map.group * parts * sx, parts * sx, to + g * sy, p.groups * sy, map.group);
      } else {
        for (int64_t c = 0; c < per_pixel; ++c) {
          const int64_t k = c * factor + first;
          to[(k % map.group * p.groups + k / map.group) * sy] = from[c * parts * sx];
        }
      }
    }
}

// Planes one after another: a channel's pixels of the row.
template <class T>
void one_channel(const RearrangeParams& p, const RearrangeMap& map, const T* x, int k, int row, int64_t begin,
                 int64_t end, T* to) {
  const T value = from_float<T>(p.value);
  const bool runs = p.up == 1 && p.down == 1 && p.x.stride[3] == 1 && p.y.stride[3] == 1;
  for (int64_t w = begin; w < end; ++w) {
    int h = row, column = static_cast<int>(w), channel;
    if (!map.inside(1, &column)) {
      to[w * p.y.stride[3]] = value;
      continue;
    }
    const int64_t left = std::min<int64_t>(end - w, map.side[1] - column);
    map.source(k, &channel, &h, &column);
    const T* from = x + channel * p.x.stride[1] + h * p.x.stride[2] + column * p.x.stride[3];
    if (runs) {
      std::memcpy(to + w, from, static_cast<size_t>(left) * sizeof(T));
      w += left - 1;
    } else {
      to[w * p.y.stride[3]] = *from;
    }
  }
}

template <class T>
void rearrange(const RearrangeParams& p, const Parallel& parallel) {
  const RearrangeMap map(p);
  const int64_t channels = p.y.size[1];
  const bool channels_inner = p.y.stride[1] <= p.y.stride[3];
  for_rows(p, channels, parallel, [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(p.x.data) + n * p.x.stride[0];
    T* y = static_cast<T*>(p.y.data) + n * p.y.stride[0] + row * p.y.stride[2];
    const T value = from_float<T>(p.value);
    int at = static_cast<int>(row);
    const bool inside = map.inside(0, &at);
    if (!channels_inner && inside) {
      for (int64_t k = 0; k < channels; ++k)
        one_channel(p, map, x, static_cast<int>(k), at, begin, end, y + k * p.y.stride[1]);
      return;
    }
    for (int64_t w = begin; w < end; ++w) {
      T* to = y + w * p.y.stride[3];
      int column = static_cast<int>(w);
      if (inside && map.inside(1, &column))
        one_pixel(p, map, x, at, column, to);
      else
        for (int64_t k = 0; k < channels; ++k) to[k * p.y.stride[1]] = value;
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_rearrange_cpu(const sbnet::RearrangeParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  return run_by_dtype(*p, [&](auto t) { rearrange<decltype(t)>(*p, *parallel); });
}

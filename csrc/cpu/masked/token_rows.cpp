// Rows of tokens on the CPU: an image, or a row, at a time.
#include "core/masked/token_rows.h"

#include <algorithm>
#include <cstring>

namespace sbnet {
namespace {

void pack(const PackTokensParams& p, int64_t n) {
  const int64_t tokens = p.tokens(), last = tokens - p.suffix;
  const int32_t* map = p.block_map + n * p.grid.count[0] * p.grid.count[1];
  int64_t length = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t pixel = t - p.prefix;
    const bool there =
        pixel < 0 || t >= last ||
        covered(map, p.grid, static_cast<int32_t>(pixel / p.width), static_cast<int32_t>(pixel % p.width));
    p.mask[n * tokens + t] = there;
    if (there) p.order[n * p.capacity + length++] = t;
    p.rows[n * tokens + t] = std::max<int64_t>(length - 1, 0);
  }
  p.lengths[n] = static_cast<int32_t>(length);
  for (int64_t r = 0; r < p.capacity; ++r) {
    p.filled[n * p.capacity + r] = r < length;
    if (r >= length) p.order[n * p.capacity + r] = 0;
  }
}

template <class T>
void move(const MoveRowsParams& p, int64_t n, int64_t r) {
  if (p.stays(n, r)) return;
  T* to = static_cast<T*>(p.out.data) + n * p.out.image_stride + r * p.out.row_stride;
  const T* from = source_of<T>(p, n, r);
  const size_t bytes = static_cast<size_t>(p.channels) * sizeof(T);
  if (from)
    std::memcpy(to, from, bytes);
  else
    std::memset(to, 0, bytes);
}

template <class T>
void pack_patch(const PackPatchesParams& p, int64_t n, int64_t r) {
  const bool row = r < p.lengths[n];
  if (!row && !p.clear) return;
  const int64_t columns = p.x.size[3] / p.patch[1], patches = p.x.size[2] / p.patch[0] * columns;
  T* to = static_cast<T*>(p.out.data) + n * p.out.image_stride + r * p.out.row_stride;
  const int64_t t = p.index[n * p.out.rows + r];
  const bool there = row && t >= 0 && t < patches;
  for (int64_t c = 0; c < p.x.size[1]; ++c)
    for (int64_t y = 0; y < p.patch[0]; ++y)
      for (int64_t x = 0; x < p.patch[1]; ++x, ++to)
        *to =
            there
                ? static_cast<const T*>(
                      p.x.data)[n * p.x.stride[0] + c * p.x.stride[1] + (t / columns * p.patch[0] + y) * p.x.stride[2] +
                                (t % columns * p.patch[1] + x) * p.x.stride[3]]
                : T{0};
}

template <class T>
void merge(const MergePixelsParams& p, int64_t n, int64_t i) {
  const int64_t C = p.x.size[1];
  const int32_t* map = p.block_map + (n * p.grid.count[0] + i / p.grid.size[0]) * p.grid.count[1];
  for (int64_t j = 0; j < p.out.size[3]; ++j) {
    if (map[j / p.grid.size[1]] < 0) continue;
    T* to = static_cast<T*>(p.out.data) + n * p.out.stride[0] + i * p.out.stride[2] + j * p.out.stride[3];
    for (int32_t s = 0; s < p.count; ++s)
      std::memcpy(to + s * C,
                  static_cast<const T*>(p.x.data) + n * p.x.stride[0] +
                      (i * p.factor + p.offsets[s][0]) * p.x.stride[2] +
                      (j * p.factor + p.offsets[s][1]) * p.x.stride[3],
                  static_cast<size_t>(C) * sizeof(T));
  }
}

constexpr int64_t kGrain = 64;  // rows of a task

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_pack_tokens_cpu(const sbnet::PackTokensParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  parallel_for(*parallel, p->batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) pack(*p, n);
  });
  return ok_status();
}

sbnet::Status sbnet_move_rows_cpu(const sbnet::MoveRowsParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  parallel_for(*parallel, p->out.images * p->out.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      p->element_bytes == 2 ? move<uint16_t>(*p, i / p->out.rows, i % p->out.rows)
                            : move<uint32_t>(*p, i / p->out.rows, i % p->out.rows);
  });
  return ok_status();
}

sbnet::Status sbnet_pack_patches_cpu(const sbnet::PackPatchesParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  parallel_for(*parallel, p->out.images * p->out.rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      dtype_size(p->x.dtype) == 2 ? pack_patch<uint16_t>(*p, i / p->out.rows, i % p->out.rows)
                                  : pack_patch<uint32_t>(*p, i / p->out.rows, i % p->out.rows);
  });
  return ok_status();
}

sbnet::Status sbnet_merge_pixels_cpu(const sbnet::MergePixelsParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  const int64_t H = p->out.size[2];
  parallel_for(*parallel, p->out.size[0] * H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      dtype_size(p->x.dtype) == 2 ? merge<uint16_t>(*p, i / H, i % H) : merge<uint32_t>(*p, i / H, i % H);
  });
  return ok_status();
}

// sparse_resize2d_grad on the CPU: threads take rows of dx. Which outputs read a row or a column, and with which
// weights, is tabulated first.
#include "core/masked/resize_grad.h"

#include <algorithm>
#include <vector>

#include "cpu/masked/pixels.h"

namespace sbnet {
namespace {

constexpr int64_t kRun = 64;  // channels at a time

struct Reader {
  int32_t at, block;
  float weight;
};

// The readers of coordinate i are begin[i] ... begin[i + 1] of all.
struct ReaderTable {
  std::vector<size_t> begin;
  std::vector<Reader> all;

  template <int kTaps>
  void fill(const ResizeReaders& of, int32_t block) {
    begin.push_back(0);
    for (int32_t i = 0; i < of.axis.side; ++i) {
      float weight;
      for (int32_t o = of.first<kTaps>(i); of.weight<kTaps>(o, i, &weight); ++o)
        if (weight != 0.0f) all.push_back({o, o / block, weight});
      begin.push_back(all.size());
    }
  }
  ReaderTable(const ResizeGradParams& p, int d) {
    const ResizeReaders of(p.forward(), d);
    const int32_t block = p.read_grid.size[d];
    if (p.mode == ResizeMode::kBicubic)
      fill<4>(of, block);
    else if (p.mode == ResizeMode::kBilinear)
      fill<2>(of, block);
    else
      fill<1>(of, block);
  }
};

// Columns begin ... end of a row of dx. The readers of each of their rows are summed by themselves: many numbers added
// one after the other lose digits.
template <class T>
void gather_row(const ResizeGradParams& p, const ReaderTable (&table)[2], int64_t n, int64_t row, int64_t begin,
                int64_t end) {
  const TensorView &dy = p.x, &dx = p.y;
  const BlockGrid& grid = p.read_grid;
  const int32_t* map = p.read_map + n * grid.count[0] * grid.count[1];
  const T* from = static_cast<const T*>(dy.data) + n * dy.stride[0];
  T* to = static_cast<T*>(dx.data) + n * dx.stride[0] + row * dx.stride[2];
  const Reader *rows = table[0].all.data() + table[0].begin[row],
               *rows_end = table[0].all.data() + table[0].begin[row + 1];
  for (int64_t w = begin; w < end; ++w) {
    const Reader* columns = table[1].all.data() + table[1].begin[w];
    const Reader* columns_end = table[1].all.data() + table[1].begin[w + 1];
    for (int64_t first = 0; first < dx.size[1]; first += kRun) {
      const int64_t channels = std::min(kRun, dx.size[1] - first);
      float sums[kRun] = {};
      for (const Reader* r = rows; r < rows_end; ++r) {
        const int32_t* blocks = map + r->block * grid.count[1];
        float of_row[kRun] = {};
        bool any = false;
        for (const Reader* s = columns; s < columns_end; ++s) {
          if (blocks[s->block] < 0) continue;
          any = true;
          const T* at = from + r->at * dy.stride[2] + s->at * dy.stride[3] + first * dy.stride[1];
          if (dy.stride[1] == 1)
            for (int64_t c = 0; c < channels; ++c) of_row[c] += s->weight * to_float(at[c]);
          else
            for (int64_t c = 0; c < channels; ++c) of_row[c] += s->weight * to_float(at[c * dy.stride[1]]);
        }
        if (any)
          for (int64_t c = 0; c < channels; ++c) sums[c] += r->weight * of_row[c];
      }
      T* out = to + w * dx.stride[3] + first * dx.stride[1];
      for (int64_t c = 0; c < channels; ++c) out[c * dx.stride[1]] = from_float<T>(sums[c]);
    }
  }
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_resize2d_grad_cpu(const sbnet::ResizeGradParams* params, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const ResizeGradParams& p = *params;
  return run_by_dtype(p, [&](auto t) {
    const ReaderTable table[2] = {ReaderTable(p, 0), ReaderTable(p, 1)};
    const double outputs = static_cast<double>(table[0].all.size()) * static_cast<double>(table[1].all.size());
    const int64_t H = p.y.size[2], W = p.y.size[3];
    const int64_t work =
        p.y.size[1] * (1 + static_cast<int64_t>(outputs / (static_cast<double>(H) * static_cast<double>(W))));
    const auto body = [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
      gather_row<decltype(t)>(p, table, n, row, begin, end);
    };
    if (p.active.given()) return for_rows(p, work, *parallel, body);
    parallel_for(*parallel, p.y.size[0] * H, 1 + 65536 / (W * work), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) body(r / H, r % H, 0, W);
    });
  });
}

// connected_components on the CPU, image by image: runs of pixels above the threshold are joined with those that they
// touch in the row above, in a forest whose roots are the components' first pixels, then ranked and measured in the
// order of rows.
#include "core/frames/components.h"

#include "cpu/lists/mask.h"

namespace sbnet {
namespace {

int32_t root_of(int32_t* label, int32_t at) {
  while (label[at] != at) at = label[at] = label[label[at]];
  return at;
}

void join(int32_t* label, int32_t a, int32_t b) {
  a = root_of(label, a), b = root_of(label, b);
  label[a < b ? b : a] = a < b ? a : b;
}

template <class T>
class Image {
 public:
  Image(const ComponentsParams& p, int64_t n, int32_t* scratch)
      : p_(p), n_(n), height_(p.scores.size[2]), width_(p.scores.size[3]), label_(scratch), rank_(scratch + p.area()) {}

  void run() {
    for (int64_t y = 0; y < height_; ++y) label(y);
    for (int64_t y = 0; y < height_; ++y)
      for_runs(y, [&](int64_t x, int64_t end) {
        const auto at = static_cast<int32_t>(y * width_ + x);
        rank_[root_of(label_, at)] += static_cast<int32_t>(end - x);
      });
    for (int64_t y = 0; y < height_; ++y) for_runs(y, [&](int64_t x, int64_t end) { measure(y, x, end); });
    for (int64_t k = count_; k < p_.capacity; ++k) start_row(k, 0, 0, 0, 0, 0);
    p_.count[n_] = count_;
  }

 private:
  float score(int64_t y, int64_t x) const {
    const TensorView& s = p_.scores;
    return as_float(static_cast<const T*>(s.data)[n_ * s.stride[0] + y * s.stride[2] + x * s.stride[3]]);
  }

  template <class F>
  void for_runs(int64_t y, const F& f) const {
    const int32_t* row = label_ + y * width_;
    for (int64_t x = 0; x < width_;) {
      if (row[x] < 0) {
        ++x;
        continue;
      }
      const int64_t first = x;
      while (x < width_ && row[x] >= 0) ++x;
      f(first, x);
    }
  }

  void label(int64_t y) {
    int32_t* row = label_ + y * width_;
    const int32_t* above = row - width_;
    const auto begin = static_cast<int32_t>(y * width_);
    for (int64_t x = 0; x < width_;) {
      if (!(score(y, x) > p_.least)) {
        row[x++] = -1;
        continue;
      }
      const int64_t first = x;
      const auto name = static_cast<int32_t>(begin + x);
      rank_[name] = 0;
      for (; x < width_ && score(y, x) > p_.least; ++x) row[x] = name;
      if (y == 0) continue;
      const int64_t last = x < width_ ? x : width_ - 1;
      for (int64_t k = first > 0 ? first - 1 : 0; k <= last; ++k)
        if (above[k] >= 0) join(label_, name, static_cast<int32_t>(begin - width_ + k));
    }
  }

  void start_row(int64_t k, int32_t left, int32_t top, int32_t right, int32_t bottom, int32_t pixels) {
    int32_t* box = p_.boxes + (n_ * p_.capacity + k) * 4;
    box[0] = left, box[1] = top, box[2] = right, box[3] = bottom;
    p_.pixels[n_ * p_.capacity + k] = pixels;
    p_.sums[n_ * p_.capacity + k] = 0;
  }

  void measure(int64_t y, int64_t x, int64_t end) {
    const auto at = static_cast<int32_t>(y * width_ + x);
    const int32_t root = root_of(label_, at);
    const auto left = static_cast<int32_t>(x), right = static_cast<int32_t>(end), row = static_cast<int32_t>(y);
    if (root == at) {  // the first of its component that is met
      const int32_t pixels = rank_[root];
      const bool counts = pixels >= p_.smallest;
      rank_[root] = counts && count_ < p_.capacity ? count_ : -1;
      if (rank_[root] >= 0) start_row(count_, left, row, right, row + 1, pixels);
      count_ += counts;
    }
    if (rank_[root] < 0) return;
    const int64_t k = n_ * p_.capacity + rank_[root];
    int32_t* box = p_.boxes + k * 4;
    if (left < box[0]) box[0] = left;
    if (right > box[2]) box[2] = right;
    box[3] = row + 1;
    for (; x < end; ++x) p_.sums[k] += level_of(score(y, x));
  }

  const ComponentsParams& p_;
  int64_t n_, height_, width_;
  int32_t* label_;  // of a pixel above the threshold one of its component, of others -1
  int32_t* rank_;   // of roots: pixels, then the row
  int32_t count_ = 0;
};

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_components_cpu(const sbnet::ComponentsParams* params, void* workspace,
                                   const sbnet::Parallel* parallel) {
  using namespace sbnet;
  const ComponentsParams& p = *params;
  SBNET_TRY(validate(p));
  int32_t* scratch = static_cast<int32_t*>(workspace);
  by_dtype<Half, BFloat16>(p.scores.dtype, [&](auto t) {
    parallel_for(*parallel, p.images(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) Image<decltype(t)>(p, n, scratch + n * 2 * p.area()).run();
    });
  });
  return ok_status();
}

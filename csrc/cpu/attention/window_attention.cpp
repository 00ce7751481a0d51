// Attention within windows on the CPU, in plain float arithmetic: a window of an image at a time, its active rows and
// keys alone.
#include "core/attention/window_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "cpu/simd/half.h"

namespace sbnet {
namespace {

float number(const WindowNumbers& n, int64_t i) {
  switch (n.dtype) {
    case DType::kF16:
      return to_float(static_cast<const Half*>(n.data)[i]);
    case DType::kBF16:
      return to_float(static_cast<const BFloat16*>(n.data)[i]);
    default:
      return static_cast<const float*>(n.data)[i];
  }
}

float dot(const float* a, const float* b, int32_t length) {
  float sum = 0.f;
  for (int32_t d = 0; d < length; ++d) sum += a[d] * b[d];
  return sum;
}

template <class T>
class Window {
 public:
  Window(const WindowAttentionParams& p, int64_t n, int32_t window) : p_(p), n_(n), window_(window) {
    const int64_t* rows = p.row_index + int64_t{window} * p.rows;
    const int64_t* keys = p.key_index + int64_t{window} * p.keys;
    for (int32_t i = 0; i < p.rows; ++i)
      if (rows[i] > 0 && rows[i] <= p.queries() && active(rows[i] - 1)) rows_.push_back({i, rows[i] - 1});
    if (rows_.empty()) return;
    for (int32_t i = 0; i < p.keys; ++i) {
      const bool padding = keys[i] <= 0 || keys[i] > p.pixels_of_keys();
      if (padding || active_key(keys[i] - 1)) keys_.push_back({i, padding ? -1 : keys[i] - 1});
    }
  }

  void attend() {
    if (rows_.empty()) return;
    const size_t count = keys_.size();
    q_.resize(p_.dim), k_.resize(count * p_.dim), v_.resize(count * p_.value_dim), scores_.resize(count);
    sums_.resize(p_.value_dim), relative_.resize(p_.row_table ? p_.table_rows + p_.table_columns : 0);
    for (int32_t head = 0; head < p_.heads; ++head) {
      for (size_t i = 0; i < count; ++i) {
        read(p_.k, p_.starts[1], head, p_.dim, keys_[i].pixel, p_.k_fill, &k_[i * p_.dim]);
        read(p_.v, p_.starts[2], head, p_.value_dim, keys_[i].pixel, p_.v_fill, &v_[i * p_.value_dim]);
        if (p_.normalize > 0) normalize(&k_[i * p_.dim]);
      }
      for (const Place& row : rows_) attend_row(head, row);
    }
  }

 private:
  struct Place {
    int32_t at;     // in the window
    int64_t pixel;  // -1: padding
  };

  bool active(int64_t pixel) const {
    const BlockGrid& g = p_.grid;
    const int64_t y = pixel / p_.q.size[3], x = pixel % p_.q.size[3];
    return p_.block_map[(n_ * g.count[0] + y / g.size[0]) * g.count[1] + x / g.size[1]] >= 0;
  }
  bool active_key(int64_t pixel) const {
    return p_.active_keys ? p_.active_keys[n_ * p_.pixels_of_keys() + pixel] != 0 : active(pixel);
  }

  void read(const TensorView& t, int64_t start, int32_t head, int32_t width, int64_t pixel, const void* fill,
            float* to) const {
    if (pixel < 0 && !fill) return static_cast<void>(std::fill_n(to, width, 0.f));
    const T* from = pixel < 0 ? static_cast<const T*>(fill) + int64_t{head} * width
                              : static_cast<const T*>(t.data) + n_ * t.stride[0] +
                                    pixel * WindowAttentionParams::stride(t) + start + int64_t{head} * width;
    for (int32_t d = 0; d < width; ++d) to[d] = to_float(from[d]);
  }

  void normalize(float* row) const {
    const float by = 1.f / std::max(std::sqrt(dot(row, row, p_.dim)), p_.normalize);
    for (int32_t d = 0; d < p_.dim; ++d) row[d] *= by;
  }

  void attend_row(int32_t head, const Place& row) {
    read(p_.q, p_.starts[0], head, p_.dim, row.pixel, nullptr, q_.data());
    const int32_t R = p_.table_rows, C = p_.table_columns;
    if (p_.row_table) {
      const auto of = [&](const void* table, int64_t at) {
        float sum = 0.f;
        for (int32_t d = 0; d < p_.dim; ++d) sum += q_[d] * to_float(static_cast<const T*>(table)[at * p_.dim + d]);
        return sum;
      };
      for (int32_t k = 0; k < R; ++k) relative_[k] = of(p_.row_table, int64_t{row.at / C} * R + k);
      for (int32_t k = 0; k < C; ++k) relative_[R + k] = of(p_.column_table, int64_t{row.at % C} * C + k);
    }
    if (p_.normalize > 0) normalize(q_.data());
    const float factor = p_.scale * (p_.scales.data ? number(p_.scales, head) : 1.f);
    const int64_t bias =
        (((p_.bias_windows > 1 ? window_ : 0) * int64_t{p_.heads} + head) * p_.rows + row.at) * p_.keys;
    float most = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < keys_.size(); ++i) {
      const int32_t at = keys_[i].at;
      float score = factor * dot(q_.data(), &k_[i * p_.dim], p_.dim);
      if (p_.bias.data) score += number(p_.bias, bias + at);
      if (p_.row_table) score += relative_[at / C] + relative_[R + at % C];
      scores_[i] = score, most = std::max(most, score);
    }
    std::fill(sums_.begin(), sums_.end(), 0.f);
    float total = 0.f;
    for (size_t i = 0; i < keys_.size(); ++i) {
      const float weight = most == -std::numeric_limits<float>::infinity() && !(scores_[i] != scores_[i])
                               ? 0.f
                               : std::exp(scores_[i] - most);
      total += weight;
      for (int32_t d = 0; d < p_.value_dim; ++d) sums_[d] += weight * v_[i * p_.value_dim + d];
    }
    T* out = static_cast<T*>(p_.out.data) + n_ * p_.out.stride[0] + row.pixel * WindowAttentionParams::stride(p_.out) +
             int64_t{head} * p_.value_dim;
    for (int32_t d = 0; d < p_.value_dim; ++d) out[d] = from_float<T>(total != 0.f ? sums_[d] / total : 0.f);
  }

  const WindowAttentionParams& p_;
  int64_t n_;
  int32_t window_;
  std::vector<Place> rows_, keys_;
  std::vector<float> q_, k_, v_, scores_, sums_, relative_;
};

template <class T>
Status attend(const WindowAttentionParams& p, const Parallel& parallel) {
  std::atomic<bool> enough{true};
  parallel_for(parallel, p.q.size[0] * p.windows, 1, [&](int64_t begin, int64_t end) {
    try {
      for (int64_t i = begin; i < end; ++i) Window<T>(p, i / p.windows, static_cast<int32_t>(i % p.windows)).attend();
    } catch (const std::bad_alloc&) {
      enough = false;
    }
  });
  SBNET_CHECK(enough, "window_attention: keys: expected memory for those of a window, got none");
  return ok_status();
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_window_attention_cpu(const sbnet::WindowAttentionParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  switch (p->q.dtype) {
    case DType::kF16:
      return attend<Half>(*p, *parallel);
    case DType::kBF16:
      return attend<BFloat16>(*p, *parallel);
    default:
      return attend<float>(*p, *parallel);
  }
}

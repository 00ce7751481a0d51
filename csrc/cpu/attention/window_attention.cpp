// Attention within windows on the CPU: a head of a window of an image at a time, its active rows and keys alone. The
// arithmetic is that of block-sparse attention (attention_kernels.h): 32 rows stay, 64 keys go by.
#include "core/attention/window_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "cpu/attention/attention_kernels.h"
#include "cpu/simd/half.h"

namespace sbnet {
namespace {

constexpr int64_t kLanes = kAttentionLanes, kSteps = kAttentionRows;

float number(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF16:
      return to_float(static_cast<const Half*>(data)[i]);
    case DType::kBF16:
      return to_float(static_cast<const BFloat16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}
float number(const WindowNumbers& n, int64_t i) { return number(n.data, n.dtype, i); }

float dot(const float* a, const float* b, int64_t length) {
  float sum = 0.f;
  for (int64_t d = 0; d < length; ++d) sum += a[d] * b[d];
  return sum;
}

// Rows of heads as float32, [rows, rounded up to 8][padded].
struct Packed {
  int64_t dim, padded;
  std::vector<float> data;
  Packed(int64_t dim, int64_t width) : dim(dim), padded((dim + width - 1) / width * width) {}
  float* row(int64_t i) { return data.data() + i * padded; }
};

class Window {
 public:
  Window(const WindowAttentionParams& p, const AttentionKernels& kernel, int64_t n, int32_t window, int32_t head)
      : p_(p),
        kernel_(kernel),
        n_(n),
        window_(window),
        head_(head),
        q_(p.dim, kernel.width),
        k_(p.dim, kernel.width),
        v_(p.value_dim, kernel.width) {
    const int64_t* rows = p.row_index + int64_t{window} * p.rows;
    const int64_t* keys = p.key_index + int64_t{window} * p.keys;
    for (int32_t i = 0; i < p.rows; ++i)
      if (rows[i] > 0 && rows[i] <= p.queries() && active(rows[i] - 1))
        rows_.push_back(i), row_pixels_.push_back(static_cast<int32_t>(rows[i] - 1));
    if (rows_.empty()) return;
    for (int32_t i = 0; i < p.keys; ++i) {
      const bool padding = keys[i] <= 0 || keys[i] > p.pixels_of_keys();
      if (padding || active_key(keys[i] - 1))
        keys_.push_back(i), key_pixels_.push_back(padding ? -1 : static_cast<int32_t>(keys[i] - 1));
    }
  }

  void attend() {
    if (rows_.empty()) return;
    pack(p_.k, p_.starts[1], key_pixels_.data(), static_cast<int64_t>(keys_.size()), p_.k_fill, &k_);
    pack(p_.v, p_.starts[2], key_pixels_.data(), static_cast<int64_t>(keys_.size()), p_.v_fill, &v_);
    for (size_t i = 0; p_.normalize > 0 && i < keys_.size(); ++i) normalize(k_.row(static_cast<int64_t>(i)));
    lanes_.resize(static_cast<size_t>(p_.dim) * kLanes), scores_.resize(kSteps * kLanes);
    sums_.resize(static_cast<size_t>(kLanes * v_.padded));
    for (size_t first = 0; first < rows_.size(); first += kLanes)
      attend_rows(first, std::min<int64_t>(kLanes, static_cast<int64_t>(rows_.size() - first)));
  }

 private:
  bool active(int64_t pixel) const {
    const BlockGrid& g = p_.grid;
    const int64_t y = pixel / p_.q.size[3], x = pixel % p_.q.size[3];
    return p_.block_map[(n_ * g.count[0] + y / g.size[0]) * g.count[1] + x / g.size[1]] >= 0;
  }
  bool active_key(int64_t pixel) const {
    return p_.active_keys ? p_.active_keys[n_ * p_.pixels_of_keys() + pixel] != 0 : active(pixel);
  }

  // Of pixels; -1 is padding, `fill` or zeros.
  void pack(const TensorView& t, int64_t start, const int32_t* pixels, int64_t count, const void* fill, Packed* to) {
    to->data.resize(static_cast<size_t>((count + 7) / 8 * 8 * to->padded));
    places_.assign(pixels, pixels + count);
    for (int32_t& place : places_) place = std::max(place, 0);
    const int64_t first = n_ * t.stride[0] + start + head_ * to->dim;
    kernel_.pack_rows(p_.q.dtype, static_cast<const char*>(t.data) + first * dtype_size(p_.q.dtype),
                      WindowAttentionParams::stride(t), places_.data(), count, to->dim, to->padded, to->data.data());
    for (int64_t i = 0; i < count; ++i)
      for (int64_t d = 0; pixels[i] < 0 && d < to->dim; ++d)
        to->row(i)[d] = fill ? number(fill, p_.q.dtype, head_ * to->dim + d) : 0.f;
  }

  void normalize(float* row) const {
    const float by = 1.f / std::max(std::sqrt(dot(row, row, p_.dim)), p_.normalize);
    for (int32_t d = 0; d < p_.dim; ++d) row[d] *= by;
  }

  // What tables add to the scores of a row for each row and column of keys.
  void multiply_tables(int32_t at, const float* query, float* to) const {
    const int32_t R = p_.table_rows, C = p_.table_columns;
    for (int32_t k = 0; k < R + C; ++k) {
      const void* table = k < R ? p_.row_table : p_.column_table;
      const int64_t first = (k < R ? int64_t{at / C} * R + k : int64_t{at % C} * C + k - R) * p_.dim;
      float part[8] = {};
      for (int32_t d = 0; d < p_.dim; d += 8)
        for (int32_t i = 0; i < std::min(8, p_.dim - d); ++i)
          part[i] += query[d + i] * number(table, p_.q.dtype, first + d + i);
      to[k] = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    }
  }

  // Scores of some keys [key][lane] become factor * score + what is added to them.
  void add(float factor, size_t first, int64_t lanes, size_t key, int64_t count) {
    const int32_t R = p_.table_rows, C = p_.table_columns;
    for (int64_t l = 0; l < lanes; ++l) {
      const int32_t row = rows_[first + static_cast<size_t>(l)];
      const int64_t bias =
          (((p_.bias_windows > 1 ? window_ : 0) * int64_t{p_.heads} + head_) * p_.rows + row) * p_.keys;
      const float* relative = relative_.data() + l * (R + C);
      for (int64_t i = 0; i < count; ++i) {
        const int32_t at = keys_[key + static_cast<size_t>(i)];
        float& score = scores_[static_cast<size_t>(i * kLanes + l)];
        score *= factor;
        if (p_.bias.data) score += number(p_.bias, bias + at);
        if (p_.row_table) score += relative[at / C] + relative[R + at % C];
      }
    }
  }

  void store(int64_t at, float v) const {
    switch (p_.q.dtype) {
      case DType::kF16:
        static_cast<Half*>(p_.out.data)[at] = from_float<Half>(v);
        return;
      case DType::kBF16:
        static_cast<BFloat16*>(p_.out.data)[at] = from_float<BFloat16>(v);
        return;
      default:
        static_cast<float*>(p_.out.data)[at] = v;
    }
  }

  void attend_rows(size_t first, int64_t lanes) {
    pack(p_.q, p_.starts[0], &row_pixels_[first], lanes, nullptr, &q_);
    const bool added = p_.bias.data || p_.row_table;
    relative_.resize(static_cast<size_t>(lanes) * (p_.row_table ? p_.table_rows + p_.table_columns : 0));
    for (int64_t l = 0; l < lanes; ++l) {
      if (p_.row_table)
        multiply_tables(rows_[first + static_cast<size_t>(l)], q_.row(l),
                        &relative_[static_cast<size_t>(l * (p_.table_rows + p_.table_columns))]);
      if (p_.normalize > 0) normalize(q_.row(l));
    }
    for (int64_t d = 0; d < p_.dim; ++d)
      for (int64_t l = 0; l < kLanes; ++l) lanes_[static_cast<size_t>(d * kLanes + l)] = l < lanes ? q_.row(l)[d] : 0.f;
    alignas(64) float largest[kLanes], total[kLanes];
    std::fill_n(largest, kLanes, -std::numeric_limits<float>::infinity());
    std::fill_n(total, kLanes, 0.f);
    std::fill(sums_.begin(), sums_.end(), 0.f);
    const float factor = p_.scale * (p_.scales.data ? number(p_.scales, head_) : 1.f);
    AttentionStep step = {};
    for (size_t key = 0; key < keys_.size(); key += kSteps) {
      const int64_t at = static_cast<int64_t>(key);
      step.count = std::min<int64_t>(kSteps, static_cast<int64_t>(keys_.size() - key));
      kernel_.multiply(k_.row(at), step.count, lanes_.data(), p_.dim, k_.padded, scores_.data());
      if (added) add(factor, first, lanes, key, step.count);
      kernel_.softmax(step, added ? 1.f : factor, lanes, v_.padded, scores_.data(), largest, total, sums_.data());
      kernel_.accumulate(scores_.data(), v_.row(at), step.count, lanes, v_.padded, sums_.data());
    }
    for (int64_t l = 0; l < lanes; ++l) {
      const int64_t to = n_ * p_.out.stride[0] +
                         row_pixels_[first + static_cast<size_t>(l)] * WindowAttentionParams::stride(p_.out) +
                         int64_t{head_} * p_.value_dim;
      const float by = total[l] != 0.f ? 1.f / total[l] : 0.f;
      const int64_t whole = p_.value_dim / 8 * 8;
      float* sums = &sums_[static_cast<size_t>(l * v_.padded)];
      kernel_.store_lanes(p_.q.dtype, static_cast<char*>(p_.out.data) + to * dtype_size(p_.q.dtype), 0, 1, whole,
                          v_.padded, &by, sums);
      for (int64_t d = whole; d < p_.value_dim; ++d) store(to + d, sums[d] * by);
    }
  }

  const WindowAttentionParams& p_;
  const AttentionKernels& kernel_;
  int64_t n_;
  int32_t window_, head_;
  std::vector<int32_t> rows_, row_pixels_, keys_, key_pixels_, places_;  // places in the window; -1: padding
  Packed q_, k_, v_;
  std::vector<float> lanes_, scores_, sums_, relative_;
};

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_window_attention_cpu(const sbnet::WindowAttentionParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  std::atomic<bool> enough{true};
  const AttentionKernels& kernel = attention_kernels();
  parallel_for(*parallel, size_product({p->q.size[0], p->windows, p->heads}), 1, [&](int64_t begin, int64_t end) {
    try {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t of_image = i / p->heads;
        Window(*p, kernel, of_image / p->windows, static_cast<int32_t>(of_image % p->windows),
               static_cast<int32_t>(i % p->heads))
            .attend();
      }
    } catch (const std::bad_alloc&) {
      enough = false;
    }
  });
  SBNET_CHECK(enough, "window_attention: keys: expected memory for those of a window, got none");
  return ok_status();
}

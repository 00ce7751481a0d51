// Block-sparse attention on the CPU: checks, tasks, threads, and which pairs of a step see each other. The arithmetic
// is in attention_fma.h.
#include "core/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "core/attention/visible.h"
#include "cpu/attention/attention_kernels.h"
#include "cpu/simd/isa.h"

namespace sbnet {

const AttentionKernels& attention_kernels() {
#if defined(__x86_64__)
  if (chosen_isa() >= Isa::kAvx512) return kAttentionKernelsAvx512;
  if (chosen_isa() >= Isa::kAvx2) return kAttentionKernelsAvx2;
#endif
  return kAttentionKernelsGeneric;
}

namespace {

constexpr int64_t kLanes = kAttentionLanes, kRows = kAttentionRows;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
int64_t padded_dim(const AttentionParams& p) {
  return ceil_div(p.head_dim, attention_kernels().width) * attention_kernels().width;
}

// One of the sequences of a batch, for one head and phase.
struct Sequence {
  int64_t b;
  int32_t h, kv_h, phase;
  int32_t q_length, k_length;  // of the phase, without what lies past the sequence's own lengths
  int64_t plane;               // of the layout
  uint32_t dropout_plane;

  Sequence(const AttentionParams& p, int64_t b, int32_t h, int32_t phase)
      : b(b), h(h), kv_h(h / (p.heads / p.kv_heads)), phase(phase), plane(p.layout.plane(b, h)) {
    const int32_t phases = p.layout.rule.phases;
    q_length = phase_length(p.q_lengths, b, p.q_length, phases, phase);
    k_length = phase_length(p.k_lengths, b, p.k_length, phases, phase);
    dropout_plane = static_cast<uint32_t>((b * p.heads + h) * phases + phase);
  }
  // Position i of this phase of a tensor.
  char* at(const AttentionParams& p, const AttentionTensor& t, int32_t head, int64_t i) const {
    const int64_t position = i * p.layout.rule.phases + phase;
    return static_cast<char*>(t.data) +
           (b * t.batch_stride + head * t.head_stride + position * t.stride) * dtype_size(p.dtype);
  }
  // Of [batch, heads, q_length].
  int64_t row(const AttentionParams& p, int64_t i) const {
    return (b * p.heads + h) * p.q_length + i * p.layout.rule.phases + phase;
  }
};

int64_t step_stride(const AttentionParams& p, const AttentionTensor& t) { return t.stride * p.layout.rule.phases; }

// Bit i: is the pair of query q and key k0 + i kept?
uint64_t kept_keys(const AttentionParams& p, const Sequence& s, int32_t q, int32_t k0) {
  uint64_t bits = 0;
  const uint32_t threshold = dropout_threshold(p.dropout.p);
  const uint64_t key = static_cast<uint64_t>(p.dropout.seed[0]), offset = static_cast<uint64_t>(p.dropout.seed[1]);
  for (int32_t octet = 0; octet < 8; ++octet) {
    const PhiloxWords words = dropout_bits(key, offset, s.dropout_plane, q, k0 / 8 + octet);
    for (int32_t i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(!is_dropped(words, i, threshold)) << (octet * 8 + i);
  }
  return bits;
}

uint32_t column_of(const uint64_t* words, int64_t count, int32_t bit) {
  uint32_t column = 0;
  for (int64_t l = 0; l < count; ++l) column |= static_cast<uint32_t>(words[l] >> bit & 1) << l;
  return column;
}

uint32_t first_lanes(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Keys k0 ... k0 + 63 go by, queries q0 ... q0 + lanes - 1 stay. False: they do not see each other.
bool make_key_step(const AttentionParams& p, const Sequence& s, int32_t q0, int64_t lanes, int32_t k0,
                   AttentionStep* step) {
  if (!tile_touched(p.layout, s.plane, q0, static_cast<int32_t>(lanes), k0)) return false;
  uint64_t words[kLanes], kept[kLanes], any = 0, all = ~uint64_t{0};
  for (int64_t l = 0; l < lanes; ++l) {
    const int32_t q = static_cast<int32_t>(q0 + l);
    words[l] = q < s.q_length ? visible_keys(p.layout, s.plane, s.h, q, k0, s.k_length) : 0;
    any |= words[l], all &= words[l];
  }
  step->drops = p.dropout.p > 0;
  for (int64_t l = 0; step->drops && any && l < lanes; ++l) kept[l] = kept_keys(p, s, static_cast<int32_t>(q0 + l), k0);
  step->count = 0, step->masked = false;
  for (int32_t i = 0; i < 64; ++i) {
    if (!(any >> i & 1)) continue;
    const int64_t at = step->count++;
    step->at[at] = k0 + i;
    const bool full = all >> i & 1;
    step->masked = step->masked || !full;
    step->visible[at] = full ? first_lanes(lanes) : column_of(words, lanes, i);
    if (step->drops) step->kept[at] = column_of(kept, lanes, i);
  }
  return any != 0;
}

// Queries q0 ... q0 + 63 go by, keys k0 ... k0 + lanes - 1 stay.
bool make_query_step(const AttentionParams& p, const Sequence& s, int32_t q0, int32_t k0, int64_t lanes,
                     AttentionStep* step) {
  const int32_t tile = k0 / kAttentionTile * kAttentionTile, shift = k0 - tile;
  const int32_t rows = std::min<int32_t>(kRows, s.q_length - q0);
  if (rows <= 0 || !tile_touched(p.layout, s.plane, q0, rows, tile)) return false;
  const uint32_t whole = first_lanes(lanes);
  step->count = 0, step->masked = false, step->drops = p.dropout.p > 0;
  for (int32_t q = q0; q < q0 + rows; ++q) {
    const uint64_t word = visible_keys(p.layout, s.plane, s.h, q, tile, s.k_length);
    const uint32_t bits = static_cast<uint32_t>(word >> shift) & whole;
    if (!bits) continue;
    const int64_t at = step->count++;
    step->at[at] = q;
    step->visible[at] = bits;
    step->masked = step->masked || bits != whole;
    if (step->drops) step->kept[at] = static_cast<uint32_t>(kept_keys(p, s, q, tile) >> shift);
  }
  return step->count > 0;
}

// What a worker needs. Keys are the lanes for dK and dV, else queries; `first` and `second` are what products take.
struct Scratch {
  float *first_lanes, *second_lanes;  // [dim][32]: q and dO, or k and v
  float *first_rows, *second_rows;    // [64][padded]: k and v, or q and dO
  float *scores, *grads;              // [64][32]
  float *first_sums, *second_sums;    // [32][padded]: out or dQ; dK and dV
  float *largest, *total;             // [32]
  AttentionRow* queries;              // [64]

  static int64_t bytes(const AttentionParams& p) {
    const int64_t padded = padded_dim(p);
    return 4 * (2 * kLanes * p.head_dim + 2 * kRows * padded + 2 * kRows * kLanes + 2 * kLanes * padded + 2 * kLanes) +
           lines(kRows * static_cast<int64_t>(sizeof(AttentionRow)));
  }
  Scratch(const AttentionParams& p, char* at) {
    const int64_t padded = padded_dim(p);
    float* f = reinterpret_cast<float*>(at);
    const auto take = [&](int64_t count) { return (f += count) - count; };
    first_lanes = take(kLanes * p.head_dim), second_lanes = take(kLanes * p.head_dim);
    first_rows = take(kRows * padded), second_rows = take(kRows * padded);
    scores = take(kRows * kLanes), grads = take(kRows * kLanes);
    first_sums = take(kLanes * padded), second_sums = take(kLanes * padded);
    largest = take(kLanes), total = take(kLanes);
    queries = reinterpret_cast<AttentionRow*>(f);
  }
};

// The rows of a step, of the two tensors that products take, and the products with the first lanes.
void multiply_step(const AttentionParams& p, const Sequence& s, int32_t head, const AttentionTensor& first,
                   const AttentionTensor& second, const AttentionStep& step, const Scratch& w) {
  const AttentionKernels& kernel = attention_kernels();
  const int64_t padded = padded_dim(p);
  const auto pack = [&](const AttentionTensor& t, float* to) {
    kernel.pack_rows(p.dtype, s.at(p, t, head, 0), step_stride(p, t), step.at, step.count, p.head_dim, padded, to);
  };
  pack(first, w.first_rows);
  pack(second, w.second_rows);
  kernel.multiply(w.first_rows, step.count, w.first_lanes, p.head_dim, padded, w.scores);
}

// body(step) of the keys and values that queries q0 ... q0 + lanes - 1 see, some at a time.
template <class F>
void for_key_steps(const AttentionParams& p, const Sequence& s, int32_t q0, int64_t lanes, const Scratch& w,
                   const F& body) {
  AttentionStep step;
  for (int32_t k0 = 0; k0 < s.k_length; k0 += kRows) {
    if (!make_key_step(p, s, q0, lanes, k0, &step)) continue;
    multiply_step(p, s, s.kv_h, p.k, p.v, step, w);
    body(step);
  }
}

void forward_tile(const AttentionParams& p, const Sequence& s, int32_t q0, const Scratch& w) {
  const AttentionKernels& kernel = attention_kernels();
  const int64_t padded = padded_dim(p), dim = p.head_dim;
  const int64_t lanes = std::min<int64_t>(kLanes, p.phase_q_length() - q0);
  kernel.pack_lanes(p.dtype, s.at(p, p.q, s.h, q0), step_stride(p, p.q), std::clamp<int64_t>(s.q_length - q0, 0, lanes),
                    dim, w.first_lanes);
  std::fill_n(w.first_sums, kLanes * padded, 0.0f);
  std::fill_n(w.largest, kLanes, -std::numeric_limits<float>::infinity());
  std::fill_n(w.total, kLanes, 0.0f);
  for_key_steps(p, s, q0, lanes, w, [&](const AttentionStep& step) {
    kernel.softmax(step, p.scale, lanes, padded, w.scores, w.largest, w.total, w.first_sums);
    kernel.accumulate(w.scores, w.second_rows, step.count, lanes, padded, w.first_sums);
  });
  float factors[kLanes];
  for (int64_t l = 0; l < lanes; ++l) {
    const float total = w.total[l];
    const int64_t row = s.row(p, q0 + l);
    factors[l] = total == 0 ? 0 : 1 / (total * (1 - p.dropout.p));
    if (p.lse) p.lse[row] = total == 0 ? -std::numeric_limits<float>::infinity() : w.largest[l] + std::log(total);
    if (p.sums) p.sums[2 * row] = w.largest[l], p.sums[2 * row + 1] = total;
  }
  kernel.store_lanes(p.dtype, s.at(p, p.out, s.h, q0), step_stride(p, p.out), lanes, dim, padded, factors,
                     w.first_sums);
}

AttentionRow query_row(const AttentionParams& p, const Sequence& s, const float* deltas, int64_t q) {
  const int64_t row = s.row(p, q);
  const float largest = p.sums ? p.sums[2 * row] : p.lse[row], total = p.sums ? p.sums[2 * row + 1] : 1.0f;
  return {std::isinf(largest) && largest < 0 ? 0.0f : largest, total == 0 ? 0.0f : 1 / total, deltas[row]};
}

// deltas[b, h, q] = sum of grad_out * out - grad_lse
void make_deltas(const AttentionBackwardParams& b, float* deltas, const Parallel& parallel) {
  const AttentionParams& p = b.forward;
  const int64_t size = dtype_size(p.dtype);
  parallel_for(parallel, p.batch * p.heads * p.q_length, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t q = i % p.q_length, h = i / p.q_length % p.heads, n = i / p.q_length / p.heads;
      const auto at = [&](const AttentionTensor& t) {
        return static_cast<const char*>(t.data) + (n * t.batch_stride + h * t.head_stride + q * t.stride) * size;
      };
      deltas[i] =
          attention_kernels().dot(p.dtype, at(b.grad_out), at(p.out), p.head_dim) - (b.grad_lse ? b.grad_lse[i] : 0);
    }
  });
}

void store_lanes(const AttentionParams& p, const AttentionTensor& t, void* to, int64_t lanes, float factor,
                 const float* sums) {
  float factors[kLanes];
  std::fill_n(factors, kLanes, factor);
  attention_kernels().store_lanes(p.dtype, to, step_stride(p, t), lanes, p.head_dim, padded_dim(p), factors, sums);
}

void query_grad_tile(const AttentionBackwardParams& b, const Sequence& s, int32_t q0, const float* deltas,
                     const Scratch& w) {
  const AttentionParams& p = b.forward;
  const AttentionKernels& kernel = attention_kernels();
  const int64_t padded = padded_dim(p), dim = p.head_dim;
  const int64_t lanes = std::min<int64_t>(kLanes, p.phase_q_length() - q0);
  const int64_t used = std::clamp<int64_t>(s.q_length - q0, 0, lanes);
  kernel.pack_lanes(p.dtype, s.at(p, p.q, s.h, q0), step_stride(p, p.q), used, dim, w.first_lanes);
  kernel.pack_lanes(p.dtype, s.at(p, b.grad_out, s.h, q0), step_stride(p, b.grad_out), used, dim, w.second_lanes);
  for (int64_t l = 0; l < kLanes; ++l)
    w.queries[l] = l < used ? query_row(p, s, deltas, q0 + l) : AttentionRow{0, 0, 0};
  std::fill_n(w.first_sums, kLanes * padded, 0.0f);
  for_key_steps(p, s, q0, lanes, w, [&](const AttentionStep& step) {
    kernel.multiply(w.second_rows, step.count, w.second_lanes, dim, padded, w.grads);
    kernel.softmax_grad(step, p.scale, 1 / (1 - p.dropout.p), true, w.queries, w.scores, w.grads);
    kernel.accumulate(w.grads, w.first_rows, step.count, lanes, padded, w.first_sums);
  });
  store_lanes(p, b.grad_q, s.at(p, b.grad_q, s.h, q0), lanes, p.scale, w.first_sums);
}

// Of the keys of sequence `s` (any query head of the group) from k0 on: summed over the group.
void key_grad_tile(const AttentionBackwardParams& b, const Sequence& s, int32_t k0, const float* deltas,
                   const Scratch& w) {
  const AttentionParams& p = b.forward;
  const AttentionKernels& kernel = attention_kernels();
  const int64_t padded = padded_dim(p), dim = p.head_dim;
  const int64_t lanes = std::min<int64_t>(kLanes, p.phase_k_length() - k0);
  const int64_t used = std::clamp<int64_t>(s.k_length - k0, 0, lanes);
  kernel.pack_lanes(p.dtype, s.at(p, p.k, s.kv_h, k0), step_stride(p, p.k), used, dim, w.first_lanes);
  kernel.pack_lanes(p.dtype, s.at(p, p.v, s.kv_h, k0), step_stride(p, p.v), used, dim, w.second_lanes);
  std::fill_n(w.first_sums, kLanes * padded, 0.0f);
  std::fill_n(w.second_sums, kLanes * padded, 0.0f);
  const int32_t group = p.heads / p.kv_heads;
  AttentionStep step;
  for (int32_t h = s.kv_h * group; h < (s.kv_h + 1) * group; ++h) {
    const Sequence of(p, s.b, h, s.phase);
    for (int32_t q0 = 0; used && q0 < of.q_length; q0 += kRows) {
      if (!make_query_step(p, of, q0, k0, lanes, &step)) continue;
      for (int64_t i = 0; i < step.count; ++i) w.queries[i] = query_row(p, of, deltas, step.at[i]);
      multiply_step(p, of, h, p.q, b.grad_out, step, w);
      kernel.multiply(w.second_rows, step.count, w.second_lanes, dim, padded, w.grads);
      kernel.softmax_grad(step, p.scale, 1 / (1 - p.dropout.p), false, w.queries, w.scores, w.grads);
      kernel.accumulate(w.grads, w.first_rows, step.count, lanes, padded, w.first_sums);
      kernel.accumulate(w.scores, w.second_rows, step.count, lanes, padded, w.second_sums);
    }
  }
  store_lanes(p, b.grad_k, s.at(p, b.grad_k, s.kv_h, k0), lanes, p.scale, w.first_sums);
  store_lanes(p, b.grad_v, s.at(p, b.grad_v, s.kv_h, k0), lanes, 1, w.second_sums);
}

// Each worker owns a scratch area and takes tiles until none is left, last ones first: under a causal rule they are the
// longest.
template <class F>
void run_tiles(const AttentionParams& p, int64_t length, int32_t heads, char* workspace, const Parallel& parallel,
               const F& body) {
  int64_t* next = new (workspace) int64_t{0};
  const int64_t tiles = ceil_div(length, kLanes), phases = p.layout.rule.phases;
  const int64_t sequences = p.batch * heads * phases, bytes = lines(Scratch::bytes(p));
  parallel_for(parallel, std::max(parallel.threads, 1), 1, [&](int64_t begin, int64_t) {
    const Scratch scratch(p, workspace + 64 + begin * bytes);
    for (;;) {
      const int64_t task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
      if (task >= tiles * sequences) return;
      const int64_t tile = tiles - 1 - task / sequences, i = task % sequences;
      body(i / phases / heads, static_cast<int32_t>(i / phases % heads), static_cast<int32_t>(i % phases),
           static_cast<int32_t>(tile * kLanes), scratch);
    }
  });
}

int64_t scratch_bytes(const AttentionParams& p, int32_t threads) {
  return 64 + std::max(threads, 1) * lines(Scratch::bytes(p));
}
int64_t delta_bytes(const AttentionParams& p) { return lines(p.batch * p.heads * p.q_length * 4); }

void backward(const AttentionBackwardParams& b, char* workspace, const Parallel& parallel) {
  const AttentionParams& p = b.forward;
  float* deltas = reinterpret_cast<float*>(workspace);
  workspace += delta_bytes(p);
  make_deltas(b, deltas, parallel);
  run_tiles(p, p.phase_q_length(), p.heads, workspace, parallel,
            [&](int64_t n, int32_t h, int32_t phase, int32_t q0, const Scratch& scratch) {
              query_grad_tile(b, Sequence(p, n, h, phase), q0, deltas, scratch);
            });
  run_tiles(p, p.phase_k_length(), p.kv_heads, workspace, parallel,
            [&](int64_t n, int32_t h, int32_t phase, int32_t k0, const Scratch& scratch) {
              key_grad_tile(b, Sequence(p, n, h * (p.heads / p.kv_heads), phase), k0, deltas, scratch);
            });
}

}  // namespace
}  // namespace sbnet

extern "C" {

int64_t sbnet_block_attention_workspace_bytes_cpu(const sbnet::AttentionParams* p, int32_t threads) {
  return sbnet::validate(*p).ok() ? sbnet::scratch_bytes(*p, threads) : 0;
}

sbnet::Status sbnet_block_attention_cpu(const sbnet::AttentionParams* p, void* workspace,
                                        const sbnet::Parallel* parallel) {
  using namespace sbnet;
  SBNET_TRY(validate(*p));
  run_tiles(*p, p->phase_q_length(), p->heads, static_cast<char*>(workspace), *parallel,
            [&](int64_t n, int32_t h, int32_t phase, int32_t q0, const Scratch& scratch) {
              forward_tile(*p, Sequence(*p, n, h, phase), q0, scratch);
            });
  return ok_status();
}

int64_t sbnet_block_attention_backward_workspace_bytes_cpu(const sbnet::AttentionBackwardParams* p, int32_t threads) {
  using namespace sbnet;
  return validate(*p).ok() ? delta_bytes(p->forward) + scratch_bytes(p->forward, threads) : 0;
}

sbnet::Status sbnet_block_attention_backward_cpu(const sbnet::AttentionBackwardParams* p, void* workspace,
                                                 const sbnet::Parallel* parallel) {
  SBNET_TRY(sbnet::validate(*p));
  sbnet::backward(*p, static_cast<char*>(workspace), *parallel);
  return sbnet::ok_status();
}
}

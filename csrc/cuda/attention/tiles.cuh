// Tiles of the attention kernels on tensor cores, for heads of at most kDim = 64 or 128 features: rows of kDim halves
// in shared memory, their words of 16 bytes permuted by the row (xor of the lowest three bits), so that ldmatrix meets
// no bank twice. A warp has 32 rows of the side that stays: two operands of 16, so that each fragment of the other side
// is used twice. Lane l has rows l/4, l/4 + 8, ... and columns 2(l%4) and the next of every 8.
#pragma once
#include "cuda/attention/portable.cuh"
#include "cuda/products.cuh"

namespace sbnet::portable {

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;
constexpr int kWarpRows = 32;

template <class T>
__device__ __forceinline__ uint32_t pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pair<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <>
__device__ __forceinline__ uint32_t pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// Bytes from a tile's start to word `word` of a row. That of word + 2d is this ^ (d << 5).
template <int kDim>
__device__ __forceinline__ uint32_t word_at(int row, int word) {
  return row * (kDim * 2) + ((word ^ (row & 7)) << 4);
}
// Of a lane, for ldmatrix: of a left operand's 16 rows; of 16 rows that are columns of a product; of 16 rows that are
// its reduction (transposed).
template <int kDim>
__device__ __forceinline__ uint32_t left_at(int row) {
  return word_at<kDim>(row + threadIdx.x % 16, threadIdx.x % 32 / 16);
}
template <int kDim>
__device__ __forceinline__ uint32_t columns_at() {
  const int lane = threadIdx.x % 32;
  return word_at<kDim>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// What a thread copies of tiles of kRows rows: every kPass-th row, 16 bytes of it.
template <int kDim, int kRows, int kThreads>
struct TileCopy {
  static constexpr int kWords = kDim / 8, kPass = kThreads / kWords;
  static_assert(kRows % kPass == 0 && kThreads % kWords == 0);
  const uint8_t* from;
  int64_t row_bytes, pass;  // from a row to the next, and to the next of this thread's
  uint32_t to[kPass % 8 ? 2 : 1];
  int dim, least;  // rows that a tile must have to be copied without a test

  // stride: elements from a row to the next
  __device__ TileCopy(const void* base, int64_t stride, int dim) : dim(dim), least(dim == kDim ? kRows : INT32_MAX) {
    const int row = threadIdx.x / kWords, word = threadIdx.x % kWords;
    row_bytes = 2 * stride, pass = kPass * row_bytes;
    from = static_cast<const uint8_t*>(base) + row * row_bytes + word * 16;
    to[0] = word_at<kDim>(row, word);
    if constexpr (kPass % 8 != 0) to[1] = word_at<kDim>(row + kPass, word) - kPass * kDim * 2;
  }
  // Rows from `first` on, of which `count` are there; zeros for the others, and for columns from `dim` on.
  __device__ __forceinline__ void operator()(uint32_t shared, int first, int count) const {
    const uint8_t* at = from + first * row_bytes;
    if (count >= least) {
#pragma unroll
      for (int i = 0; i < kRows / kPass; ++i, at += pass)
        copy_16(shared + to[kPass % 8 ? i % 2 : 0] + i * kPass * kDim * 2, at);
    } else {
      const int left =
          static_cast<int>(threadIdx.x % kWords) * 8 < dim ? count - static_cast<int>(threadIdx.x / kWords) : 0;
#pragma unroll
      for (int i = 0; i < kRows / kPass; ++i, at += pass) {
        const bool in = i * kPass < left;
        cp_async_16(shared + to[kPass % 8 ? i % 2 : 0] + i * kPass * kDim * 2, in ? at : from, in);
      }
    }
  }
};

// A warp's 32 rows of a result, kDim columns, through its own rows of shared memory, so that stores are 16 bytes wide:
// `rows` of them are there, `words` words of each. factor(i): of row i of this lane's, 0 ... 3; 0 makes zeros of
// anything.
template <class T, int kDim, class Factor>
__device__ __forceinline__ void store_rows(const float (&sums)[2][kDim / 8][4], const Factor& factor, uint8_t* mine,
                                           T* to, int64_t stride, int rows, int words) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float f = factor(m * 2 + r);
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const float (&v)[4] = sums[m][j];
        *reinterpret_cast<uint32_t*>(mine + word_at<kDim>(m * 16 + r * 8 + lane / 4, j) + lane % 4 * 4) =
            f == 0.f ? 0u : pair<T>(v[2 * r] * f, v[2 * r + 1] * f);
      }
    }
  __syncwarp();
  for (int i = lane; i < kWarpRows * (kDim / 8); i += 32) {
    const int r = i / (kDim / 8), c = i % (kDim / 8);
    if (r < rows && c < words)
      *reinterpret_cast<uint4*>(to + r * stride + c * 8) = *reinterpret_cast<const uint4*>(mine + word_at<kDim>(r, c));
  }
  __syncwarp();
}

// Which steps of kMet positions of the other side the CTA's kOwn positions meet, one after the other: as bits in shared
// memory, made by all of its warps, each of which walks over them for itself. kOfKeys: keys stay, queries of heads
// s.h ... head_end - 1 are met. Every thread calls; there are barriers.
constexpr int kNoStep = -1, kStepWords = 128, kStepBytes = kStepWords * 8;
template <int kOwn, int kMet, bool kOfKeys, int kWarps>
class Steps {
 public:
  __device__ __forceinline__ Steps(const AttentionParams& p, const AttentionSequence& s, int own, int head_end,
                                   uint8_t* shared)
      : p_(p), s_(s), own_(own), head_(s.h), words_(reinterpret_cast<uint2*>(shared)) {
    const AttentionRule& r = p.layout.rule;
    int64_t first = 0, last;
    if constexpr (kOfKeys) {
      last = own < s.k_length ? s.q_length : 0;
      if (own >= r.prefix) first = int64_t{own} - r.diagonal;
      if (r.band != kNoBand && !r.stride) last = min(last, int64_t{own} + kOwn - 1 - r.diagonal + r.band);
    } else {
      first = key_range(r, own, s.k_length).first;
      last = own < s.q_length ? key_range(r, own + kOwn - 1, s.k_length).last + 1 : 0;
    }
    begin_ = static_cast<int>(max(first, int64_t{0}) / kMet * kMet), end_ = static_cast<int>(last);
    per_head_ = begin_ < end_ ? (end_ - begin_ + 32 * kMet - 1) / (32 * kMet) : 0;
    words_in_all_ = per_head_ * (head_end - s.h);
    at_ = begin_ - 32 * kMet;
  }
  // The first position; plus 1 where every pair of positions is visible, and kept for sure.
  __device__ __forceinline__ int next() {
    while (!left_) {
      if (word_ + 1 >= words_in_all_) return kNoStep;
      if ((++word_ & (kStepWords - 1)) == 0) look();
      at_ += 32 * kMet;
      if (at_ >= end_) at_ = begin_, ++head_;
      const uint2 word = words_[word_ & (kStepWords - 1)];
      left_ = word.x, whole_ = word.y;
    }
    const int bit = __ffs(left_) - 1;
    left_ &= left_ - 1;
    return at_ + bit * kMet + static_cast<int>(whole_ >> bit & 1);
  }
  __device__ __forceinline__ int head() const { return head_; }

 private:
  __device__ __forceinline__ void look() {
    const AttentionLayout& l = p_.layout;
    __syncthreads();
    for (int i = threadIdx.x / 32; i < min(kStepWords, words_in_all_ - word_); i += kWarps) {
      const int h = s_.h + (word_ + i) / per_head_, lane = threadIdx.x % 32;
      const int at = begin_ + ((word_ + i) % per_head_ * 32 + lane) * kMet;
      const int64_t plane = l.plane(s_.b, h), mask_plane = l.heads > 1 ? h : 0;
      Pairs pairs = {false, false};
      if (at < end_)
        pairs = kOfKeys ? pairs_of(l, plane, mask_plane, at, kMet, s_.q_length, own_, kOwn, s_.k_length)
                        : pairs_of(l, plane, mask_plane, own_, kOwn, s_.q_length, at, kMet, s_.k_length);
      const uint32_t some = __ballot_sync(~0u, pairs.any);
      const uint32_t whole = __ballot_sync(~0u, pairs.any && pairs.all && p_.dropout.p == 0.f);
      if (lane == 0) words_[i] = make_uint2(some, whole);
    }
    __syncthreads();
  }

  const AttentionParams& p_;
  const AttentionSequence& s_;
  int own_, head_, begin_, end_, at_, per_head_, words_in_all_, word_ = -1;
  uint32_t left_ = 0, whole_ = 0;  // steps of a word that are still to come; those that need no mask
  uint2* words_;
};

}  // namespace sbnet::portable

// Copies of short runs, and stores that go past the caches. A plain store to a line that is not in the cache reads the
// line first: a third of the traffic of a copy. Going past is worth it where whole lines are written and too much of
// them to be found in the cache afterwards. Included by kernels of each instruction set; see isa.h for why all is
// static.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SBNET_INLINE static inline __attribute__((always_inline))

namespace sbnet {
namespace SBNET_ISA {

constexpr int64_t kLine = 64;

SBNET_INLINE bool is_line(const void* p) { return reinterpret_cast<uintptr_t>(p) % kLine == 0; }

// One whole line, to an address that is_line. All of it in one store, where there is one, fills no write buffer
// halfway.
SBNET_INLINE void stream_line(void* out, const void* in) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(out), _mm512_loadu_si512(in));
#elif defined(__x86_64__)
  const __m128i* from = static_cast<const __m128i*>(in);
  for (int k = 0; k < 4; ++k) _mm_stream_si128(static_cast<__m128i*>(out) + k, _mm_loadu_si128(from + k));
#else
  __builtin_memcpy(out, in, kLine);
#endif
}

// A block's rows are short: a call of memcpy for each would take longer than the copy.
SBNET_INLINE void copy_short(char* out, const char* in, int64_t bytes) {
  if (bytes < 16 || bytes > 512) {
    __builtin_memcpy(out, in, static_cast<size_t>(bytes));
    return;
  }
  int64_t at = 0;
  for (; at + 16 <= bytes; at += 16) __builtin_memcpy(out + at, in + at, 16);
  __builtin_memcpy(out + bytes - 16, in + bytes - 16, 16);
}

// kStream: where that writes whole lines, and not just one of three, they go past the caches, the ends do not.
template <bool kStream>
SBNET_INLINE void copy_run(char* out, const char* in, int64_t bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(out) & (kLine - 1);
  if (!kStream || (bytes < 4 * kLine && (head || bytes % kLine))) return copy_short(out, in, bytes);
  if (head) copy_short(out, in, head);
  int64_t at = head;
  for (; at + kLine <= bytes; at += kLine) stream_line(out + at, in + at);
  if (at < bytes) copy_short(out + at, in + at, bytes - at);
}

// Streamed stores of this thread are visible to those that it tells of its end.
SBNET_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace SBNET_ISA
}  // namespace sbnet

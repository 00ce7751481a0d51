// Stores that go past the caches. A plain store to a line that is not in the cache reads the line first: a third of the
// traffic of a copy. Worth it where whole lines are written and too much of them to be found in the cache afterwards.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace sbnet {

constexpr int64_t kLine = 64;
constexpr int64_t kStreamBytes = 32 << 20;  // written by one call

inline bool is_line(const void* p) { return reinterpret_cast<uintptr_t>(p) % kLine == 0; }

// One whole line.
inline void stream_line(void* out, const void* in) {
#if defined(__x86_64__)
  const __m128i* from = static_cast<const __m128i*>(in);
  for (int k = 0; k < 4; ++k) _mm_stream_si128(static_cast<__m128i*>(out) + k, _mm_loadu_si128(from + k));
#else
  std::memcpy(out, in, kLine);
#endif
}

// Lines that are written whole go past the caches, the ends do not.
inline void stream_copy(char* out, const char* in, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t head = -reinterpret_cast<intptr_t>(out) & (kLine - 1);
  if (head + kLine > bytes) {
    std::memcpy(out, in, static_cast<size_t>(bytes));
    return;
  }
  if (head) std::memcpy(out, in, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kLine <= bytes; at += kLine) stream_line(out + at, in + at);
  if (at < bytes) std::memcpy(out + at, in + at, static_cast<size_t>(bytes - at));
#else
  std::memcpy(out, in, static_cast<size_t>(bytes));
#endif
}

// Streamed stores of this thread are visible to whoever it tells of its end.
inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace sbnet

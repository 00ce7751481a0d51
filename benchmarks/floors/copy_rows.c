/* What the memory accesses of block copies cost by themselves, one thread: plain loops that move a tile between a
 * buffer in the L1 cache and a map of NCHW rows, or a stack of blocks, and do nothing else. A transposed copy makes the
 * accesses of two of them: it takes as long as the slower one at least, and as both where they do not overlap.
 *
 *   cc -O3 -march=native benchmarks/floors/copy_rows.c -o /tmp/copy_rows && /tmp/copy_rows
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  H = 800,
  W = 704,
  LINE = 16,
  GROUP = 8,
  ROUNDS = 5
}; /* LINE: channels of 64 bytes; GROUP: neighbouring blocks */

static float tile[LINE * 18 * 18];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

#define INLINE static inline __attribute__((always_inline))

INLINE void move(float* memory, float* buffer, int floats, int write) {
  memcpy(write ? memory : buffer, write ? buffer : memory, 4 * floats);
}

/* Rows of b floats of an NCHW map; neighbouring blocks take turns at each channel: they share pages and lines. */
INLINE void map_rows(float* map, int channels, int b, int write) {
  const long across = W / b, blocks = H / b * across;
  for (long first = 0; first < blocks; first += GROUP)
    for (int c = 0; c < channels; ++c)
      for (long s = first; s < first + GROUP && s < blocks; ++s)
        for (int r = 0; r < b; ++r)
          move(map + ((long)c * H + s / across * b + r) * W + s % across * b, tile + r * b, b, write);
}

/* A stack of [block][pixel][channel] by lines of 16 channels: what a transpose to or from the order above asks of it.
 */
INLINE void stack_lines(float* stack, int channels, int b, int write) {
  const long blocks = H / b * (W / b), pixels = (long)b * b;
  for (long first = 0; first < blocks; first += GROUP)
    for (int c = 0; c < channels; c += LINE)
      for (long s = first; s < first + GROUP && s < blocks; ++s)
        for (long p = 0; p < pixels; ++p) move(stack + (s * pixels + p) * channels + c, tile + p * LINE, LINE, write);
}

/* The same stack, or one of [block][channel][pixel], from its beginning to its end. */
INLINE void stack_in_order(float* stack, int channels, int b, int write) {
  const long blocks = H / b * (W / b), floats = (long)b * b * LINE;
  for (long s = 0; s < blocks * channels / LINE; ++s) move(stack + s * floats, tile, floats, write);
}

#define BEST(ms, run)                            \
  double ms = 1e9;                               \
  for (int round = 0; round < ROUNDS; ++round) { \
    const double start = now();                  \
    run;                                         \
    const double took = now() - start;           \
    if (took < ms) ms = took;                    \
  }

INLINE void measure(int channels, int b) {
  const size_t bytes = 4l * channels * (H / b * b) * (W / b * b);
  float *map = malloc(4l * channels * H * W), *stack = malloc(bytes), *other = malloc(bytes);
  if (!map || !stack || !other) exit(1);
  memset(map, 1, 4l * channels * H * W), memset(stack, 1, bytes), memset(other, 1, bytes);
  BEST(copy, memcpy(other, stack, bytes))
  printf("%3d channels, blocks of %dx%d: copy %.1f ms\n", channels, b, b, copy);
  for (int write = 0; write < 2; ++write) {
    BEST(rows, map_rows(map, channels, b, write))
    BEST(lines, stack_lines(stack, channels, b, !write))
    BEST(ordered, stack_in_order(stack, channels, b, !write))
    printf("  %s: map rows %.1f ms, stack in order %.1f, by lines %.1f\n", write ? "scatter" : "gather ", rows, ordered,
           lines);
  }
  free(map), free(stack), free(other);
}

int main(void) {
  measure(64, 16), measure(64, 18), measure(256, 16), measure(256, 18);
  return 0;
}

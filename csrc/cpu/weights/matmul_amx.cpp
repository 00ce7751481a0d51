// Products with block-sparse weights in float16 and bfloat16 with AMX matrix registers: 16 rows x 16 outputs x 32
// input features a product, 16 with blocks of 16; sums in float32. Compiled like matmul_avx512.cpp.
#if defined(SBNET_AMX)
#define SBNET_ISA matmul_amx
#define SBNET_LANES 16
#define SBNET_VECTORS 2
#define SBNET_GROUP 16
#include "cpu/simd/tiles.h"
#include "cpu/weights/matmul_pairs.h"

namespace sbnet {
namespace SBNET_ISA {

static_assert(kGroup == kTileRows, "a group of rows is a register");

// Few rows are one group of as many.
SBNET_INLINE int64_t panel_height(int64_t rows, int64_t) { return smaller(rows, kGroup); }

// G groups of `height` rows, `features` of x apart, x V vectors of outputs. Registers 0..3: sums of (group, vector) in
// that order; 4, 5: inputs; 6, 7: weights.
template <class T, int G, int V>
static __attribute__((noinline)) void add_tiles(const Entries<T>& entries, const T* panel, int64_t features,
                                                int64_t height, int64_t size, float* sums, bool first) {
  constexpr int64_t kStep = V * kLanes, kSumBytes = V * kLanes * 4, kInputBytes = kStep * sizeof(T);
  constexpr int64_t kWeights = kStep * kLanes;
  const auto at = [=](int i) { return sums + i / V * kGroup * V * kLanes + i % V * kLanes; };
  begin_sums<G * V>(at, kSumBytes, first);
  const int64_t apart = kGroup * features;
  for (int64_t e = 0; e < entries.count; ++e) {
    const T *x = panel + entries.first[e] * height, *w = entries.w[e];
    for (int64_t c = 0; c < size; c += kStep, x += height * kStep, w += V * kWeights) {
      SBNET_TILE_LOAD(4, x, kInputBytes);
      SBNET_TILE_LOAD(6, w, kTileBytes);
      SBNET_TILE_DOT(T, 0, 4, 6);
      if constexpr (V == 2) {
        SBNET_TILE_LOAD(7, w + kWeights, kTileBytes);
        SBNET_TILE_DOT(T, 1, 4, 7);
      }
      if constexpr (V == 2 && G == 2) {
        SBNET_TILE_LOAD(5, x + apart, kInputBytes);
        SBNET_TILE_DOT(T, 2, 5, 6);
        SBNET_TILE_DOT(T, 3, 5, 7);
      }
      if constexpr (G == 4) {
        SBNET_TILE_LOAD(5, x + apart, kInputBytes);
        SBNET_TILE_DOT(T, 1, 5, 6);
        SBNET_TILE_LOAD(4, x + 2 * apart, kInputBytes);
        SBNET_TILE_DOT(T, 2, 4, 6);
        SBNET_TILE_LOAD(5, x + 3 * apart, kInputBytes);
        SBNET_TILE_DOT(T, 3, 5, 6);
      }
    }
  }
  store_sums<G * V>(at, kSumBytes);
}

template <class T, int V>
static void multiply_rows(const MatmulTask& task, const Entries<T>& entries, int64_t size, int64_t features,
                          float* sums, bool first) {
  constexpr int kMost = V == 2 ? 2 : 4;
  const int64_t height = panel_height(task.rows, 0), groups = (task.rows + kGroup - 1) / kGroup;
  for (int64_t g = 0; g < groups;) {
    const T* panel = static_cast<const T*>(task.x) + g * kGroup * features;
    float* to = sums + g * kGroup * V * kLanes;
    if (groups - g >= kMost) {
      add_tiles<T, kMost, V>(entries, panel, features, height, size, to, first);
      g += kMost;
    } else {
      add_tiles<T, 1, V>(entries, panel, features, height, size, to, first);
      ++g;
    }
  }
}

static void pack_weights(const BlocksparseMatmulParams& p, void* packed, int64_t begin, int64_t end) {
  if (p.x.dtype == DType::kF16)
    pack_weights_of(p, static_cast<Half*>(packed), begin, end);
  else
    pack_weights_of(p, static_cast<BFloat*>(packed), begin, end);
}

static void multiply(const BlocksparseMatmulParams& p, const MatmulTask& task) {
  const TileShapes shapes = tile_shapes(panel_height(task.rows, 0), step_features(p.layout.shape.block_size) * 2);
  SBNET_TILE_CONFIGURE(shapes);
  if (p.x.dtype == DType::kF16)
    multiply_of<Half>(p, task);
  else
    multiply_of<BFloat>(p, task);
  SBNET_TILE_RELEASE();
}

// ---- Weight gradient: sums of 16 input x 16 output features, a product is 32 rows. x lies turned,
// [step][feature][row].

constexpr int64_t kStepRows = 32;

template <class T>
static void pack_turned(const TensorView& t, const int64_t* rows, int64_t count, int64_t f, int64_t size, T* to) {
  alignas(64) T step[kStepRows * kMostBlock];
  for (int64_t i = 0; i < count; i += kStepRows, to += kStepRows * size) {
    pack_row_pairs(t, rows + i, kStepRows, f, size, step);
    for (int64_t c = 0; c < size; ++c)
      for (int64_t r = 0; r < kStepRows; r += 2)
        __builtin_memcpy(to + c * kStepRows + r, step + r * size + 2 * c, 2 * sizeof(T));
  }
}

template <class T>
static void pack_rows_of(const TensorView& t, const int64_t* rows, int64_t count, int64_t f, int64_t size, bool left,
                         void* to) {
  if (left)
    pack_turned(t, rows, count, f, size, static_cast<T*>(to));
  else
    pack_row_pairs(t, rows, count, f, size, static_cast<T*>(to));
}
static void pack_rows(const TensorView& t, const int64_t* rows, int64_t count, int64_t feature, int64_t size, bool left,
                      void* to) {
  if (t.dtype == DType::kF16)
    pack_rows_of<Half>(t, rows, count, feature, size, left, to);
  else
    pack_rows_of<BFloat>(t, rows, count, feature, size, left, to);
}

// N x N registers of sums.
template <class T, int N>
static __attribute__((noinline)) void add_steps(const T* x, const T* dy, int64_t rows, int64_t size, float* sums,
                                                bool first) {
  const auto at = [=](int i) { return sums + i / N * kLanes * size + i % N * kLanes; };
  begin_sums<N * N>(at, size * 4, first);
  for (int64_t r = 0; r < rows; r += kStepRows, x += kStepRows * size, dy += kStepRows * size) {
    SBNET_TILE_LOAD(4, x, kTileBytes);
    SBNET_TILE_LOAD(6, dy, size * 4);
    SBNET_TILE_DOT(T, 0, 4, 6);
    if constexpr (N == 2) {
      SBNET_TILE_LOAD(7, dy + 2 * kLanes, size * 4);
      SBNET_TILE_DOT(T, 1, 4, 7);
      SBNET_TILE_LOAD(5, x + kLanes * kStepRows, kTileBytes);
      SBNET_TILE_DOT(T, 2, 5, 6);
      SBNET_TILE_DOT(T, 3, 5, 7);
    }
  }
  store_sums<N * N>(at, size * 4);
}

template <class T>
static void weight_grad_of(const BlocksparseWeightGradParams& p, const WeightGradTask& task) {
  each_block(p, task, [&](const char* x_panel, const char* dy_panel, int64_t size, float* sums) {
    const T *x = reinterpret_cast<const T*>(x_panel), *dy = reinterpret_cast<const T*>(dy_panel);
    if (size == kLanes) return add_steps<T, 1>(x, dy, task.rows, size, sums, task.first);
    for (int64_t i = 0; i < size; i += 2 * kLanes)
      for (int64_t j = 0; j < size; j += 2 * kLanes)
        add_steps<T, 2>(x + i * kStepRows, dy + 2 * j, task.rows, size, sums + i * size + j, task.first);
  });
}

static void weight_grad(const BlocksparseWeightGradParams& p, const WeightGradTask& task) {
  const TileShapes shapes = tile_shapes(kTileRows, kTileBytes);
  SBNET_TILE_CONFIGURE(shapes);
  if (p.x[0].dtype == DType::kF16)
    weight_grad_of<Half>(p, task);
  else
    weight_grad_of<BFloat>(p, task);
  SBNET_TILE_RELEASE();
}

}  // namespace SBNET_ISA

const MatmulKernels kMatmulKernelsAmx = {matmul_amx::kGroup,       2,
                                         matmul_amx::pack_weights, matmul_amx::multiply,
                                         matmul_amx::kStepRows,    matmul_amx::pack_rows,
                                         matmul_amx::weight_grad};
}  // namespace sbnet
#endif

// sparse_pointwise on one row of a block. Included once by each pointwise_<isa>.cpp; see isa.h for why.
#pragma once
#include "cpu/masked/lanes.h"
#include "cpu/masked/pointwise_kernels.h"

namespace sbnet {
namespace SBNET_ISA {

struct VectorMath {
  using Value = Vec;
  SBNET_INLINE Vec exp(Vec a) {
    return each(a, [](float f) { return __builtin_expf(f); });
  }
  SBNET_INLINE Vec gate(Vec a) { return exponential(a); }
  SBNET_INLINE Vec expm1(Vec a) {
    return each(a, [](float f) { return __builtin_expm1f(f); });
  }
  SBNET_INLINE Vec log(Vec a) {
    return each(a, [](float f) { return __builtin_logf(f); });
  }
  SBNET_INLINE Vec log1p(Vec a) {
    return each(a, [](float f) { return __builtin_log1pf(f); });
  }
  SBNET_INLINE Vec tanh(Vec a) {
    return each(a, [](float f) { return __builtin_tanhf(f); });
  }
  SBNET_INLINE Vec erf(Vec a) { return error_function(a); }
  SBNET_INLINE Vec sqrt(Vec a) { return each(a, root); }
  SBNET_INLINE Vec abs(Vec a) { return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(a) & 0x7fffffff); }
};

// The program is read once for so many values: channels of a pixel or, where those are few, of several pixels. Where
// pixels lie next to each other, and channels do not, the two change places.
constexpr int kRunVectors = 8, kRun = kRunVectors * kLanes;

struct Run {
  int inner, outer;  // dimensions
  int64_t inside, outside;
};

// Lanes past the end of a run hold what they held before it.
struct Machine {
  Vec v[kRunVectors], o[kRunVectors], saved[2][kRunVectors];
};

template <class T>
SBNET_INLINE void load_run(const TensorView& t, int64_t at, const Run& run, Vec (&values)[kRunVectors]) {
  const T* from = static_cast<const T*>(t.data) + at;
  const int64_t inner = t.stride[run.inner], outer = t.stride[run.outer];
  if (inner == 1 && run.inside % kLanes == 0) {
    Vec* to = values;
    for (int64_t k = 0; k < run.outside; ++k)
      for (int64_t i = 0; i < run.inside; i += kLanes) *to++ = load_lanes(from + k * outer + i);
    return;
  }
  alignas(64) float lanes[kRun] = {};
  for (int64_t k = 0; k < run.outside; ++k) load_row(lanes + k * run.inside, from + k * outer, inner, run.inside);
  for (int e = 0; e < kRunVectors; ++e) values[e] = load(lanes + e * kLanes);
}

template <class T>
SBNET_INLINE void store_run(const TensorView& t, int64_t at, const Run& run, const Vec (&values)[kRunVectors]) {
  T* to = static_cast<T*>(t.data) + at;
  const int64_t inner = t.stride[run.inner], outer = t.stride[run.outer];
  if (inner == 1 && run.inside % kLanes == 0) {
    const Vec* from = values;
    for (int64_t k = 0; k < run.outside; ++k)
      for (int64_t i = 0; i < run.inside; i += kLanes) store_lanes(to + k * outer + i, *from++);
    return;
  }
  alignas(64) float lanes[kRun];
  for (int e = 0; e < kRunVectors; ++e) store(lanes + e * kLanes, values[e]);
  for (int64_t k = 0; k < run.outside; ++k) store_row(to + k * outer, inner, lanes + k * run.inside, run.inside);
}

// start: of the run, in each dimension.
template <class T>
SBNET_INLINE void run_program(const PointwiseParams& p, const int64_t (&start)[4], const Run& run, Machine& m) {
  const auto offset = [&](const TensorView& t) {
    return start[0] * t.stride[0] + start[1] * t.stride[1] + start[2] * t.stride[2] + start[3] * t.stride[3];
  };
  load_run<T>(p.x, offset(p.x), run, m.v);
  for (int k = 0; k < p.steps; ++k) {
    const PointwiseStep& step = p.step[k];
    const int slot = step.source == StepSource::kT;
    if (step.code == StepCode::kSave) {
      for (int e = 0; e < kRunVectors; ++e) m.saved[slot][e] = m.v[e];
      continue;
    }
    if (step.source >= StepSource::kS) {
      const bool number = step.source == StepSource::kNumber;
      for (int e = 0; e < kRunVectors; ++e) m.o[e] = number ? splat(step.p) : m.saved[slot][e];
    } else {
      const int source = static_cast<int>(step.source);
      const TensorView& t = source ? p.other[source - 1] : p.x;
      load_run<T>(t, offset(t), run, m.o);
    }
    run_step<VectorMath>(step, m.v, m.o);
  }
  store_run<T>(p.y, offset(p.y), run, m.v);
}

template <class T>
SBNET_INLINE void pointwise_row_of(const PointwiseParams& p, const BlockRow& row) {
  const int64_t sizes[4] = {0, p.y.size[1], 0, row.column_end - row.column};
  Machine machine = {};
  Run run = {};
  run.inner = p.y.stride[1] <= p.y.stride[3] ? 1 : 3, run.outer = 4 - run.inner;
  for (int64_t i = 0; i < sizes[run.inner]; i += kRun) {
    run.inside = smaller(kRun, sizes[run.inner] - i);
    const int64_t together = kRun / run.inside;
    for (int64_t k = 0; k < sizes[run.outer]; k += together) {
      run.outside = smaller(together, sizes[run.outer] - k);
      int64_t start[4] = {row.n, 0, row.row, row.column};
      start[run.inner] += i, start[run.outer] += k;
      run_program<T>(p, start, run, machine);
    }
  }
}

static void pointwise_row(const PointwiseParams& p, const BlockRow& row) {
  switch (p.x.dtype) {
    case DType::kF32:
      return pointwise_row_of<float>(p, row);
    case DType::kF16:
      return pointwise_row_of<Half>(p, row);
    default:
      return pointwise_row_of<BFloat>(p, row);
  }
}

}  // namespace SBNET_ISA
}  // namespace sbnet

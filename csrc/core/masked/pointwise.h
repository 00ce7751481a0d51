// A short program of steps on each pixel and channel of the active blocks: sums, products, activations, gates.
#pragma once
#include <cmath>

#include "core/layer.h"

namespace sbnet {

constexpr int kMostSteps = 24, kOperands = 4;

// In the order of kStepNames (pointwise.cpp). `v` is what the step before it gave, `o` its operand.
enum class StepCode : int32_t {
  kLoad,
  kSave,
  kAdd,
  kSub,
  kRsub,
  kMul,
  kDiv,
  kRdiv,
  kMax,
  kMin,
  kPrelu,  // take an operand
  kClamp,
  kLeakyRelu,
  kElu,
  kSoftplus,  // take numbers
  kRelu,
  kRelu6,
  kSilu,
  kGelu,
  kGeluTanh,
  kHardswish,
  kSigmoid,
  kHardsigmoid,
  kTanh,
  kMish,
  kLogSigmoid,
  kAbs,
  kNeg,
  kExp,
  kLog,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kSquare,
  kErf,
};

// What a step reads beside v: one of the tensors, one of two values that kSave kept, or the number p.
enum class StepSource : int32_t { kX, kA, kB, kC, kD, kS, kT, kNumber };

struct PointwiseStep {
  StepCode code;
  StepSource source;
  float p, q;
};

struct PointwiseParams {
  TensorView x;                 // [N, C, H, W] float32, float16 or bfloat16, any strides
  TensorView other[kOperands];  // of x.dtype and y's shape, stride 0 where they have one element for many; or no data
  TensorView y;                 // [N, C, H, W] of x.dtype, any strides; must not overlap the others
  ActiveView active;            // tiling grid of y's plane: offset 0, stride = size, count = ceil(plane / size)
  FringeView fringe;
  int32_t steps;
  PointwiseStep step[kMostSteps];
};

// "mul a; add 0.5; save s; sigmoid; mul s": steps and their operands, the tensors x a b c d, the saved s t, or numbers.
SBNET_EXPORT Status read_program(const char* op, const char* program, PointwiseParams* p);
// Shapes, dtypes, grid against plane, operands that are there. Everything a kernel relies on.
SBNET_EXPORT Status validate(const PointwiseParams& p);

// The functions that steps are made of, of floats; cpu/masked/pointwise_kernel.h has those of vectors. gate: exp as
// sigmoid and its like read it, to whom all beyond 1e38 is the same.
struct ScalarMath {
  using Value = float;
  SBNET_HOST_DEVICE static float exp(float a) { return expf(a); }
  SBNET_HOST_DEVICE static float gate(float a) { return expf(a); }
  SBNET_HOST_DEVICE static float expm1(float a) { return expm1f(a); }
  SBNET_HOST_DEVICE static float log(float a) { return logf(a); }
  SBNET_HOST_DEVICE static float log1p(float a) { return log1pf(a); }
  SBNET_HOST_DEVICE static float tanh(float a) { return tanhf(a); }
  SBNET_HOST_DEVICE static float erf(float a) { return erff(a); }
  SBNET_HOST_DEVICE static float sqrt(float a) { return sqrtf(a); }
  SBNET_HOST_DEVICE static float abs(float a) { return fabsf(a); }
};

// a * tanh(log(1 + e^a)), below 20, by one exponential.
template <class M>
SBNET_HOST_DEVICE inline typename M::Value mish(const typename M::Value& a) {
  const typename M::Value e = M::gate(a), n = e * (e + 2.f);
  return a * (n / (n + 2.f));
}

// Runs a step but kSave on kN values.
template <class M, int kN>
SBNET_HOST_DEVICE inline void run_step(const PointwiseStep& step, typename M::Value (&v)[kN],
                                       const typename M::Value (&o)[kN]) {
  const float p = step.p, q = step.q;
#define SBNET_EACH(expression)        \
  for (int e = 0; e < kN; ++e) {      \
    const typename M::Value a = v[e]; \
    v[e] = (expression);              \
  }                                   \
  break
  switch (step.code) {
    case StepCode::kLoad:
      for (int e = 0; e < kN; ++e) v[e] = o[e];
      break;
    case StepCode::kSave:
      break;  // done by the caller, who has the slots
    case StepCode::kAdd:
      SBNET_EACH(a + o[e]);
    case StepCode::kSub:
      SBNET_EACH(a - o[e]);
    case StepCode::kRsub:
      SBNET_EACH(o[e] - a);
    case StepCode::kMul:
      SBNET_EACH(a * o[e]);
    case StepCode::kDiv:
      SBNET_EACH(a / o[e]);
    case StepCode::kRdiv:
      SBNET_EACH(o[e] / a);
    case StepCode::kMax:
      SBNET_EACH(o[e] > a || o[e] != o[e] ? o[e] : a);
    case StepCode::kMin:
      SBNET_EACH(o[e] < a || o[e] != o[e] ? o[e] : a);
    case StepCode::kPrelu:
      SBNET_EACH(a > 0.f ? a : a * o[e]);
    case StepCode::kClamp:
      SBNET_EACH(a < p ? p : a > q ? q : a);
    case StepCode::kLeakyRelu:
      SBNET_EACH(a > 0.f ? a : a * p);
    case StepCode::kElu:
      SBNET_EACH(a > 0.f ? a : p * M::expm1(a));
    case StepCode::kSoftplus:
      SBNET_EACH(a * p > q ? a : M::log1p(M::exp(a * p)) / p);
    case StepCode::kRelu:
      SBNET_EACH(a < 0.f ? 0.f : a);
    case StepCode::kRelu6:
      SBNET_EACH(a < 0.f ? 0.f : a > 6.f ? 6.f : a);
    case StepCode::kSilu:
      SBNET_EACH(a / (1.f + M::gate(-a)));
    case StepCode::kGelu:
      SBNET_EACH(0.5f * a * (1.f + M::erf(a * 0.70710678f)));
    case StepCode::kGeluTanh:
      SBNET_EACH(0.5f * a * (1.f + M::tanh(0.79788456f * (a + 0.044715f * a * a * a))));
    case StepCode::kHardswish:
      SBNET_EACH(a * ((a < -3.f ? 0.f : a > 3.f ? 6.f : a + 3.f) / 6.f));
    case StepCode::kSigmoid:
      SBNET_EACH(1.f / (1.f + M::gate(-a)));
    case StepCode::kHardsigmoid:
      SBNET_EACH((a < -3.f ? 0.f : a > 3.f ? 6.f : a + 3.f) / 6.f);
    case StepCode::kTanh:
      SBNET_EACH(M::tanh(a));
    case StepCode::kMish:
      SBNET_EACH(a > 20.f ? a : a < -110.f ? 0.f * a : mish<M>(a));  // gate() does not go down to 0
    case StepCode::kLogSigmoid:
      SBNET_EACH((a < 0.f ? a : 0.f * a) - M::log1p(M::exp(-M::abs(a))));
    case StepCode::kAbs:
      SBNET_EACH(M::abs(a));
    case StepCode::kNeg:
      SBNET_EACH(-a);
    case StepCode::kExp:
      SBNET_EACH(M::exp(a));
    case StepCode::kLog:
      SBNET_EACH(M::log(a));
    case StepCode::kSqrt:
      SBNET_EACH(M::sqrt(a));
    case StepCode::kRsqrt:
      SBNET_EACH(1.f / M::sqrt(a));
    case StepCode::kReciprocal:
      SBNET_EACH(1.f / a);
    case StepCode::kSquare:
      SBNET_EACH(a * a);
    case StepCode::kErf:
      SBNET_EACH(M::erf(a));
  }
#undef SBNET_EACH
}

}  // namespace sbnet

SBNET_DECLARE(sparse_pointwise, PointwiseParams)

namespace sbnet {

struct PointwiseLayer : LayerOf<PointwiseParams> {
  static constexpr const char* kName = "sparse_pointwise";
  template <class Read>
  static constexpr void tensors(PointwiseParams& p, Read& read) {
    constexpr const char* kNames[kOperands] = {"a", "b", "c", "d"};
    for (int k = 0; k < kOperands; ++k) read.map(kNames[k], &p.other[k]);
  }
  template <class Read>
  static void numbers(PointwiseParams& p, Read& read) {
    read.text("program", "", [&](const char* op, const char* text) { return read_program(op, text, &p); });
  }
  static constexpr auto kernels = SBNET_KERNELS(sparse_pointwise);
};

}  // namespace sbnet

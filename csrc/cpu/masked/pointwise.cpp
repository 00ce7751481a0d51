// sparse_pointwise on the CPU: threads take rows of active blocks, and run the program on runs of channels, or of
// pixels where those lie next to each other.
#include "core/masked/pointwise.h"

#include "cpu/masked/pixels.h"

namespace sbnet {
namespace {

constexpr int kRun = 32;

template <class T>
void load(const TensorView& t, int64_t at, int64_t step, int count, float (&values)[kRun]) {
  const T* from = static_cast<const T*>(t.data) + at;
  for (int e = 0; e < count; ++e) values[e] = to_float(from[e * step]);
}

// `count` values from channel c and column w on, along dimension `along`.
template <class T>
void run_program(const PointwiseParams& p, int64_t n, int64_t c, int64_t row, int64_t w, int along, int count) {
  const auto offset = [&](const TensorView& t) {
    return n * t.stride[0] + c * t.stride[1] + row * t.stride[2] + w * t.stride[3];
  };
  float v[kRun] = {}, o[kRun] = {}, saved[2][kRun] = {};
  load<T>(p.x, offset(p.x), p.x.stride[along], count, v);
  for (int k = 0; k < p.steps; ++k) {
    const PointwiseStep& step = p.step[k];
    const int slot = step.source == StepSource::kT;
    if (step.code == StepCode::kSave) {
      std::copy(v, v + kRun, saved[slot]);
      continue;
    }
    if (step.source == StepSource::kNumber) {
      std::fill(o, o + kRun, step.p);
    } else if (step.source >= StepSource::kS) {
      std::copy(saved[slot], saved[slot] + kRun, o);
    } else {
      const int source = static_cast<int>(step.source);
      const TensorView& t = source ? p.other[source - 1] : p.x;
      load<T>(t, offset(t), t.stride[along], count, o);
    }
    run_step(step, v, o);
  }
  T* to = static_cast<T*>(p.y.data) + offset(p.y);
  for (int e = 0; e < count; ++e) to[e * p.y.stride[along]] = from_float<T>(v[e]);
}

template <class T>
void pointwise(const PointwiseParams& p, const Parallel& parallel) {
  const int64_t channels = p.y.size[1];
  const bool copies = !p.steps && p.x.stride[1] == 1 && p.y.stride[1] == 1;
  for_rows(p, channels * (1 + p.steps), parallel, [&](int64_t n, int64_t row, int64_t begin, int64_t end) {
    if (copies) {
      const T* from = static_cast<const T*>(p.x.data) + n * p.x.stride[0] + row * p.x.stride[2];
      T* to = static_cast<T*>(p.y.data) + n * p.y.stride[0] + row * p.y.stride[2];
      for (int64_t w = begin; w < end; ++w) std::copy_n(from + w * p.x.stride[3], channels, to + w * p.y.stride[3]);
    } else if (p.y.stride[1] <= p.y.stride[3]) {
      for (int64_t w = begin; w < end; ++w)
        for (int64_t c = 0; c < channels; c += kRun)
          run_program<T>(p, n, c, row, w, 1, static_cast<int>(std::min<int64_t>(kRun, channels - c)));
    } else {
      for (int64_t c = 0; c < channels; ++c)
        for (int64_t w = begin; w < end; w += kRun)
          run_program<T>(p, n, c, row, w, 3, static_cast<int>(std::min<int64_t>(kRun, end - w)));
    }
  });
}

}  // namespace
}  // namespace sbnet

sbnet::Status sbnet_sparse_pointwise_cpu(const sbnet::PointwiseParams* p, const sbnet::Parallel* parallel) {
  using namespace sbnet;
  return run_by_dtype(*p, [&](auto t) { pointwise<decltype(t)>(*p, *parallel); });
}

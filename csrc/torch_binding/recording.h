// Recordings: CPU kernels that ops of a thread have run, with all they were given, to be run again in one call, without
// torch's dispatcher, the checks of tensors and allocations. What a CUDA graph is to a GPU: the tensors stay where they
// are, and what they hold may be another at each run. Made and run from Python through the C functions at the end.
#pragma once
#include <functional>
#include <tuple>

#include "core/masked/conv_chain.h"
#include "torch_binding/common.h"

namespace sbnet::binding {

class Recording {
 public:
  explicit Recording(int32_t threads) : threads_(threads) {}

  static Recording* current();  // the one that this thread began last, or null

  // Notes a kernel(workspace, parallel) -> Status that has just run. The workspace of all is as large as the largest.
  template <class Kernel, class... Held>
  void add(const char* op, const Tensor* workspace, const Kernel& kernel, const Held&... held) {
    if (workspace && (!workspace_ || workspace_->numel() < workspace->numel())) workspace_ = *workspace;
    steps_.push_back({op,
                      [kernel, kept = std::make_tuple(held...)](void* own, const Parallel& parallel) {
                        return kernel(own, parallel);
                      },
                      {}});
  }
  // What the kernel that was noted last computes: a convolution, which may be joined with its neighbours.
  void describe(const Conv2dParams& p) { steps_.back().conv = p; }
  // Makes the last `count` kernels one (core/masked/conv_chain.h) if it can be: what lies between has no other
  // consumer.
  bool join(int32_t count);
  Status run() const;  // the kernels in order, up to the first that fails

 private:
  struct Step {
    const char* op;
    std::function<Status(void*, const Parallel&)> kernel;
    std::optional<Conv2dParams> conv;
  };
  std::vector<Step> steps_;
  std::optional<Tensor> workspace_;
  int32_t threads_;  // of the run that was recorded: workspaces are of so many
};

// Runs a CPU's kernel(workspace, parallel) -> Status under the name of an op, and notes it where this thread records.
// `held`: the tensors that the kernel points into, and what else must live as long.
template <class Kernel, class... Held>
Status run_on_cpu(const char* op, const Tensor* workspace, const Kernel& kernel, const Held&... held) {
  const Status status = kernel(workspace ? workspace->data_ptr() : nullptr, cpu_threads());
  if (Recording* recording = Recording::current()) recording->add(op, workspace, kernel, held...);
  return status;
}

// Runs an op's kernels where the call is, and notes the CPU's likewise.
template <class Op, class Params, class... Held>
Status run(const Call& call, const Op& kernels, const Params& p, const Held&... held) {
  if (call.cuda()) return kernels(call, &p);
  const auto kernel = [=](void*, const Parallel& parallel) { return kernels.cpu(&p, &parallel); };
  return run_on_cpu(call.op(), nullptr, kernel, held...);
}
// The same of kernels that take a workspace.
template <class Op, class Params, class... Held>
Status run_in(const Call& call, const Op& kernels, const Params& p, const Tensor& workspace, const Held&... held) {
  if (call.cuda()) return kernels(call, &p, workspace.data_ptr());
  const auto kernel = [=](void* own, const Parallel& parallel) { return kernels.cpu(&p, own, &parallel); };
  return run_on_cpu(call.op(), &workspace, kernel, held...);
}

}  // namespace sbnet::binding

extern "C" {
// Kernels of this thread are noted from now on, until sbnet_recording_end() hands over what was begun last; null if
// nothing was.
SBNET_EXPORT void sbnet_recording_begin();
SBNET_EXPORT sbnet::binding::Recording* sbnet_recording_end();
// Of the last `kernels` noted ones, convolutions whose intermediate results have no other consumer: are they run as one
// from now on?
SBNET_EXPORT bool sbnet_recording_join(int32_t kernels);
// Null, or what is wrong, until the thread's next call.
SBNET_EXPORT const char* sbnet_recording_run(const sbnet::binding::Recording* recording);
SBNET_EXPORT void sbnet_recording_free(sbnet::binding::Recording* recording);
}

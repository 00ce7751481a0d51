#include "torch_binding/recording.h"

#include <memory>

#include "core/layer.h"

namespace sbnet::binding {
namespace {

// Innermost last: what is run while another is made may make one of its own.
thread_local std::vector<std::unique_ptr<Recording>> making;

}  // namespace

Recording* Recording::current() { return making.empty() ? nullptr : making.back().get(); }

bool Recording::join(int32_t count) {
  ConvChainParams p = {};
  if (count < 2 || count > kMostChained || steps_.size() < static_cast<size_t>(count)) return false;
  const auto first = steps_.end() - count;
  for (auto step = first; step != steps_.end(); ++step, ++p.count) {
    if (!step->conv) return false;
    p.layers[p.count] = *step->conv;
  }
  if (!sbnet_conv_chain_suits_cpu(&p)) return false;
  const int64_t bytes = sbnet_conv_chain_workspace_bytes_cpu(&p, threads_);
  if (workspace_->numel() < bytes) workspace_ = workspace(*workspace_, bytes);
  const std::vector<Step> joined(first, steps_.end());  // which hold the tensors
  steps_.erase(first, steps_.end());
  steps_.push_back(
      {joined[0].op,
       [p, joined](void* own, const Parallel& parallel) { return sbnet_conv_chain_cpu(&p, own, &parallel); },
       {}});
  return true;
}

Status Recording::run() const {
  Parallel parallel = cpu_threads();
  parallel.threads = threads_;
  void* scratch = workspace_ ? workspace_->data_ptr() : nullptr;
  for (const Step& step : steps_) SBNET_TRY(named(step.op, step.kernel(scratch, parallel)));
  return ok_status();
}

}  // namespace sbnet::binding

using sbnet::binding::Recording;

void sbnet_recording_begin() {
  sbnet::binding::making.push_back(std::make_unique<Recording>(sbnet::binding::cpu_threads().threads));
}

Recording* sbnet_recording_end() {
  if (sbnet::binding::making.empty()) return nullptr;
  Recording* made = sbnet::binding::making.back().release();
  sbnet::binding::making.pop_back();
  return made;
}

bool sbnet_recording_join(int32_t kernels) {
  Recording* recording = Recording::current();
  return recording && recording->join(kernels);
}

const char* sbnet_recording_run(const Recording* recording) {
  thread_local std::string wrong;
  if (!recording) return "sbnet: recording: expected kernels that were noted, got none";
  try {
    const sbnet::Status status = recording->run();
    if (status.ok()) return nullptr;
    wrong = std::string("sbnet::") + status.message;
  } catch (const std::exception& error) {  // torch's, of its threads
    wrong = error.what();
  }
  return wrong.c_str();
}

void sbnet_recording_free(Recording* recording) { delete recording; }

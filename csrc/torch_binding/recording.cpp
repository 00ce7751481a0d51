#include "torch_binding/recording.h"

#include <memory>

#include "core/layer.h"

namespace sbnet::binding {
namespace {

// Innermost last: what is run while another is made may make one of its own.
thread_local std::vector<std::unique_ptr<Recording>> making;

}  // namespace

Recording* Recording::current() { return making.empty() ? nullptr : making.back().get(); }

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

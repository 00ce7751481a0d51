#include "core/masked/pointwise.h"

#include <charconv>
#include <cstring>

#include "core/grid.h"

namespace sbnet {
namespace {

constexpr const char* kOp = PointwiseLayer::kName;
constexpr const char* kStepNames[] = {
    "load", "save",      "add",       "sub",        "rsub",        "mul",        "div",    "rdiv",        "max",
    "min",  "prelu",     "clamp",     "leaky_relu", "elu",         "softplus",   "relu",   "relu6",       "silu",
    "gelu", "gelu_tanh", "hardswish", "sigmoid",    "hardsigmoid", "tanh",       "mish",   "log_sigmoid", "abs",
    "neg",  "exp",       "log",       "sqrt",       "rsqrt",       "reciprocal", "square", "erf"};

bool takes_operand(StepCode code) { return code <= StepCode::kPrelu; }
int numbers_of(StepCode code) {
  if (code == StepCode::kClamp || code == StepCode::kSoftplus) return 2;
  return code == StepCode::kLeakyRelu || code == StepCode::kElu ? 1 : 0;
}

// The next word of a step, up to a space or a semicolon; false where the step has ended.
bool next_word(const char** at, char (&word)[32]) {
  while (**at == ' ') ++*at;
  size_t length = 0;
  while ((*at)[length] && (*at)[length] != ' ' && (*at)[length] != ';') ++length;
  const size_t kept = length < sizeof(word) - 1 ? length : sizeof(word) - 1;
  std::memcpy(word, *at, kept);
  word[kept] = 0;
  *at += length;
  return length > 0;
}

bool read_number(const char* word, float* number) {
  const char* end = word + std::strlen(word);
  const std::from_chars_result read = std::from_chars(word, end, *number);
  return read.ec == std::errc() && read.ptr == end;
}

Status read_step(const char* op, const char** at, PointwiseStep* step) {
  char word[32];
  SBNET_CHECK(next_word(at, word), "%s: program: expected a step, got none", op);
  int code = 0;
  constexpr int kCodes = sizeof(kStepNames) / sizeof(kStepNames[0]);
  while (code < kCodes && std::strcmp(word, kStepNames[code])) ++code;
  SBNET_CHECK(code < kCodes, "%s: program: expected a step's name, got '%s'", op, word);
  step->code = static_cast<StepCode>(code);
  step->source = StepSource::kNumber;
  if (takes_operand(step->code)) {
    SBNET_CHECK(next_word(at, word), "%s: program: %s: expected an operand, got none", op, kStepNames[code]);
    const char* tensors = "xabcdst";
    const char* found = word[1] ? nullptr : std::strchr(tensors, word[0]);
    if (found && *found)
      step->source = static_cast<StepSource>(found - tensors);
    else
      SBNET_CHECK(step->code != StepCode::kSave && read_number(word, &step->p),
                  "%s: program: %s: expected x, a, b, c, d, s, t or a number, got '%s'", op, kStepNames[code], word);
    const bool slot = step->source == StepSource::kS || step->source == StepSource::kT;
    SBNET_CHECK(step->code != StepCode::kSave || slot, "%s: program: save: expected s or t, got '%s'", op, word);
  }
  float* numbers[] = {&step->p, &step->q};
  for (int k = 0; k < numbers_of(step->code); ++k)
    SBNET_CHECK(next_word(at, word) && read_number(word, numbers[k]), "%s: program: %s: expected %d numbers", op,
                kStepNames[code], numbers_of(step->code));
  if (step->code == StepCode::kClamp && step->p > step->q) step->p = step->q;  // PyTorch's: the upper bound wins
  SBNET_CHECK(!next_word(at, word), "%s: program: %s: expected no more, got '%s'", op, kStepNames[code], word);
  return ok_status();
}

}  // namespace

Status read_program(const char* op, const char* program, PointwiseParams* p) {
  p->steps = 0;
  for (const char* at = program; *at;) {
    SBNET_CHECK(p->steps < kMostSteps, "%s: program: expected at most %d steps", op, kMostSteps);
    PointwiseStep step = {};
    SBNET_TRY(read_step(op, &at, &step));
    p->step[p->steps++] = step;
    if (*at == ';') ++at;
  }
  return ok_status();
}

Status validate(const PointwiseParams& p) {
  const TensorView &x = p.x, &y = p.y;
  SBNET_TRY(check_plain<PointwiseLayer>(p));
  for (int k = 0; k < kOperands; ++k) {
    if (!p.other[k].data) continue;
    const char name[2] = {static_cast<char>('a' + k), 0};
    SBNET_TRY(check_shape(kOp, name, p.other[k], x.dtype, {{x.size[0], x.size[1], x.size[2], x.size[3]}, "that of x"}));
    SBNET_CHECK(!x.size[0] || !p.active.capacity || !may_overlap(p.other[k], y),
                "%s: out: expected memory of its own, got that of %s", kOp, name);
  }
  bool saved[2] = {};
  for (int k = 0; k < p.steps; ++k) {
    const PointwiseStep& step = p.step[k];
    const int source = static_cast<int>(step.source);
    if (step.code == StepCode::kSave) {
      saved[step.source == StepSource::kT] = true;
    } else if (step.source == StepSource::kS || step.source == StepSource::kT) {
      SBNET_CHECK(saved[step.source == StepSource::kT], "%s: program: expected %s to be saved before it is read", kOp,
                  step.source == StepSource::kT ? "t" : "s");
    } else if (source >= 1 && source <= kOperands) {
      SBNET_CHECK(p.other[source - 1].data, "%s: %c: expected a tensor, which the program reads, got none", kOp,
                  'a' + source - 1);
    }
  }
  return ok_status();
}

}  // namespace sbnet

// ONNX Runtime <-> core: attributes, values and shapes to params, Status to OrtStatus, and the OrtCustomOp struct of an
// op made from its tables. Every binding file includes this alone.
//
// An op is a struct with
//   kName, kInputs, kOutputs   name and element type (or type variable) of every argument
//   kTypes                     the types that the variables stand for; one kernel each (kFloatTypes, kBiasTypes, ...)
//   kInPlace                   the input whose memory output 0 may take over, or -1
//   Op(const Attributes&)      reads and checks the attributes, at session creation
//   infer(ShapeContext&)       output shapes, symbolic dimensions included
//   compute(Context&)          fills the core's params and calls its kernel
// SBNET_ORT_OPS(Op, ...), in namespace sbnet::ort, adds a file's ops to those of the library.
#pragma once
#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "core/masked/conv.h"
#include "core/raise.h"
#include "ort_binding/ort_abi.h"

namespace sbnet::ort {

struct OpDescription;

// A copy of ONNX Runtime that registered the ops: a process may hold several, of one version or another.
struct Runtime {
  Api api;
  bool infers_absent_inputs;  // before 1.24, shape inference follows a null pointer at an optional input left out
  OrtCustomOpDomain* domain;  // sessions point at it and its ops: they live as long as the process
  // Of no runtime: ops are described to this instead of being added.
  const std::function<void(const OpDescription&)>* describe = nullptr;
};
// Of the runtime that called into the library, on this thread.
extern thread_local const Api* api;
class Calling {
 public:
  explicit Calling(const Runtime& runtime) : before_(api) { api = &runtime.api; }
  ~Calling() { api = before_; }
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;

 private:
  const Api* before_;
};

inline bool succeeded(OrtStatus* status) {
  if (status) api->ReleaseStatus(status);
  return !status;
}
void check(OrtStatus* status);

// No exception leaves the library: ORT gets its text as a status.
template <class F>
OrtStatus* guarded(const Runtime& runtime, const F& body) noexcept {
  const Calling calling(runtime);
  try {
    body();
    return nullptr;
  } catch (const std::exception& e) {
    return api->CreateStatus(kInvalidArgument, e.what());
  }
}

// ---- tables

// Raised whenever a node that this library writes would be misread by an older one; every node says its own.
constexpr int64_t kFormat = 1;

constexpr int32_t kT = -1, kBias = -2, kWeightT = -3, kResidualT = -4;  // type variables; of the last two: bytes'

struct Argument {
  const char* name;
  int32_t type;
  Characteristic characteristic = kRequired;  // a variadic output is the last one and stands for any number
  MemoryType memory = kDefaultMemory;
};
struct Types {
  ElementType t, bias, weight = kFloat;  // bias: that of a residual, too
  int32_t operator()(int32_t type) const {
    return type == kT ? t : type == kBias || type == kResidualT ? bias : type == kWeightT ? weight : type;
  }
};
constexpr std::array<Types, 3> kFloatTypes = {{{kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}}};
// A bias has the type of the other tensors or float.
constexpr std::array<Types, 5> kBiasTypes = {
    {{kFloat, kFloat}, {kFloat16, kFloat16}, {kFloat16, kFloat}, {kBFloat16, kBFloat16}, {kBFloat16, kFloat}}};
constexpr std::array<Types, 5> kMaskTypes = {
    {{kBool, kBool}, {kUInt8, kUInt8}, {kFloat, kFloat}, {kFloat16, kFloat16}, {kBFloat16, kBFloat16}}};

// ---- values

struct Tensor {
  const char* name;
  const void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape = {};
  bool present = false;
  int64_t elements() const;
  int64_t bytes() const { return elements() * dtype_size(dtype); }
};
Tensor tensor_of(const char* op, const char* name, const OrtValue* value);

// ---- attributes

using Pair = std::array<int32_t, 2>;

class Attributes {
 public:
  explicit Attributes(const char* op) : op_(op) {}
  virtual ~Attributes() = default;
  const char* op() const { return op_; }

  int64_t integer(const char* name, int64_t otherwise) const;
  bool flag(const char* name, bool otherwise) const;
  float real(const char* name, float otherwise) const;  // NaN: there is no default
  std::string text(const char* name, const char* otherwise) const;
  std::optional<Pair> pair(const std::string& name) const;
  Pair pair(const char* name, int32_t otherwise) const;
  Pair required_pair(const std::string& name) const;
  int64_t required_integer(const char* name) const;
  std::vector<int64_t> required_integers(const char* name) const;
  std::vector<int64_t> integers(const char* name) const;  // empty where it is not given
  bool integers(const char* name, std::vector<int64_t>* out) const { return get(name, out); }  // false: it is not given
  virtual bool is_constant(size_t) const { return false; }  // is this input the same at every run?
  // Such an input of a kernel of the CPU; present is false for any other.
  virtual Tensor constant_on_cpu(const char* name, size_t) const { return {name}; }

 protected:  // false: there is no such attribute
  virtual bool get(const char* name, int64_t* out) const = 0;
  virtual bool get(const char* name, float* out) const = 0;
  virtual bool get(const char* name, std::string* out) const = 0;
  virtual bool get(const char* name, std::vector<int64_t>* out) const = 0;
  virtual void require(const char*) const {}  // what is read next has no default

 private:
  const char* op_;
};

// bsize, and bstride, boffset, bcount where they are given. Without bstride and boffset the grid tiles its plane, and
// bcount, if not given either, follows from the plane: that keeps height and width dynamic.
class GridAttributes {
 public:
  explicit GridAttributes(const Attributes& a, const std::string& prefix = "");
  BlockGrid over(int64_t height, int64_t width) const;     // on a plane
  BlockGrid counted(int64_t rows, int64_t columns) const;  // of as many blocks as a block map has, unless bcount
  int64_t blocks(int d, int64_t side) const;               // bcount[d] on a plane of that side
  bool fixed(int d) const { return count_ && (*count_)[d] >= 0; }
  int32_t size(int d) const { return size_[d]; }

 private:
  BlockGrid grid(int64_t rows, int64_t columns) const;
  const char* op_;
  Pair size_, stride_, offset_;
  std::optional<Pair> count_;
};

// ---- shapes, at session creation

struct Dim {
  int64_t value = -1;  // -1: not known
  std::string symbol;
  Dim() = default;
  Dim(int64_t v) : value(v) {}  // NOLINT: numbers are dimensions
  bool known() const { return value >= 0; }
  // f(value), or a symbol of its own.
  template <class F>
  Dim map(const F& f) const {
    return known() ? Dim(f(value)) : Dim();
  }
};
using Dims = std::vector<Dim>;

class ShapeContext {
 public:
  ShapeContext(const char* name, const Argument* inputs, const Argument* outputs, OrtShapeInferContext* context)
      : name_(name), inputs_(inputs), outputs_(outputs), context_(context) {}
  virtual ~ShapeContext() = default;
  // Empty where the rank is not known (ORT says rank 0 then). Another rank is an error.
  Dims input(size_t index, size_t rank) const;
  virtual Dims input(size_t index) const;
  virtual void output(size_t index, const Dims& dims);
  const char* op() const { return name_; }

 private:
  int32_t element_type(int32_t type) const;
  const char* name_;
  const Argument* inputs_;
  const Argument* outputs_;
  OrtShapeInferContext* context_;
};

// ---- a run

class Context {
 public:
  Context(const char* op, const Argument* inputs, OrtKernelContext* context, bool cuda)
      : op_(op), inputs_(inputs), context_(context), cuda_(cuda) {}
  bool cuda() const { return cuda_; }
  const char* op() const { return op_; }

  Tensor input(size_t index) const;  // present is false for an optional input that is not given
  Tensor input(size_t index, size_t rank) const;
  const int32_t* int32(const Tensor& t, const std::vector<int64_t>& shape) const;  // of exactly this shape
  size_t outputs() const;
  void* output(size_t index, const std::vector<int64_t>& shape);
  void copy(void* to, const void* from, int64_t bytes) const;
  Parallel parallel() const;
  void* stream() const;
  const OrtMemoryInfo* memory() const { return memory_; }  // of the first output made
  const OrtKernelContext* get() const { return context_; }

 private:
  const char* op_;
  const Argument* inputs_;
  OrtKernelContext* context_;
  bool cuda_;
  const OrtMemoryInfo* memory_ = nullptr;
};

// Scratch from ORT's allocator, given back on leaving the scope; on CUDA it is tied to the run's stream, so that no
// other stream is handed the memory while kernels of this one still use it. Make an output first: it says where.
class Workspace {
 public:
  Workspace(const Context& context, int64_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

// Runs kernels that take a workspace.
template <class Op, class Params>
void run(const Context& c, const Op& kernels, const Params& p, int64_t workspace_bytes) {
  const Workspace scratch(c, workspace_bytes);
  check(kernels(c, &p, scratch.data()));
}

// An NHWC value as kernels see it: NCHW-shaped. `channels_first`: the value itself is NCHW.
TensorView plane_view(const Tensor& t, bool channels_first = false);
TensorView plane_view(void* data, const std::vector<int64_t>& shape, DType dtype, bool channels_first = false);

// The inputs indices, count and block_map, at these positions.
struct ActivePositions {
  size_t indices, count, block_map;
};
struct ActiveInputs {
  ActiveView view;
  int64_t batch;
};
// The grid has the block map's counts (`plane` null) or those of a plane (height, width).
ActiveInputs active_inputs(const Context& c, const ActivePositions& at, const GridAttributes& grid,
                           const int64_t* plane);

// ---- the OrtCustomOp of an op

std::unique_ptr<Attributes> attributes_of(const char* op, const OrtKernelInfo* info, bool cuda);
std::unique_ptr<Attributes> attributes_of(const char* op, const OrtShapeInferContext* context);

template <class Op>
class OrtOp final : public OrtCustomOp {
 public:
  OrtOp(const Runtime& runtime, const Types& types, bool cuda)
      : OrtCustomOp{}, runtime_(runtime), types_(types), cuda_(cuda) {
    version = kApiVersion;
    GetName = [](const OrtCustomOp*) { return Op::kName; };
    GetExecutionProviderType = [](const OrtCustomOp* op) {
      return self(op).cuda_ ? "CUDAExecutionProvider" : "CPUExecutionProvider";
    };
    GetInputType = [](const OrtCustomOp* op, size_t k) { return self(op).types_(Op::kInputs[k].type); };
    GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Op::kInputs); };
    GetOutputType = [](const OrtCustomOp* op, size_t k) { return self(op).types_(Op::kOutputs[k].type); };
    GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Op::kOutputs); };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t k) -> int32_t { return Op::kInputs[k].characteristic; };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t k) -> int32_t { return Op::kOutputs[k].characteristic; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t k) -> int32_t { return Op::kInputs[k].memory; };
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
    CreateKernelV2 = [](const OrtCustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
      return guarded(self(op).runtime_, [&] {
        const bool cuda = self(op).cuda_;
        *kernel = new Kernel{Op(*attributes_of(Op::kName, info, cuda)), cuda, self(op).runtime_};
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const Kernel& k = *static_cast<const Kernel*>(kernel);
      return guarded(k.runtime, [&] {
        Context c(Op::kName, std::data(Op::kInputs), context, k.cuda);
        k.op.compute(c);
      });
    };
    if (runtime.infers_absent_inputs || !has_optional_inputs()) {
      InferOutputShapeFn = [](const OrtCustomOp* op, OrtShapeInferContext* context) {
        return guarded(self(op).runtime_, [&] {
          ShapeContext shapes(Op::kName, std::data(Op::kInputs), Op::kOutputs, context);
          Op(*attributes_of(Op::kName, context)).infer(shapes);
        });
      };
    }
    if constexpr (Op::kInPlace >= 0) {
      GetMayInplace = [](int** inputs, int** outputs) -> size_t {
        static int input = Op::kInPlace, output = 0;
        *inputs = &input;
        *outputs = &output;
        return 1;
      };
      ReleaseMayInplace = [](int*, int*) {};
    }
  }

 private:
  struct Kernel {
    Op op;
    bool cuda;
    const Runtime& runtime;
  };
  static constexpr bool has_optional_inputs() {
    for (const Argument& a : Op::kInputs)
      if (a.characteristic == kOptional) return true;
    return false;
  }
  static const OrtOp& self(const OrtCustomOp* op) { return *static_cast<const OrtOp*>(op); }
  const Runtime& runtime_;
  Types types_;
  bool cuda_;
};

// What an op takes and gives, without a runtime.
struct OpDescription {
  const char* name;
  std::vector<Argument> inputs, outputs;
  std::vector<Types> types;
  void (*make)(const Attributes&);  // reads its attributes
  void (*infer)(const Attributes&, ShapeContext&);
};

// The op for every type and execution provider, or what it is.
template <class Op>
void add_op(const Runtime& runtime) {
  if (runtime.describe) {
    (*runtime.describe)({Op::kName,
                         {std::begin(Op::kInputs), std::end(Op::kInputs)},
                         {std::begin(Op::kOutputs), std::end(Op::kOutputs)},
                         {std::begin(Op::kTypes), std::end(Op::kTypes)},
                         [](const Attributes& a) { Op{a}; },
                         [](const Attributes& a, ShapeContext& s) { Op(a).infer(s); }});
    return;
  }
  for (const Types& types : Op::kTypes) {
    check(api->CustomOpDomain_Add(runtime.domain, new OrtOp<Op>(runtime, types, false)));
#ifdef SBNET_WITH_CUDA
    check(api->CustomOpDomain_Add(runtime.domain, new OrtOp<Op>(runtime, types, true)));
#endif
  }
}

template <class... Ops>
void add_all(const Runtime& runtime) {
  (add_op<Ops>(runtime), ...);
}

// What SBNET_ORT_OPS registers, file by file.
using AddOps = void (*)(const Runtime& runtime);
bool register_ops(AddOps add);
void add_registered_ops(const Runtime& runtime);

}  // namespace sbnet::ort

#define SBNET_ORT_OPS(...) \
  [[maybe_unused]] static const bool kSbnetOrtOps = sbnet::ort::register_ops(sbnet::ort::add_all<__VA_ARGS__>);

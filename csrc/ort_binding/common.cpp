#include "ort_binding/common.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "core/grid.h"
#include "core/masked/fill.h"

namespace sbnet::ort {

thread_local const Api* api = nullptr;

void check(OrtStatus* status) {
  if (!status) return;
  const std::string text = api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  raise(text);
}

// ---- shapes

Dims ShapeContext::input(size_t index) const {
  size_t inputs = 0;
  check(api->ShapeInferContext_GetInputCount(context_, &inputs));
  if (index >= inputs) return {};
  OrtTensorTypeAndShapeInfo* info = nullptr;  // belongs to the context
  check(api->ShapeInferContext_GetInputTypeShape(context_, index, &info));
  if (!info) return {};
  size_t rank = 0;
  check(api->GetDimensionsCount(info, &rank));
  std::vector<int64_t> values(rank);
  std::vector<const char*> symbols(rank, nullptr);
  if (rank) {
    check(api->GetDimensions(info, values.data(), rank));
    check(api->GetSymbolicDimensions(info, symbols.data(), rank));
  }
  Dims dims(rank);
  for (size_t d = 0; d < rank; ++d) {
    dims[d].value = values[d];
    if (values[d] < 0 && symbols[d]) dims[d].symbol = symbols[d];
  }
  return dims;
}

Dims ShapeContext::input(size_t index, size_t rank) const {
  Dims dims = input(index);
  if (!dims.empty() && dims.size() != rank)
    raise_expected(name_, inputs_[index].name, rank, " dimensions, got ", dims.size());
  return dims;
}

// ORT infers with the op of one type for all: T is what the inputs that are of type T have.
int32_t ShapeContext::element_type(int32_t type) const {
  if (type >= 0) return type;
  size_t inputs = 0;
  check(api->ShapeInferContext_GetInputCount(context_, &inputs));
  for (size_t k = 0; k < inputs; ++k) {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    if (inputs_[k].type != type) continue;
    check(api->ShapeInferContext_GetInputTypeShape(context_, k, &info));
    int32_t found = 0;
    if (info) check(api->GetTensorElementType(info, &found));
    if (found) return found;
  }
  raise("sbnet::", name_, ": expected inputs of the output's element type, got none");
}

void ShapeContext::output(size_t index, const Dims& dims) {
  // ORT takes equal symbols for equal sizes: what has no name gets one that nothing else has.
  static std::atomic<uint64_t> next{0};
  std::vector<int64_t> values;
  std::vector<std::string> names;
  for (const Dim& d : dims) {
    values.push_back(d.value);
    names.push_back(d.known()          ? ""
                    : d.symbol.empty() ? "sbnet_" + std::to_string(next.fetch_add(1, std::memory_order_relaxed))
                                       : d.symbol);
  }
  std::vector<const char*> symbols;
  for (const std::string& s : names) symbols.push_back(s.c_str());
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api->CreateTensorTypeAndShapeInfo(&info));
  const auto release = [](OrtTensorTypeAndShapeInfo* i) { api->ReleaseTensorTypeAndShapeInfo(i); };
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(info, release);
  size_t argument = 0;
  while (argument < index && outputs_[argument].characteristic != kVariadic) ++argument;
  check(api->SetTensorElementType(info, element_type(outputs_[argument].type)));
  check(api->SetDimensions(info, values.data(), values.size()));
  check(api->SetSymbolicDimensions(info, symbols.data(), symbols.size()));
  check(api->ShapeInferContext_SetOutputTypeShape(context_, index, info));
}

// ---- values

namespace {

DType to_dtype(const char* op, const char* argument, int32_t type) {
  constexpr std::pair<ElementType, DType> kDTypes[] = {
      {kFloat, DType::kF32}, {kFloat16, DType::kF16}, {kBFloat16, DType::kBF16}, {kDouble, DType::kF64},
      {kBool, DType::kBool}, {kUInt8, DType::kU8},    {kInt8, DType::kI8},       {kInt32, DType::kI32},
      {kInt64, DType::kI64}, {kFloat8, DType::kF8}};
  for (const auto& [theirs, dtype] : kDTypes)
    if (type == theirs) return dtype;
  raise_expected(op, argument, "a real element type, got ONNX type ", type);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? "," : "") + std::to_string(shape[d]);
  return text + "]";
}

}  // namespace

int64_t Tensor::elements() const {
  int64_t n = 1;
  for (const int64_t d : shape) n = size_product({n, d});
  return n;
}

Tensor tensor_of(const char* op, const char* name, const OrtValue* value) {
  Tensor t = {name};
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api->GetTensorTypeAndShape(value, &info));
  const auto release = [](OrtTensorTypeAndShapeInfo* i) { api->ReleaseTensorTypeAndShapeInfo(i); };
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(info, release);
  int32_t type = 0;
  size_t rank = 0;
  check(api->GetTensorElementType(info, &type));
  check(api->GetDimensionsCount(info, &rank));
  t.shape.resize(rank);
  if (rank) check(api->GetDimensions(info, t.shape.data(), rank));
  t.dtype = to_dtype(op, name, type);
  void* data = nullptr;
  check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  t.data = address_of(data);
  t.present = true;
  return t;
}

Tensor Context::input(size_t index) const {
  Tensor t = {inputs_[index].name};
  size_t count = 0;
  check(api->KernelContext_GetInputCount(context_, &count));
  const OrtValue* value = nullptr;
  if (index < count) check(api->KernelContext_GetInput(context_, index, &value));
  if (!value) {
    if (inputs_[index].characteristic == kRequired) raise_expected(op_, t.name, "an input, got none");
    return t;
  }
  return tensor_of(op_, t.name, value);
}

Tensor Context::input(size_t index, size_t rank) const {
  Tensor t = input(index);
  if (t.present && t.shape.size() != rank) raise_expected(op_, t.name, rank, " dimensions, got ", t.shape.size());
  return t;
}

const int32_t* Context::int32(const Tensor& t, const std::vector<int64_t>& shape) const {
  if (t.dtype != DType::kI32 || t.shape != shape)
    raise_expected(op_, t.name, "int32", shape_text(shape), ", got ", dtype_name(t.dtype), shape_text(t.shape));
  return static_cast<const int32_t*>(t.data);
}

size_t Context::outputs() const {
  size_t count = 0;
  check(api->KernelContext_GetOutputCount(context_, &count));
  return count;
}
void* Context::output(size_t index, const std::vector<int64_t>& shape) {
  OrtValue* value = nullptr;
  if (index < outputs()) check(api->KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
  if (!value) raise("sbnet::", op_, ": output ", index, ": expected a name, got none");
  if (!memory_) check(api->GetTensorMemoryInfo(value, &memory_));
  void* data = nullptr;
  check(api->GetTensorMutableData(value, &data));
  return data;
}

void Context::copy(void* to, const void* from, int64_t bytes) const {
  if (to == from || !bytes) return;
#ifdef SBNET_WITH_CUDA
  if (cuda_) return check(sbnet_copy_cuda(to, from, bytes, stream()));
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void* Context::stream() const {
  void* stream = nullptr;
  check(api->KernelContext_GetGPUComputeStream(context_, &stream));
  return stream;
}

// ORT does not tell how many threads its pool has. Cutting the work into at most as many ranges as there are cores
// bounds how many run at once, which is what kernels size their scratch by.
Parallel Context::parallel() const {
  static const int32_t threads = std::clamp<int32_t>(static_cast<int32_t>(std::thread::hardware_concurrency()), 1, 256);
  const auto run = [](void* pool, int64_t n, int64_t grain, void (*body)(void*, int64_t, int64_t), void* arg) {
    struct Job {
      void (*body)(void*, int64_t, int64_t);
      void* arg;
      int64_t n, ranges;
    };
    const int64_t ranges = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, threads);
    Job job{body, arg, n, ranges};
    const auto range = [](void* p, size_t k) {
      const Job& j = *static_cast<const Job*>(p);
      const int64_t i = static_cast<int64_t>(k), each = j.n / j.ranges, more = j.n % j.ranges;
      const int64_t begin = i * each + std::min(i, more);
      j.body(j.arg, begin, begin + each + (i < more ? 1 : 0));
    };
    const OrtKernelContext* context = static_cast<const Context*>(pool)->context_;
    if (!succeeded(api->KernelContext_ParallelFor(context, range, static_cast<size_t>(ranges), 0, &job)))
      for (int64_t k = 0; k < ranges; ++k) range(&job, static_cast<size_t>(k));
  };
  return Parallel{run, const_cast<Context*>(this), threads};
}

Workspace::Workspace(const Context& c, int64_t bytes) {
  if (bytes <= 0) return;
  check(api->KernelContext_GetAllocator(c.get(), c.memory(), &allocator_));
  const size_t size = static_cast<size_t>(bytes);
  // ORT leaves freeing the scratch buffer to us; the plain allocator knows no stream.
  OrtStatus* status = c.cuda() ? api->KernelContext_GetScratchBuffer(c.get(), c.memory(), size, &data_)
                               : api->AllocatorAlloc(allocator_, size, &data_);
  if (!status && data_) return;
  api->ReleaseAllocator(allocator_);
  check(status);
  raise_expected(c.op(), "workspace", "memory for ", bytes, " bytes, got none");
}

Workspace::~Workspace() {
  if (data_) succeeded(api->AllocatorFree(allocator_, data_));
  if (allocator_) api->ReleaseAllocator(allocator_);
}

TensorView plane_view(void* data, const std::vector<int64_t>& s, DType dtype, bool channels_first) {
  const int64_t last = s[3], area = size_product({s[2], s[3]}), image = size_product({s[1], area});
  if (channels_first) return {data, {s[0], s[1], s[2], s[3]}, {image, area, last, 1}, dtype};
  return {data, {s[0], s[3], s[1], s[2]}, {image, 1, area, last}, dtype};
}

TensorView plane_view(const Tensor& t, bool channels_first) {
  return plane_view(const_cast<void*>(t.data), t.shape, t.dtype, channels_first);
}

ActiveInputs active_inputs(const Context& c, const ActivePositions& at, const GridAttributes& attributes,
                           const int64_t* plane) {
  const Tensor indices = c.input(at.indices, 2), count = c.input(at.count), map = c.input(at.block_map, 3);
  ActiveInputs a = {};
  a.batch = map.shape[0];
  a.view.capacity = indices.shape[0];
  a.view.grid = plane ? attributes.over(plane[0], plane[1]) : attributes.counted(map.shape[1], map.shape[2]);
  a.view.indices = c.int32(indices, {a.view.capacity, 3});
  a.view.count = c.int32(count, {1});
  a.view.block_map = c.int32(map, {a.batch, a.view.grid.count[0], a.view.grid.count[1]});
  return a;
}

}  // namespace sbnet::ort

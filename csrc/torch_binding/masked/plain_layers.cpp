// The ops of core/masked/plain_layers.h, functional and in place, by what they say of themselves.
#include "core/masked/plain_layers.h"

#include "torch_binding/masked/layer.h"

namespace sbnet::binding {
namespace {

// Their tensors and numbers as a schema names them, of the functional form or the one in place.
struct Schema {
  bool functional;
  std::string words;

  void add(const char* type, const std::string& name) { words += std::string(", ") + type + " " + name; }
  void weight(const char* name, TensorView*, const void**) { add("Tensor", name); }
  void scales(const char* name, const float**) { add("Tensor", name); }
  void vector(const char* name, const void**, DType*, const int64_t* = nullptr) { add("Tensor?", name); }
  void plane(const char* name, TensorView*) { add("Tensor?", name); }
  void map(const char* name, TensorView*) { add("Tensor?", name); }
  void dtype(const char* name, DType*) { add("ScalarType?", name); }
  void integer(const char* name, int32_t*, int32_t) { add("SymInt", name); }
  void optional_integer(const char* name, int32_t*) { add("int?", name); }
  void real(const char* name, float*, float) { add("float", name); }
  void flag(const char* name, bool*, bool) { add("bool", name); }
  template <class Parse>
  void text(const char* name, const char*, const Parse&) {
    add("str", std::strcmp(name, "mode") ? name : "method");  // torch's modes take no op's `mode` by its name
  }
  void sides(const char*, int64_t*) {
    if (functional) add("SymInt[]", "output_size");
  }
  template <size_t kCount>
  void required(const char* name, int32_t (&)[kCount]) {
    add("SymInt[]", name);
  }
  template <size_t kCount, class Otherwise>
  void integers(const char* name, int32_t (&to)[kCount], const Otherwise&) {
    required(name, to);
  }
};

// Arguments as torch hands them over. All are taken, which frees them, before an error is raised.
class Arguments {
 public:
  Arguments(const char* op, StableIValue* first, bool functional) : op_(op), next_(first), functional_(functional) {}

  template <class T>
  T next() {
    return torch::stable::detail::to<T>(*next_++);
  }
  void integer(const char* name, int32_t* to, int32_t) { put(name, next<int64_t>(), to); }
  void optional_integer(const char* name, int32_t* to) {
    const auto value = next<std::optional<int64_t>>();
    if (value && !*value) note(SBNET_INVALID("%s: %s: expected anything but 0, got 0", op_, name));
    put(name, value.value_or(0), to);
  }
  void dtype(const char* name, DType* to) {
    *to = to_dtype(op_, name, next<std::optional<ScalarType>>().value_or(ScalarType::Float));
  }
  void real(const char*, float* to, float) { *to = static_cast<float>(next<double>()); }
  void flag(const char*, bool* to, bool) { *to = next<bool>(); }
  template <class Parse>
  void text(const char*, const char*, const Parse& parse) {
    note(parse(op_, next<std::string>().c_str()));
  }
  void sides(const char* name, int64_t* to) {
    if (!functional_) return;
    int32_t side[2] = {1, 1};
    required(name, side);
    if (side[0] < 1 || side[1] < 1)
      note(SBNET_INVALID("%s: %s: expected at least 1, got %d, %d", op_, name, side[0], side[1]));
    to[0] = side[0], to[1] = side[1];
  }
  template <size_t kCount>
  void required(const char* name, int32_t (&to)[kCount]) {
    const Ints values = next<Ints>();
    if (values.size() != kCount)
      return note(SBNET_INVALID("%s: %s: expected %zu numbers, got %zu", op_, name, kCount, values.size()));
    for (size_t k = 0; k < kCount; ++k) put(name, values[k], &to[k]);
  }
  template <size_t kCount, class Otherwise>
  void integers(const char* name, int32_t (&to)[kCount], const Otherwise&) {
    required(name, to);
  }
  const Status& status() const { return status_; }

 private:
  void note(const Status& status) {
    if (status_.ok()) status_ = status;
  }
  void put(const char* name, int64_t value, int32_t* to) {
    if (value < INT32_MIN || value > INT32_MAX)
      note(SBNET_INVALID("%s: %s: expected numbers of 32 bits, got %lld", op_, name, static_cast<long long>(value)));
    *to = static_cast<int32_t>(value);
  }

  const char* op_;
  StableIValue* next_;
  bool functional_;
  Status status_ = ok_status();
};

using Further = std::vector<std::optional<Tensor>>;

// Their further tensors: taken with the arguments, read when y is known.
struct TakeTensors {
  Arguments& in;
  Further all;
  void needed() { all.push_back(in.next<Tensor>()); }
  void optional() { all.push_back(in.next<std::optional<Tensor>>()); }
  void weight(const char*, TensorView*, const void**) { needed(); }
  void scales(const char*, const float**) { needed(); }
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) { optional(); }
  void plane(const char*, TensorView*) { optional(); }
  void map(const char*, TensorView*) { optional(); }
};
// The weights, whose sizes say which y has.
struct ReadWeights {
  const char* op;
  std::optional<Tensor>* next;
  void weight(const char* name, TensorView* to, const void** packed) {
    check_rank(op, name, **next, 4);
    // Kernels that take packed ones need K,R,S,C order; weights kept in channels_last skip this copy.
    if (packed) *next = torch::stable::contiguous(**next, torch::headeronly::MemoryFormat::ChannelsLast);
    *to = view4(op, name, **next++);
  }
  void scales(const char*, const float**) { ++next; }
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) { ++next; }
  void plane(const char*, TensorView*) { ++next; }
  void map(const char*, TensorView*) { ++next; }
};
struct ReadTensors {
  const Call& call;
  const TensorView& y;
  int64_t channels;  // that y has by x and the numbers
  std::optional<Tensor>* next;
  struct {
    const char* name;
    const DType* dtype;
  } seen[4] = {};  // vectors that were given
  int count = 0;
  void weight(const char* name, TensorView*, const void**) { call.same_device(name, **next++); }
  void scales(const char* name, const float** to) {
    DType dtype = DType::kF32;
    *to = static_cast<const float*>(bias_of(call, name, *next++, channels, &dtype));
    SBNET_TORCH_EXPECT(dtype == DType::kF32, call.op(), std::string(name) + ": dtype", "float32, got ",
                       dtype_name(dtype));
  }
  void vector(const char* name, const void** to, DType* dtype, const int64_t* elements = nullptr) {
    DType own = y.dtype;
    *to = bias_of(call, name, *next, elements ? *elements : channels, &own);
    if (!*next++) return;
    for (int k = 0; k < count; ++k)
      SBNET_TORCH_EXPECT(seen[k].dtype != dtype || own == *dtype, call.op(), std::string(name) + ": dtype", "that of ",
                         seen[k].name, ", ", dtype_name(*dtype), ", got ", dtype_name(own));
    *dtype = own;
    seen[count++] = {name, dtype};
  }
  void plane(const char* name, TensorView* to) {
    if (*next) {
      call.same_device(name, **next);
      *to = view4(call.op(), name, **next);
    }
    ++next;
  }
  void map(const char* name, TensorView* to) {
    plane(name, to);
    if (to->data) broadcast(y, to);
  }
};
// What was packed of weights, which a form in place takes: nothing on CUDA, whose kernels read weights as they are.
struct PackedSchema {
  std::string words;
  void weight(const char* name, TensorView*, const void** packed) {
    if (packed) words += std::string(", Tensor? packed") + (name + std::strlen("weight"));
  }
  void scales(const char*, const float**) {}
  void vector(const char*, const void**, DType*, const int64_t* = nullptr) {}
  void plane(const char*, TensorView*) {}
  void map(const char*, TensorView*) {}
};
struct TakePacked : PackedSchema {
  Arguments& in;
  Further& all;
  TakePacked(Arguments& arguments, Further& further) : in(arguments), all(further) {}
  void weight(const char*, TensorView*, const void** packed) {
    if (packed) all.push_back(in.next<std::optional<Tensor>>());
  }
};
struct ReadPacked : PackedSchema {
  const Call& call;
  int32_t groups;
  const std::optional<Tensor>*next, *end;
  ReadPacked(const Call& called, int32_t of, const std::optional<Tensor>* first, const std::optional<Tensor>* last)
      : call(called), groups(of), next(first), end(last) {}
  void weight(const char*, TensorView* weight, const void** to) {
    if (!to || next == end || !*next++) return;
    const Tensor& packed = *next[-1];
    call.same_device("packed", packed);
    const int64_t wanted = call.cuda() ? 0 : packed_bytes({*weight, groups});
    SBNET_TORCH_EXPECT(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() && packed.numel() == wanted,
                       call.op(), "packed", "pack_conv_weight(weight, groups), ", wanted, " bytes, got ",
                       packed.numel(), " elements");
    *to = wanted ? packed.const_data_ptr() : nullptr;
  }
};

// `further`: its tensors, the first `tensors` of them; the others were packed.
template <class L>
void run_layer(const LayerCall& layer, Further further, size_t tensors, typename L::Params p) {
  const Call call(layer.op, "x", layer.x);
  set_layer(call, layer, &p);
  int64_t channels = p.y.size[1];
  check(layer.op, L::size(p, 1, p.x.size[1], &channels));
  ReadTensors read{call, p.y, channels, further.data()};
  L::tensors(p, read);
  if constexpr (std::is_null_pointer_v<decltype(L::workspace)>) {
    check(layer.op, run(call, L::kernels, p, layer, further));
  } else {
    check(layer.op, validate(p));  // what the sizes of workspaces and of packed weights are of
    ReadPacked packed(call, L::groups(p), further.data() + tensors, further.data() + further.size());
    L::tensors(p, packed);
    const Tensor scratch = workspace(layer.x, workspace_bytes<L>(call, p));
    check(layer.op, run_in(call, L::kernels, p, scratch, layer, further));
  }
  if constexpr (std::is_same_v<typename L::Params, Conv2dParams>) {
    Recording* recording = Recording::current();
    if (recording && !call.cuda()) recording->describe(p);
  }
}

ScalarType to_scalar(DType dtype) {
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16,     ScalarType::Double,
                                   ScalarType::Bool,  ScalarType::Byte, ScalarType::Char,         ScalarType::Short,
                                   ScalarType::Int,   ScalarType::Long, ScalarType::Float8_e4m3fn};
  return kTypes[static_cast<int>(dtype)];
}

template <class L>
void functional(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(L::kName, stack, true);
  const Tensor x = in.next<Tensor>();
  typename L::Params p = {};
  TakeTensors further{in, {}};
  L::tensors(p, further);
  const Tensor indices = in.next<Tensor>(), count = in.next<Tensor>(), block_map = in.next<Tensor>();
  const Ints grid = in.next<Ints>();
  L::numbers(p, in);
  std::optional<Tensor> x_list[3];
  Ints x_grid;
  if (L::kListOfX) {
    for (auto& tensor : x_list) tensor = in.next<std::optional<Tensor>>();
    x_grid = in.next<Ints>();
  }
  check(in.status());
  check_rank(L::kName, "x", x, 4);
  check_list_of_x(L::kName, x, x_list[0], x_list[1], x_list[2], x_grid);
  ReadWeights weights{L::kName, further.all.data()};
  L::tensors(p, weights);
  check(L::check(p));
  int64_t size[4];
  for (int d = 1; d < 4; ++d) check(L::size(p, d, x.size(d), &size[d]));
  ScalarType dtype = x.scalar_type();
  if (L::kOutput == OutputType::kOfWeight) dtype = further.all[0]->scalar_type();
  if (L::kOutput == OutputType::kTold) dtype = to_scalar(p.y.dtype);
  const Tensor y = zeros_for(L::kName, x, size[1], {size[2], size[3]}, block_map, grid, dtype);
  LayerCall call = {L::kName, x, indices, count, grid, y};
  if (L::kReadsMap) call.block_map = block_map;
  run_layer<L>(call, further.all, further.all.size(), p);
  stack[0] = torch::stable::detail::from(y);
}

template <class L>
void in_place(StableIValue* stack, uint64_t, uint64_t) {
  static const std::string op = std::string(L::kName) + "_";
  Arguments in(op.c_str(), stack, false);
  const Tensor x = in.next<Tensor>();
  typename L::Params p = {};
  TakeTensors further{in, {}};
  L::tensors(p, further);
  const Tensor indices = in.next<Tensor>(), count = in.next<Tensor>();
  std::optional<Tensor> block_map;
  if (L::kReadsMap) block_map = in.next<Tensor>();
  const Ints grid = in.next<Ints>();
  L::numbers(p, in);
  const Tensor out = in.next<Tensor>();
  const auto pixels = in.next<std::optional<Tensor>>(), pixel_count = in.next<std::optional<Tensor>>();
  const size_t tensors = further.all.size();
  TakePacked packed(in, further.all);
  L::tensors(p, packed);
  check(in.status());
  check_rank(op.c_str(), "x", x, 4);
  if (block_map) check_batch(op.c_str(), *block_map, x);
  ReadWeights weights{op.c_str(), further.all.data()};
  L::tensors(p, weights);
  check(op.c_str(), L::check(p));
  run_layer<L>({op.c_str(), x, indices, count, grid, out, pixels, pixel_count, block_map}, further.all, tensors, p);
}

template <class L>
void add(OpList& ops) {
  typename L::Params p = {};
  for (const bool functional_form : {true, false}) {
    if (!functional_form && !L::kInPlace) continue;
    Schema tensors = {functional_form, ""}, numbers = tensors;
    PackedSchema packed;
    L::tensors(p, tensors);
    L::numbers(p, numbers);
    L::tensors(p, packed);
    const std::string map = functional_form || L::kReadsMap ? ", Tensor block_map" : "";
    const std::string both =
        "(Tensor x" + tensors.words + ", Tensor indices, Tensor count" + map + ", SymInt[] grid" + numbers.words;
    const std::string list = ", Tensor? x_indices, Tensor? x_count, Tensor? x_map, SymInt[] x_grid";
    if (functional_form)
      ops.add((L::kName + both + (L::kListOfX ? list : "") + ") -> Tensor").c_str(), &functional<L>);
    else
      ops.add((std::string(L::kName) + "_" + both + ", Tensor(a!) out, Tensor? fringe_pixels, Tensor? fringe_count" +
               packed.words + ") -> ()")
                  .c_str(),
              &in_place<L>);
  }
}

template <class... L>
void add_all(OpList& ops, LayerList<L...>) {
  (add<L>(ops), ...);
}

SBNET_TORCH_OPS(ops) { add_all(ops, PlainLayers()); }

}  // namespace
}  // namespace sbnet::binding

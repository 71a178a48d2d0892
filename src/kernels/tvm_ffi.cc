// SPDX-License-Identifier: Apache-2.0
// A call of a function of tvm_ffi, by the structs of its C ABI.
#include "kernels/tvm_ffi.h"

#include <algorithm>
#include <atomic>
#include <memory>

namespace callgate::tvm {

void* Function::OwnTensors::make(const Tensor& view) {
  struct Lent : ManagedTensor {
    std::vector<std::int64_t> extents;
  };
  auto lent = std::make_unique<Lent>();
  const auto rank = static_cast<std::size_t>(view.rank);
  lent->extents.assign(view.shape, view.shape + rank);
  lent->extents.insert(lent->extents.end(), view.strides, view.strides + rank);
  lent->tensor = view;
  lent->tensor.shape = lent->extents.data();
  lent->tensor.strides = lent->extents.data() + rank;
  lent->deleter = [](ManagedTensor* made) { delete static_cast<Lent*>(made); };
  void* tensor = nullptr;
  if (api_.tensor_from_dlpack(lent.get(), 0, 0, &tensor) != 0) return nullptr;
  lent.release();  // NOLINT: the tensor's now
  return objects_.data()[count_++] = tensor;
}

bool Function::OwnTensors::kept() const noexcept {
  return std::any_of(objects_.data(), objects_.data() + count_, [](void* object) {
    auto& counts = static_cast<Object*>(object)->counts;
    return static_cast<std::uint32_t>(std::atomic_ref(counts).load(std::memory_order_relaxed)) > 1;
  });
}

const callgate_array* Function::arrays_of(const callgate_call& call, std::int32_t kind,
                                          std::size_t parameter) noexcept {
  // NOLINTNEXTLINE(clang-analyzer-core.NullPointerArithm): a call with operands has them
  if (kind == CALLGATE_INS) return call.operands + call.starts[parameter];
  return kind == CALLGATE_OUTS ? call.results + call.starts[parameter] : nullptr;
}

Tensor Function::view(const callgate_array& array, const KernelFrame& frame,
                      std::int64_t* strides) noexcept {
  std::int64_t step = 1;
  for (std::int32_t axis = array.rank - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= array.dims[axis];
  }
  const auto dtype = static_cast<DType>(array.dtype);
  const Device device =
      frame.stream() == nullptr ? Device{kCpu, 0} : Device{kCuda, frame.ordinal()};
  return {array.data,
          device,
          array.rank,
          dlpack_code(dtype).value_or(0),  // Python has refused types without a code
          static_cast<std::uint8_t>(bits(dtype)),
          1,
          const_cast<std::int64_t*>(array.dims),
          strides,
          0};
}

std::int32_t Function::invoke(const callgate_call& call) const {
  std::size_t values = 0, extents = 0, characters = 0;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const callgate_array* arrays = arrays_of(call, kinds[i], i);
    for (std::int32_t k = 0; arrays != nullptr && k < call.counts[i]; ++k)
      extents += static_cast<std::size_t>(arrays[k].rank);
    if (kinds[i] == CALLGATE_ATTR_STRING) characters += call.attributes[call.starts[i]].count + 1;
    values += static_cast<std::size_t>(call.counts[i]);
  }
  const auto& [safe_call, cpp_call] = content<FunctionContent>(handle);
  const KernelFrame& frame = KernelFrame::of(&call);
  SmallBuffer<Any, 16> arguments(values);
  SmallBuffer<Tensor, 16> views(values);
  SmallBuffer<std::int64_t, 64> strides(extents);
  SmallBuffer<char, 64> text(characters);
  OwnTensors own(api, cpp_call == nullptr ? values : 0);
  Any* argument = arguments.data();
  Tensor* tensor = views.data();
  std::int64_t* stride = strides.data();
  char* letter = text.data();
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const callgate_array* arrays = arrays_of(call, kinds[i], i);
    if (arrays == nullptr) *argument++ = number_or_text(call.attributes[call.starts[i]], letter);
    for (std::int32_t k = 0; arrays != nullptr && k < call.counts[i]; ++k, ++tensor, ++argument) {
      *tensor = view(arrays[k], frame, stride);
      stride += arrays[k].rank;
      *argument = {cpp_call == nullptr ? kTensor : kView, 0, {}};
      argument->pointer = cpp_call == nullptr ? own.make(*tensor) : tensor;
      if (argument->pointer == nullptr) [[unlikely]]
        return fail(call, raised());
    }
  }
  Any result{kNone, 0, {}};
  StreamScope stream(api, frame);
  if (safe_call(handle, arguments.data(), static_cast<std::int32_t>(values), &result) != 0)
      [[unlikely]]
    return fail(call, raised());
  if (result.type >= kFirstObject) [[unlikely]] {
    api.object_dec_ref(const_cast<void*>(result.pointer));
    return fail(call,
                "expected a function that writes its results into the given arrays and returns "
                "nothing, got one that returns an object");
  }
  if (own.kept()) [[unlikely]]
    return fail(call,
                "expected a function that keeps no array after it returns, since their memory is "
                "XLA's, got one that does; keep a copy instead");
  return 0;
}

Any Function::number_or_text(const callgate_attribute& held, char*& letter) {
  Any value{kText, 0, {}};
  if (held.kind == CALLGATE_STRING) {
    value.pointer = letter;
    letter = std::copy_n(static_cast<const char*>(held.data), held.count, letter);
    *letter++ = 0;
    return value;
  }
  switch (static_cast<DType>(held.dtype)) {
    case DType::kPred:
      value.type = kBool;
      value.integer = *static_cast<const std::uint8_t*>(held.data) != 0;
      break;
    case DType::kS64:
      value.type = kInteger;
      value.integer = *static_cast<const std::int64_t*>(held.data);
      break;
    default: value.type = kReal; value.real = *static_cast<const double*>(held.data);
  }
  return value;
}

std::string Function::raised() const {
  void* error = nullptr;
  api.error_move_from_raised(&error);
  if (error == nullptr) return "it failed without a message";
  const auto& [kind, message] = content<ErrorContent>(error);
  std::string text(kind.data, kind.size);
  text.append(": ").append(message.data, message.size);
  api.object_dec_ref(error);
  return text;
}

std::int32_t Function::fail(const callgate_call& call, const std::string& message) {
  call.services->fail(&call, message.c_str());
  return 1;
}

}  // namespace callgate::tvm

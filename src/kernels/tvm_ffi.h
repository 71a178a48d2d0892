// SPDX-License-Identifier: Apache-2.0
// Functions of tvm_ffi (apache-tvm-ffi) as kernels: a call is a `callgate_function`, which hands
// XLA's arrays over as DLPack's tensors, without Python and without a copy.
//
// The structs are those of tvm_ffi's stable C ABI, version 0.1, as its c_api.h and DLPack's header
// describe them; whoever makes a `Function` has asked the library for its version. All of the
// library's own functions come as addresses: nothing is linked.
//
// Functions of C++ get views of tensors, which lie on the stack of the call. Functions of Python
// get tensors that own themselves, as they are used to; one that is kept behind its call, whose
// memory is XLA's again, is an error.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/array_view.h"
#include "core/lifetime.h"
#include "kernels/kernel_frame.h"

namespace callgate::tvm {

// --- The ABI -------------------------------------------------------------------------------------

struct Device {
  std::int32_t type, id;
};
inline constexpr std::int32_t kCpu = 1, kCuda = 2;  // of Device

struct Tensor {
  void* data;
  Device device;
  std::int32_t rank;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

// The head of every object; what the object holds follows it.
struct Object {
  std::uint64_t counts;
  std::int32_t type;
  std::uint32_t padding;
  void* deleter;
};
static_assert(sizeof(Object) == 24 && sizeof(Tensor) == 48);

// A value, and what it holds by its type.
struct Any {
  std::int32_t type;
  std::uint32_t padding;
  union {
    std::int64_t integer;
    double real;
    const void* pointer;
  };
};
static_assert(sizeof(Any) == 16);
inline constexpr std::int32_t kNone = 0, kInteger = 1, kBool = 2, kReal = 3, kView = 7, kText = 8,
                              kFirstObject = 64, kTensor = 70;  // of Any

struct Bytes {
  const char* data;
  std::size_t size;
};
struct ErrorContent {
  Bytes kind, message;  // and more
};
struct FunctionContent {
  // 0 for success; else the thread keeps an error.
  int (*safe_call)(void* self, const Any* arguments, std::int32_t count, Any* result);
  void* cpp_call;  // null for what was not written in C++
};

// A tensor on its way into the library, which takes it.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

template <typename Content>
const Content& content(const void* object) noexcept {
  return *reinterpret_cast<const Content*>(static_cast<const std::byte*>(object) + sizeof(Object));
}

// What a call needs of the library, by the names that it has there.
struct Api {
  void (*error_move_from_raised)(void** error);
  int (*object_dec_ref)(void* object);
  int (*tensor_from_dlpack)(ManagedTensor* from, std::int32_t alignment, std::int32_t contiguous,
                            void** tensor);
  int (*env_set_stream)(std::int32_t device_type, std::int32_t device_id, void* stream, void** old);
};

// --- Calls ---------------------------------------------------------------------------------------

// Who has made it keeps the function alive. `kinds`: of the parameters, in the function's order:
// INS, OUTS, ATTR_NUMBER (of dtype bool, int64 or float64) and ATTR_STRING.
struct Function {
  void* handle;
  Api api;
  std::vector<std::int32_t> kinds;

  // A `callgate_function`; the call's user data is the Function. Any thread, without the GIL.
  static std::int32_t run(const callgate_call* call) {
    return static_cast<const Function*>(call->user_data)->invoke(*call);
  }

 private:
  // XLA's stream as the one that tvm_ffi's functions launch on, on this thread, for one call.
  class StreamScope : Immovable {
   public:
    StreamScope(const Api& api, const KernelFrame& frame) : api_(api), frame_(frame) {
      if (frame.stream() != nullptr) set(frame.stream(), &old_);
    }
    ~StreamScope() {
      if (frame_.stream() != nullptr) set(old_, nullptr);
    }

   private:
    void set(void* stream, void** old) {
      (void)api_.env_set_stream(kCuda, frame_.ordinal(), stream, old);
    }
    const Api& api_;
    const KernelFrame& frame_;
    void* old_ = nullptr;
  };

  // The tensors of one call that own themselves.
  class OwnTensors : Immovable {
   public:
    OwnTensors(const Api& api, std::size_t most) : api_(api), objects_(most) {}
    ~OwnTensors() {
      for (std::size_t i = 0; i < count_; ++i) api_.object_dec_ref(objects_.data()[i]);
    }

    // Null where the library can't make one; the thread keeps its error.
    void* make(const Tensor& view) {
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

    // True if somebody else has one, too. Relaxed: whoever lets go of it now was told too late.
    bool kept() const noexcept {
      return std::any_of(objects_.data(), objects_.data() + count_, [](void* object) {
        auto& counts = static_cast<Object*>(object)->counts;
        return static_cast<std::uint32_t>(std::atomic_ref(counts).load(std::memory_order_relaxed)) >
               1;
      });
    }

   private:
    const Api& api_;
    SmallBuffer<void*, 16> objects_;
    std::size_t count_ = 0;
  };

  static const callgate_array* arrays_of(const callgate_call& call, std::int32_t kind,
                                         std::size_t parameter) noexcept {
    if (kind == CALLGATE_INS) return call.operands + call.starts[parameter];
    return kind == CALLGATE_OUTS ? call.results + call.starts[parameter] : nullptr;
  }

  // A view of an array, whose strides go to `strides`.
  static Tensor view(const callgate_array& array, const KernelFrame& frame,
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
            dlpack_code(dtype).value_or(0),  // Python has refused types that have none
            static_cast<std::uint8_t>(bits(dtype)),
            1,
            const_cast<std::int64_t*>(array.dims),
            strides,
            0};
  }

  std::int32_t invoke(const callgate_call& call) const {
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
                  "expected a function that writes its results into the arrays it is given and "
                  "returns nothing, got one that returns an object");
    }
    if (own.kept()) [[unlikely]]
      return fail(call,
                  "expected a function that keeps no array when it returns, since their memory is "
                  "XLA's, got one that does; a copy may be kept");
    return 0;
  }

  // A static value; text is copied to `letter`, with the zero that ends it, and moves that on.
  static Any number_or_text(const callgate_attribute& held, char*& letter) {
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

  // "ValueError: what it said", of the error that this thread keeps.
  std::string raised() const {
    void* error = nullptr;
    api.error_move_from_raised(&error);
    if (error == nullptr) return "it failed without a message";
    const auto& [kind, message] = content<ErrorContent>(error);
    std::string text(kind.data, kind.size);
    text.append(": ").append(message.data, message.size);
    api.object_dec_ref(error);
    return text;
  }

  static std::int32_t fail(const callgate_call& call, const std::string& message) {
    call.services->fail(&call, message.c_str());
    return 1;
  }
};

}  // namespace callgate::tvm

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

#include <cstddef>
#include <cstdint>
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

// The functions of the library that a call needs, by their names there.
struct Api {
  void (*error_move_from_raised)(void** error);
  int (*object_dec_ref)(void* object);
  int (*tensor_from_dlpack)(ManagedTensor* from, std::int32_t alignment, std::int32_t contiguous,
                            void** tensor);
  int (*env_set_stream)(std::int32_t device_type, std::int32_t device_id, void* stream, void** old);
};

// --- Calls ---------------------------------------------------------------------------------------

// Its maker keeps the function alive. `kinds`: of the parameters, in the function's order:
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
    void* make(const Tensor& view);

    // True if somebody else has one, too. Relaxed: whoever lets go of it now was told too late.
    bool kept() const noexcept;

   private:
    const Api& api_;
    SmallBuffer<void*, 16> objects_;
    std::size_t count_ = 0;
  };

  static const callgate_array* arrays_of(const callgate_call& call, std::int32_t kind,
                                         std::size_t parameter) noexcept;

  // A view of an array, whose strides go to `strides`.
  static Tensor view(const callgate_array& array, const KernelFrame& frame,
                     std::int64_t* strides) noexcept;

  std::int32_t invoke(const callgate_call& call) const;

  // A static value; text is copied to `letter`, with the zero that ends it, and moves that on.
  static Any number_or_text(const callgate_attribute& held, char*& letter);

  // "ValueError: what it said", of the error that this thread keeps.
  std::string raised() const;

  static std::int32_t fail(const callgate_call& call, const std::string& message);
};

}  // namespace callgate::tvm

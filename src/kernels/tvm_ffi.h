// SPDX-License-Identifier: Apache-2.0
// Functions of tvm_ffi (apache-tvm-ffi) as kernels. A call is a `callgate_function` that passes
// XLA's arrays as DLPack tensors, zero-copy and without Python.
//
// The structs are those of tvm_ffi's stable C ABI, version 0.1, from its c_api.h and DLPack's
// header. The creator of a `Function` has checked the library's version. All of the library's
// functions are passed as addresses, so nothing is linked.
//
// C++ functions get views of tensors, which are on the call's stack. Python functions get tensors
// that own themselves, as they expect. A tensor that is kept after its call raises an error,
// because XLA reuses its memory.
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

// The head of every object; its content follows.
struct Object {
  std::uint64_t counts;
  std::int32_t type;
  std::uint32_t padding;
  void* deleter;
};
static_assert(sizeof(Object) == 24 && sizeof(Tensor) == 48);

// A value, by its type.
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
  Bytes kind, message;  // further fields follow
};
struct FunctionContent {
  // Returns 0 for success; otherwise the thread stores an error.
  int (*safe_call)(void* self, const Any* arguments, std::int32_t count, Any* result);
  void* cpp_call;  // null for functions not written in C++
};

// A tensor that is passed to the library, which takes ownership.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

template <typename Content>
const Content& content(const void* object) noexcept {
  return *reinterpret_cast<const Content*>(static_cast<const std::byte*>(object) + sizeof(Object));
}

// The library's functions for calls, by their names there.
struct Api {
  void (*error_move_from_raised)(void** error);
  int (*object_dec_ref)(void* object);
  int (*tensor_from_dlpack)(ManagedTensor* from, std::int32_t alignment, std::int32_t contiguous,
                            void** tensor);
  int (*env_set_stream)(std::int32_t device_type, std::int32_t device_id, void* stream, void** old);
};

// --- Calls ---------------------------------------------------------------------------------------

// The creator keeps the function alive. `kinds`: of the parameters, in the function's order: INS,
// OUTS, ATTR_NUMBER (of dtype bool, int64 or float64) and ATTR_STRING.
struct Function {
  void* handle;
  Api api;
  std::vector<std::int32_t> kinds;

  // A `callgate_function`; the call's user data is the Function. Thread-safe, without the GIL.
  static std::int32_t run(const callgate_call* call) {
    return static_cast<const Function*>(call->user_data)->invoke(*call);
  }

 private:
  // Makes XLA's stream the one on which tvm_ffi's functions launch, on this thread, for one call.
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

    // Null if the library can't make one; the thread stores its error.
    void* make(const Tensor& view);

    // True if another owner exists. Relaxed: a release at this moment comes too late.
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

  // A static value. Text is copied to `letter`, with its terminating zero, and `letter` moves
  // behind it.
  static Any number_or_text(const callgate_attribute& held, char*& letter);

  // "ValueError: message", for the error that this thread stores.
  std::string raised() const;

  static std::int32_t fail(const callgate_call& call, const std::string& message);
};

}  // namespace callgate::tvm

// SPDX-License-Identifier: Apache-2.0
// The only include of XLA's FFI headers: failures and call frames, in XLA's and in callgate's form,
// and the common code of handlers.
//
// No exception passes between callgate's code and XLA, which is built without exceptions and
// doesn't unwind. Nor does glibc's forced unwind: Python up to 3.13 ends a thread with pthread_exit
// when it requests the GIL of a finalizing interpreter. The thread then stops here for good, as in
// Python 3.14; the process is about to end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "core/array_view.h"
#include "core/attributes.h"
#include "core/call.h"
#include "core/error.h"
#include "core/lifetime.h"
#include "core/system.h"
#include "xla/ffi/api/ffi.h"
#include "xla/handover.h"

namespace callgate::xla_ffi {

// Both number errors as absl does.
static_assert(XLA_FFI_Error_Code{XLA_FFI_Error_Code_INVALID_ARGUMENT} == 3);
static_assert(int{XLA_FFI_Error_Code_INTERNAL} == static_cast<int>(ErrorCode::kInternal));

// An error that XLA takes ownership of.
XLA_FFI_Error* make_error(const XLA_FFI_Api* api, const Error& error);

// True if an XLA function succeeded, by its error.
inline bool succeeded(const XLA_FFI_Api* api, XLA_FFI_Error* error) noexcept {
  if (error == nullptr) [[likely]]
    return true;
  ::xla::ffi::internal::DestroyError(api, error);
  return false;
}

// XLA's own text.
std::string take_message(const XLA_FFI_Api* api, XLA_FFI_Error* error);

// Throws Error unless it succeeded: "XLA gave no stream: " and XLA's own text.
void check(const XLA_FFI_Api* api, XLA_FFI_Error* error, const char* failed);

// Runs `body`. Its exception goes to `failed`, as an Error.
template <typename Body, typename Failed>
auto guarded(Body&& body, Failed&& failed) -> decltype(body()) {
  try {
    return outliving_thread_exit(body);
  } catch (const Error& error) {
    return failed(error);
  } catch (const std::exception& error) {
    return failed(Error(ErrorCode::kInternal, error.what()));
  } catch (...) {
    return failed(Error(ErrorCode::kInternal, "unknown C++ exception"));
  }
}

// Makes the callee store a failure that XLA doesn't report, for the next barrier or `errors()`.
void keep_failure(Callee& callee, const Error& error);

// Makes a call: `body`. In a program over several devices (`poison_on_error`), an error of one
// device would leave the others waiting in their next collective, until XLA aborts the process.
// There a failure succeeds for XLA: `poison` marks the results, and the callee stores the failure.
template <typename Body, typename Poison>
void settled(bool poison_on_error, Callee& callee, Body&& body, Poison&& poison) {
  if (!poison_on_error) return body();
  guarded(body, [&](const Error& error) {
    guarded(poison, [](const Error&) {});  // the first failure is reported
    keep_failure(callee, error);
  });
}

// --- Call frames, read from XLA's C structs: its typed wrappers would copy what is there ---------

// The core's dtype codes are XLA's.
inline constexpr auto XLA_FFI_DataType_Pred = XLA_FFI_DataType_PRED;  // NOLINT: the table's name
#define X(identifier, code, name, bits) static_assert(XLA_FFI_DataType_##identifier == (code));
CALLGATE_DTYPES(X)
#undef X

// Up to 16 buffers per side need no allocation. Only the used part is written, because clearing all
// of it would cost as much as the rest of a kernel's call.
class DecodedCall : Immovable {
 public:
  // Borrows from the frame. A token result has no memory and is left out, and so is the last result
  // of a call that is `marked` (see CallSite).
  explicit DecodedCall(const XLA_FFI_CallFrame& frame, bool marked = false)
      : operands_(frame.args.size, frame.args.args),
        results_(frame.rets.size - (marked ? 1 : 0), frame.rets.rets) {}

  std::span<const ArrayView> operands() const noexcept { return operands_.views(); }
  std::span<ArrayView> results() noexcept { return results_.views(); }
  void drop_last_operand() noexcept { --operands_.count; }

 private:
  struct Views {
    Views(std::int64_t buffer_count, void** buffers)
        : room(static_cast<std::size_t>(buffer_count)) {
      for (std::int64_t i = 0; i < buffer_count; ++i) {
        const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(buffers[i]);
        if (buffer.dtype == XLA_FFI_DataType_TOKEN) continue;
        std::construct_at(room.data() + count++, buffer.data, buffer.dims,
                          static_cast<std::int32_t>(buffer.rank), static_cast<DType>(buffer.dtype));
      }
    }
    std::span<ArrayView> views() const noexcept { return {room.data(), count}; }

    SmallBuffer<ArrayView, 16> room;
    std::size_t count = 0;
  };

  Views operands_, results_;
};

// The run's id, from 0 on; -1 if XLA has none. XLA counts up from a random 32-bit number.
inline std::int64_t decode_run(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_RunId_Get_Args run{XLA_FFI_RunId_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, -1};
  if (!succeeded(frame.api, frame.api->XLA_FFI_RunId_Get(&run))) return -1;
  const bool of_32_bits = run.run_id >= std::numeric_limits<std::int32_t>::min();
  return run.run_id & (of_32_bits && run.run_id < 0 ? std::numeric_limits<std::uint32_t>::max()
                                                    : std::numeric_limits<std::int64_t>::max());
}

// The device's ordinal; -1 if XLA has none.
inline std::int64_t decode_device(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        frame.ctx, -1};
  bool known = succeeded(frame.api, frame.api->XLA_FFI_DeviceOrdinal_Get(&device));
  return known ? device.device_ordinal : -1;
}

inline CallContext decode_context(const XLA_FFI_CallFrame& frame) noexcept {
  return {.device = static_cast<std::int32_t>(decode_device(frame)),
          .run = decode_run(frame),
          .thread = python_thread()};
}

// The stream of a GPU's program. Throws Error if XLA has none.
inline void* decode_stream(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_Stream_Get_Args args{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  check(frame.api, frame.api->XLA_FFI_Stream_Get(&args), "XLA gave no stream: ");
  return args.stream;
}

// --- Attributes, as XLA hands them to the instantiate stage --------------------------------------

inline std::string_view text_of(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

// `code`: an XLA_FFI_DataType, or a number instead of one.
DType dtype_of(int code, std::string_view name);

// All attributes. Throws Error for values other than numbers, strings, arrays of numbers and
// dictionaries.
Attributes decode_attributes(const XLA_FFI_Attrs& from);

// --- Handlers ------------------------------------------------------------------------------------

// The state of a call site that XLA owns, for handlers that read the raw call frame. A state's type
// S has a static `id` and a static `kName`, the type's name. S::make() returns a site's state from
// its attributes. S::execute() makes the call of a frame, or throws. The type is registered when
// XLA asks a handler for its metadata, which happens when a target is registered with a backend; an
// earlier registration would break the backend.
template <class S>
class StateOf {
 public:
  // The handler of the instantiate stage.
  static XLA_FFI_Error* instantiate(XLA_FFI_CallFrame* frame) {
    return guarded_handler(frame, [&]() -> XLA_FFI_Error* {
      XLA_FFI_Error* error = register_type(frame->api);
      if (error != nullptr) return error;
      return asks_for_metadata(*frame) ? kGives(frame) : give(*frame, S::make(frame->attrs));
    });
  }

  // The handler of the execute stage, which has `traits`.
  template <XLA_FFI_Handler_Traits traits = 0>
  static XLA_FFI_Error* execute(XLA_FFI_CallFrame* frame) {
    if (asks_for_metadata(*frame)) [[unlikely]] {
      XLA_FFI_Error* error = register_type(frame->api);
      if (error == nullptr) error = kTakes(frame);
      if (error != nullptr) return error;
      auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
      asked->metadata->traits |= traits;
      return nullptr;
    }
    return guarded_handler(frame, [&]() -> XLA_FFI_Error* {
      if constexpr (kThreadSanitizer) {
        const UseOfState use;
        S::execute(frame);
      } else {
        S::execute(frame);
      }
      return nullptr;
    });
  }

  // The state of the frame's site. Throws Error if there is none.
  static S& get(const XLA_FFI_CallFrame& frame) {
    XLA_FFI_State_Get_Args args{XLA_FFI_State_Get_Args_STRUCT_SIZE, nullptr, frame.ctx,
                                XLA_FFI_ExecutionStage_INSTANTIATE, &S::id,  nullptr};
    check(frame.api, frame.api->XLA_FFI_State_Get(&args), "no state for the call site: ");
    if constexpr (kThreadSanitizer) UseOfState::begin(args.state);
    return *static_cast<S*>(args.state);
  }

 private:
  template <typename Body>
  static XLA_FFI_Error* guarded_handler(XLA_FFI_CallFrame* frame, Body&& body) {
    return guarded(body, [frame](const Error& error) { return make_error(frame->api, error); });
  }

  static bool asks_for_metadata(const XLA_FFI_CallFrame& frame) noexcept {
    return frame.extension_start != nullptr &&
           frame.extension_start->type == XLA_FFI_Extension_Metadata;
  }

  static XLA_FFI_Error* register_type(const XLA_FFI_Api* api) {
    static std::mutex mutex;  // several programs may load at once
    std::lock_guard lock(mutex);
    if (S::id.type_id != 0) return nullptr;
    return ::xla::ffi::Ffi::RegisterTypeId(api, S::kName, &S::id, &kInfo);
  }

  static XLA_FFI_Error* give(const XLA_FFI_CallFrame& frame, std::unique_ptr<S> state) {
    XLA_FFI_State_Set_Args args{XLA_FFI_State_Set_Args_STRUCT_SIZE, nullptr, frame.ctx,
                                XLA_FFI_ExecutionStage_INSTANTIATE, &S::id,  state.get()};
    hand_over(state.get());
    XLA_FFI_Error* error = frame.api->XLA_FFI_State_Set(&args);
    if (error == nullptr) state.release();  // NOLINT: XLA's now
    return error;
  }

  static constexpr XLA_FFI_TypeInfo kInfo = [] {
    XLA_FFI_TypeInfo info = ::xla::ffi::MakeTypeInfo<S>();
    info.deleter = [](void* state) {
      take_over(state);
      delete static_cast<S*>(state);
    };
    return info;
  }();
  // Typed wrappers, which are only used for their metadata about S.
  XLA_FFI_DEFINE_HANDLER(
      kGives, []() -> ::xla::ffi::ErrorOr<std::unique_ptr<S>> { return std::unique_ptr<S>(); },
      ::xla::ffi::Ffi::BindInstantiate());
  XLA_FFI_DEFINE_HANDLER(
      kTakes, [](S*) { return ::xla::ffi::Error::Success(); },
      ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::State<S>>());
};

}  // namespace callgate::xla_ffi

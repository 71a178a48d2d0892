// A call frame's buffers as ArrayViews, on the stack. Reads XLA's C structs directly: on the fast
// path the typed wrappers would copy what is here.
//
// Up to kInline buffers a side need no allocation; a call with more takes one block for them. Only
// what the call has is written: on the path of a kernel, clearing all the room would cost as much
// as the rest.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/call.h"
#include "core/dtype.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// The core's dtype codes are XLA's.
inline constexpr auto XLA_FFI_DataType_Pred = XLA_FFI_DataType_PRED;  // NOLINT: the table's name
#define X(identifier, code, name, bits) static_assert(XLA_FFI_DataType_##identifier == (code));
CALLGATE_DTYPES(X)
#undef X

class DecodedCall {
 public:
  // Borrows from the frame, which lives until the handler returns. A result that is a token has
  // no memory and is left out.
  explicit DecodedCall(const XLA_FFI_CallFrame& frame) {
    operands_.decode(frame.args.size, frame.args.args);
    results_.decode(frame.rets.size, frame.rets.rets);
  }
  DecodedCall(const DecodedCall&) = delete;
  DecodedCall& operator=(const DecodedCall&) = delete;

  std::span<const ArrayView> operands() const noexcept { return operands_.views(); }
  std::span<ArrayView> results() noexcept { return results_.views(); }

  // For an operand that is not the callee's.
  void drop_last_operand() noexcept { operands_.drop_last(); }

 private:
  static constexpr std::size_t kInline = 16;

  class Views {
   public:
    void decode(std::int64_t count, void** buffers) {
      if (count > static_cast<std::int64_t>(kInline)) [[unlikely]] {
        overflow_ = std::make_unique_for_overwrite<ArrayView[]>(static_cast<std::size_t>(count));
        data_ = overflow_.get();
      }
      for (std::int64_t i = 0; i < count; ++i) {
        const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(buffers[i]);
        if (buffer.dtype == XLA_FFI_DataType_TOKEN) continue;
        std::construct_at(data_ + count_++, buffer.data, buffer.dims,
                          static_cast<std::int32_t>(buffer.rank), static_cast<DType>(buffer.dtype));
      }
    }
    std::span<ArrayView> views() noexcept { return {data_, count_}; }
    std::span<const ArrayView> views() const noexcept { return {data_, count_}; }
    void drop_last() noexcept { --count_; }

   private:
    // Room for ArrayViews, without their initial values.
    union Room {
      Room() noexcept {}  // NOLINT: left as it is
      std::array<ArrayView, kInline> views;
    } inline_;
    std::unique_ptr<ArrayView[]> overflow_;
    ArrayView* data_ = inline_.views.data();
    std::size_t count_ = 0;
  };

  Views operands_;
  Views results_;
};

// The run's id; -1 where XLA has none.
inline std::int64_t decode_run(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_RunId_Get_Args run{XLA_FFI_RunId_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, -1};
  return succeeded(frame.api, frame.api->XLA_FFI_RunId_Get(&run)) ? run.run_id : -1;
}

// The device's ordinal, the run and the thread; -1 where XLA has none.
inline CallContext decode_context(const XLA_FFI_CallFrame& frame) noexcept {
  XLA_FFI_DeviceOrdinal_Get_Args device{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                        frame.ctx, -1};
  bool known = succeeded(frame.api, frame.api->XLA_FFI_DeviceOrdinal_Get(&device));
  CallContext context;
  context.device = known ? device.device_ordinal : -1;
  context.run = decode_run(frame);
  context.thread = pthread_self();
  return context;
}

// The stream that a GPU's program runs on. Throws Error where XLA has none.
inline void* decode_stream(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_Stream_Get_Args args{XLA_FFI_Stream_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, nullptr};
  check(frame.api, frame.api->XLA_FFI_Stream_Get(&args), "XLA gave no stream: ");
  return args.stream;
}

}  // namespace callgate::xla_ffi

// A call frame's buffers as ArrayViews, on the stack.
//
// Up to kInline buffers a side need no allocation; a call with more takes one block for them. Only
// what the call has is written: on the path of a kernel, clearing all the room would cost as much
// as the rest.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "core/call.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

class DecodedCall {
 public:
  // Borrows from the frame, which lives until the handler returns. A result that is a token has
  // no memory and is left out.
  explicit DecodedCall(const XLA_FFI_CallFrame& frame);
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
    void decode(std::int64_t count, void** buffers);
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

// The device's ordinal and, when asked for, the run's id; -1 where XLA has none.
CallContext decode_context(const XLA_FFI_CallFrame& frame) noexcept;

// The run's id alone.
std::int64_t decode_run(const XLA_FFI_CallFrame& frame) noexcept;

// The stream that a GPU's program runs on. Throws Error where XLA has none.
void* decode_stream(const XLA_FFI_CallFrame& frame);

}  // namespace callgate::xla_ffi

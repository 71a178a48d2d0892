// A call frame's buffers as ArrayViews, on the stack.
//
// Up to kInline buffers a side need no allocation; a call with more takes one vector for them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

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

 private:
  static constexpr std::size_t kInline = 16;

  class Views {
   public:
    Views() noexcept {}  // NOLINT: leaves inline_ as it is
    void decode(std::int64_t count, void** buffers);
    std::span<ArrayView> views() noexcept { return {data(), count_}; }
    std::span<const ArrayView> views() const noexcept {
      return {overflow_.empty() ? inline_ : overflow_.data(), count_};
    }

   private:
    ArrayView* data() noexcept { return overflow_.empty() ? inline_ : overflow_.data(); }

    // Not initialised: most calls have few buffers, and zeroing the rest would cost them more.
    union {
      ArrayView inline_[kInline];
    };
    std::vector<ArrayView> overflow_;
    std::size_t count_ = 0;
  };

  Views operands_;
  Views results_;
};

// The device's ordinal and, when asked for, the run's id; -1 where XLA has none.
CallContext decode_context(const XLA_FFI_CallFrame& frame) noexcept;

}  // namespace callgate::xla_ffi

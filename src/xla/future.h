// The promise of a call that completes after its handler has returned.
//
// Exactly one of `succeed` and `fail` takes effect, whoever comes first: the worker that ran the
// call or the watchdog that gave it up. A promise that is dropped fails the program, since one that
// is never completed would block it for good. By XLA's C interface: settling never throws.
#pragma once

#include <atomic>

#include "core/lifetime.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

class Promise : Immovable {
 public:
  // Creates XLA's future; throws Error when this XLA has none.
  explicit Promise(const XLA_FFI_Api* api) : api_(api) {
    XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
    check(api, api->XLA_FFI_Future_Create(&args), "XLA gave no future: ");
    future_ = args.future;
  }
  ~Promise() { fail(Error(ErrorCode::kAborted, "the call was dropped before it ran")); }

  XLA_FFI_Future* future() const noexcept { return future_; }

  // Runs `publish` (it writes the results) and completes, unless the promise is already settled.
  template <typename Publish>
  bool succeed(Publish&& publish) {
    if (!claim()) return false;
    publish();
    XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr,
                                          future_};
    (void)succeeded(api_, api_->XLA_FFI_Future_SetAvailable(&args));
    return true;
  }
  bool fail(const Error& error) {
    if (!claim()) return false;
    XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                      make_error(api_, error)};
    (void)succeeded(api_, api_->XLA_FFI_Future_SetError(&args));
    return true;
  }

 private:
  // True for the one caller that may settle.
  bool claim() noexcept {
    // Acquire and release: the loser sees that the winner's results are complete or never coming.
    return !settled_.exchange(true, std::memory_order_acq_rel);
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_Future* future_ = nullptr;
  std::atomic<bool> settled_{false};
};

}  // namespace callgate::xla_ffi

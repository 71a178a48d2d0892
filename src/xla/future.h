// The promise of a call that completes after its handler has returned.
//
// Exactly one of `succeed` and `fail` takes effect, whoever comes first: the worker that ran the
// call or the watchdog that gave it up. A promise that is dropped fails the program, since one that
// is never completed would block it for good.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "xla/ffi.h"

namespace callgate::xla_ffi {

class Promise {
 public:
  // Creates XLA's future; throws Error when this XLA has none.
  explicit Promise(const XLA_FFI_Api* api);
  ~Promise() { fail(ErrorCode::kAborted, "callgate: the call was dropped before it ran"); }
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

  XLA_FFI_Future* future() const noexcept { return future_; }

  // Runs `publish` (it writes the results) and completes, unless the promise is already settled.
  bool succeed(const std::function<void()>& publish);
  bool fail(ErrorCode code, const std::string& message);

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

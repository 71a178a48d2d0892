// SPDX-License-Identifier: Apache-2.0
// Tells the thread sanitizer that XLA orders the threads that use a call site's state: its making,
// its calls and its end. XLA's locks are not compiled for the sanitizer, which would report each
// state as a data race.
#pragma once

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "core/lifetime.h"

namespace callgate::xla_ffi {

#ifdef __SANITIZE_THREAD__
inline constexpr bool kThreadSanitizer = true;
inline void hand_over(void* state) noexcept { __tsan_release(state); }
inline void take_over(void* state) noexcept { __tsan_acquire(state); }
#else
inline constexpr bool kThreadSanitizer = false;
inline void hand_over(void*) noexcept {}
inline void take_over(void*) noexcept {}
#endif

// A handler's use of the state that it gets from XLA, if it gets one. Handlers run within each
// other if a call runs another program.
class UseOfState : Immovable {
 public:
  UseOfState() noexcept { t_state_ = nullptr; }
  ~UseOfState() {
    if (t_state_ != nullptr) hand_over(t_state_);
    t_state_ = outer_;
  }

  static void begin(void* state) noexcept {
    take_over(state);
    t_state_ = state;
  }

 private:
  static inline thread_local void* t_state_ = nullptr;
  void* const outer_ = t_state_;
};

}  // namespace callgate::xla_ffi

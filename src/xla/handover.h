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

// This thread's use of a state.
class UseOfState : Immovable {
 public:
  explicit UseOfState(void* state) noexcept : state_(state) { take_over(state_); }
  ~UseOfState() { hand_over(state_); }

 private:
  void* const state_;
};

}  // namespace callgate::xla_ffi

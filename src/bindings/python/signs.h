// SPDX-License-Identifier: Apache-2.0
// The signs of a thread's programs, which say that a program has ended (_jax/cpp_path.py).
#pragma once

#include "bindings/python/gil.h"

namespace callgate::bindings {

// True once this thread has dispatched a program whose function may run programs, until that ended.
inline thread_local bool counts_calls = false;

// Counts a call of a jitted function, and waits where too many are under way. False with an error.
bool count_call();

}  // namespace callgate::bindings

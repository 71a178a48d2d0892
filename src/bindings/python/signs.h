// SPDX-License-Identifier: Apache-2.0
// The signs of a thread's programs, which are ready when a program has ended (_jax/cpp_path.py).
#pragma once

#include "bindings/python/gil.h"

namespace callgate::bindings {

// True from the dispatch of a program whose function may run programs until that program ends.
inline thread_local bool counts_calls = false;

// Counts a call of a jitted function, and waits if too many are in flight. False with an error.
bool count_call();

}  // namespace callgate::bindings

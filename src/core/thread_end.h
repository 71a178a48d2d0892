// What a thread of callgate's does last.
//
// Layers above may leave something on a thread that they run on: the bindings, a Python thread
// state. To take it away they may have to wait for others, which a thread's own destructors must
// not: who joins the thread may hold what they wait for.
#pragma once

#include <utility>

#include "core/lifecycle.h"

namespace callgate {

// Of this thread; end_thread() calls it once.
inline thread_local void (*at_thread_end)() noexcept = nullptr;

// Called by threads of ours that end before the process does, with nothing locked.
inline void end_thread() noexcept {
  if (at_thread_end == nullptr) return;
  ActiveCall active;  // while the process ends it stays as it is
  if (active.entered()) std::exchange(at_thread_end, nullptr)();
}

}  // namespace callgate

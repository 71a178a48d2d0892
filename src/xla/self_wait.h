// Calls on threads of their own that wait for themselves.
//
// While JAX calls a jitted function for the first time, other threads that call it wait until that
// call has ended, with all gates in it. A gate on a thread of its own which calls the very function
// would wait for ever. So the first run of a program is watched, and such a call fails.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "xla/call_site.h"

namespace callgate::xla_ffi {

struct WatchedCall {
  std::shared_ptr<const CallSite> site;
  // Ends the call with a text, unless it has ended.
  std::function<void(const std::string&)> settle;
  std::atomic<unsigned long> thread{0};  // Python's number of the worker; 0 until it begins
};

// As long as the call lives.
void watch_for_self_wait(const std::weak_ptr<WatchedCall>& call);

}  // namespace callgate::xla_ffi

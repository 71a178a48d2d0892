// Between callgate's code and XLA: no exception passes.
//
// XLA is built without exceptions and would not unwind. The one thing let through is glibc's forced
// unwind: Python up to 3.13 ends a thread with pthread_exit when it asks for the GIL of a
// finalizing interpreter. Unwinding on through XLA's frames would abort the process, so the thread
// stops here for good, as Python 3.14 does; the process is about to end.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "core/call.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {

// Runs `body`; what it throws goes to `failed`, as an Error.
template <typename Body, typename Failed>
auto guarded(Body&& body, Failed&& failed) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    return failed(error);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  } catch (const std::exception& error) {
    return failed(Error(ErrorCode::kInternal, error.what()));
  } catch (...) {
    return failed(Error(ErrorCode::kInternal, "unknown C++ exception"));
  }
}

// Has the callee keep a failure that XLA is not told of, for the next who asks.
inline void keep_failure(Callee& callee, const Error& error) {
  // With no memory to keep it in, say.
  guarded([&] { callee.defer(error); },
          [&](const Error&) { std::fprintf(stderr, "%s\n", error.what()); });
}

// Makes a call: `body`. In a program over several devices (`poison_on_error`) an error that one of
// them returns would leave the others waiting in their next collective, until XLA aborts the
// process. So there a failure succeeds for XLA: `poison` marks the results, and the callee keeps
// the failure for the next who asks.
template <typename Body, typename Poison>
void settled(bool poison_on_error, Callee& callee, Body&& body, Poison&& poison) {
  if (!poison_on_error) return body();
  guarded(body, [&](const Error& error) {
    poison();
    keep_failure(callee, error);
  });
}

}  // namespace callgate::xla_ffi

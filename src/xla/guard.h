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

// Runs `body`, which returns XLA_FFI_Error* (null for success), and turns exceptions into errors.
template <typename Body>
XLA_FFI_Error* guarded(const XLA_FFI_Api* api, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    return make_error(api, error.code(), error.what());
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  } catch (const std::exception& error) {
    return make_error(api, ErrorCode::kInternal, std::string("callgate: ") + error.what());
  } catch (...) {
    return make_error(api, ErrorCode::kInternal, "callgate: unknown C++ exception");
  }
}

// The same for a `body` that returns an Outcome, on a thread of callgate's own.
template <typename Body>
Outcome guarded_outcome(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    return Outcome::failure(error.code(), error.what());
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  } catch (const std::exception& error) {
    return Outcome::failure(ErrorCode::kInternal, std::string("callgate: ") + error.what());
  } catch (...) {
    return Outcome::failure(ErrorCode::kInternal, "callgate: unknown C++ exception");
  }
}

// Has the callee keep a failure that XLA is not told of, for the next who asks.
inline void keep_failure(Callee& callee, const Failure& failure) {
  Outcome kept = guarded_outcome([&] {
    callee.defer(failure);
    return Outcome::success();
  });
  // With no memory to keep it in, say.
  if (!kept.ok()) std::fprintf(stderr, "%s\n", failure.message.c_str());
}

// What becomes of a call in a program over several devices. An error that one of them returns would
// leave the others waiting in their next collective, until XLA aborts the process. So a failure,
// also one that `body` throws, succeeds for XLA: `poison` marks the results, and the callee keeps
// the failure for the next who asks.
template <typename Body, typename Poison>
Outcome poisoned_on_error(Callee& callee, Body&& body, Poison&& poison) {
  Outcome outcome = guarded_outcome(body);
  if (outcome.ok()) [[likely]]
    return outcome;
  poison();
  keep_failure(callee, outcome.error());
  return Outcome::success();
}

}  // namespace callgate::xla_ffi

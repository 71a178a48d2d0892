// Between callgate's code and XLA: no exception passes.
//
// XLA is built without exceptions and would not unwind. The one thing let through is glibc's forced
// unwind: Python up to 3.13 ends a thread with pthread_exit when it asks for the GIL of a
// finalizing interpreter. Unwinding on through XLA's frames would abort the process, so the thread
// stops here for good, as Python 3.14 does; the process is about to end.
#pragma once

#include <cxxabi.h>
#include <unistd.h>

#include <exception>

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

}  // namespace callgate::xla_ffi

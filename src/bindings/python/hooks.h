// SPDX-License-Identifier: Apache-2.0
// Python functions that the runtime calls off its fast path: to make and store errors, to handle
// escaped views, and to bind a call site's description. Set before the first callee (`start` in
// python/callgate/_runtime/lifecycle.py), with documentation for each. All hooks run under the GIL
// and must not fail: an exception of a hook is reported as text of its own.
#pragma once

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bindings/python/gil.h"
#include "core/call.h"
#include "core/error.h"
#include "core/lifecycle.h"
#include "core/main_thread.h"

namespace callgate::bindings {

// X(name): each is a function except the last.
#define CALLGATE_HOOKS(X)                                                                 \
  X(failed)        /* (exception, gate, site, layout, shard, run, thread) -> text */      \
  X(escaped)       /* (gate, spec, suspects, raising, make_private) or raises */          \
  X(result_error)  /* (gate, spec, index, expected, got) raises */                        \
  X(input_written) /* (gate, spec, index) raises */                                       \
  X(deferred)      /* (text) keeps a failure for barrier() and errors() */                \
  X(stalled)       /* (what, call, timed_out) -> report text */                           \
  X(kernel_failed) /* (kernel, message, site, lane) -> text for XLA's error */            \
  X(kernel_raised) /* (exception) -> message that stands for it */                        \
  X(self_wait)     /* (gate, thread) -> why the thread waits for itself, or "" */         \
  X(interrupted)   /* () -> what a call has left for the main thread to raise, or None */ \
  X(handled)       /* (exception of a signal's handler) leaves it to it -> text */        \
  X(unheard)       /* (exception) leaves it to the main thread, if a handler raised it */ \
  X(device_worker) /* (begin) an own thread's calls are a GPU's from here, or end */      \
  X(stream_as)     /* (library, stream, ordinal) -> the library's stream object */        \
  X(profiled)      /* (gate, ns) -> an entered span of JAX's profiler, or None */         \
  X(closed_thread) /* (name) raises: a call came for a thread that is closed */           \
  X(capture_error) /* the class of the error of a call that can't be recorded */          \
  X(interruption)  /* the class of what a call raises that Ctrl-C ends */

struct Hooks {
#define X(name) PyObject* name = nullptr;
  CALLGATE_HOOKS(X)
#undef X
};
inline constinit Hooks hooks;

// --- Pending exceptions of the main thread
//
// Python runs signal handlers on its main thread, between two steps of Python code. If that code is
// a gate's or a hook's, the handler's exception would become a program's error, or get lost. So the
// main thread raises it again at its next own step, as a KeyboardInterrupt or SystemExit, which
// `except Exception` doesn't catch.

// True if this thread runs a hook, and met an interrupt in it that must be raised.
inline thread_local bool in_hook = false, met_interrupt = false;

// False in a worker process, because Ctrl-C is handled by the parent.
inline bool passes_interrupts_on = true;

// Makes the main thread raise its pending exception as soon as it runs Python code.
void wake_main_thread();

// Calls a hook that makes a text or stores something, whose own error is dropped. An interrupt is
// raised after the hook has returned.
template <typename... Args>
nb::object call_hook(PyObject* hook, const char* format, Args... args) {
  struct Running : Immovable {
    ~Running() {
      in_hook = outer;
      if (!outer && std::exchange(met_interrupt, false)) wake_main_thread();
    }
    bool outer = std::exchange(in_hook, true);
  } running;
  return call_python(hook, format, args...);
}

// Sets the main thread's pending exception as the Python error and returns false, or returns true
// if there is none. Called on the main thread.
bool nothing_left();

// True if a signal handler raised the error, so the main thread will raise it.
bool is_left_to_main_thread(const nb::python_error& error);

// Clears the Python error, if any, without reporting it.
inline void clear_error() {
  if (PyErr_Occurred() != nullptr) (void)is_left_to_main_thread(nb::python_error());
}

// Prints the Python error, which has no other receiver.
void write_unraisable(PyObject* raising);

// Calls a function without a receiver for exceptions. Returns no object if it raised.
template <typename... Args>
nb::object call_unraisable(PyObject* function, const char* format, Args... args) {
  nb::object result = call_python(function, format, args...);
  if (!result.is_valid()) write_unraisable(function);
  return result;
}

// A hook's text as UTF-8, with lone UTF-16 surrogates escaped; or `otherwise` if the hook raised.
std::string text_or(nb::object text, const std::string& otherwise);

// Runs the handlers of pending signals, on the main thread in a program's call. Throws Error if one
// raised, which ends the program.
void run_handlers();

// Stores a failure that its program doesn't report, through the `deferred` hook.
void call_deferred(const Error& error);

// Raises the error for the returned result `index` of a gate's function, or for all results with
// -1.
[[noreturn]] void raise_mismatch(const std::string& gate, const std::string& spec, int index,
                                 const std::string& expected, const std::string& got);

// The report on a slow call of a gate or kernel, in plain text and through the `stalled` hook.
inline std::string stalled_text(const std::string& what, const std::string& call) {
  return "callgate: " + what + " called with " + call + " is stalled";
}
std::string stall_text(const std::string& what, const std::string& call, bool timed_out);

// A Python exception as text for XLA, through the `failed` hook, which stores the exception for the
// caller. `layout` (SiteSpec::layout) and the call's shard give the call's part of its arrays in a
// program over several devices. `lane` gives the lane, "" for none.
std::string failure_text(const nb::python_error& raised, const std::string& gate,
                         const std::string& site, const std::string& layout = "",
                         const CallContext& context = {}, const std::string& lane = "");

// The error of a call that raised. Calls ended by Ctrl-C have none, because the main thread handles
// the interrupt itself.
Error failure_of(const nb::python_error& raised, const std::string& gate, const SiteSpec& spec,
                 const CallContext& context, const std::string& lane = "");

}  // namespace callgate::bindings

// SPDX-License-Identifier: Apache-2.0
// Python functions that the runtime calls off its fast path: to make and keep errors, to deal with
// escaped views, to bind a call site's description. Set before the first callee (`start` in
// python/callgate/_runtime/lifecycle.py); each is documented there. All of this runs under the GIL,
// and must not fail: a hook that raises is reported as text of its own.
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

// X(name): each a function but the last.
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

// --- What the main thread is to raise
//
// Python runs signals' handlers on its main thread, between two steps of Python code. Where that
// code is a gate's or a hook's, the handler's exception would be a program's error, or nobody's. So
// the main thread raises it once more, at the next step of its own: there it is a KeyboardInterrupt
// or SystemExit, which no `except Exception` takes for an error that one can go on after.

// True if this thread runs a hook, and has met there what is to be raised.
inline thread_local bool in_hook = false, met_interrupt = false;

// Not so in a worker process, where Ctrl-C is the parent's affair.
inline bool passes_interrupts_on = true;

// Has the main thread raise what was left for it, as soon as it is in Python.
void wake_main_thread();

// Calls a hook that makes a text or keeps something, whose own error would be dropped. An interrupt
// that is to be raised waits until it has returned.
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

// Sets what a call has left for the main thread, which this is, as the Python error; false then.
bool nothing_left();

// True if a signal's handler raised the error, and the main thread will.
bool is_left_to_main_thread(const nb::python_error& error);

// Clears the Python error, if there is one, which nobody else hears of.
inline void clear_error() {
  if (PyErr_Occurred() != nullptr) (void)is_left_to_main_thread(nb::python_error());
}

// Prints the Python error, which nobody else hears of.
void write_unraisable(PyObject* raising);

// Calls a function where nobody is there to raise to. No object where it raised.
template <typename... Args>
nb::object call_unraisable(PyObject* function, const char* format, Args... args) {
  nb::object result = call_python(function, format, args...);
  if (!result.is_valid()) write_unraisable(function);
  return result;
}

// A hook's text as UTF-8, with half pairs of UTF-16, which have none, written out; or its
// stand-in where it raised.
std::string text_or(nb::object text, const std::string& otherwise);

// Runs the handlers of signals that came, on the main thread in a call of a program. Throws Error
// where one raised: the call ends its program.
void run_handlers();

// Keeps a failure that its program was not told of, by way of the `deferred` hook.
void call_deferred(const Error& error);

// Raises the error of what a gate's function gave for the result `index`, or for all with -1.
[[noreturn]] void raise_mismatch(const std::string& gate, const std::string& spec, int index,
                                 const std::string& expected, const std::string& got);

// The report on a call of a gate or kernel that takes long, plain and by way of the `stalled` hook.
inline std::string stalled_text(const std::string& what, const std::string& call) {
  return "callgate: " + what + " called with " + call + " is stalled";
}
std::string stall_text(const std::string& what, const std::string& call, bool timed_out);

// A Python exception as text for XLA, by way of the `failed` hook, which keeps the exception for
// the caller. `layout` and the call's shard say on which part of its arrays the call was, in a
// program over several devices (SiteSpec::layout); `lane` of which lanes it was, "" for no lane.
std::string failure_text(const nb::python_error& raised, const std::string& gate,
                         const std::string& site, const std::string& layout = "",
                         const CallContext& context = {}, const std::string& lane = "");

// The error of a call that raised; not of one that Ctrl-C ended, of which the main thread learns by
// itself.
Error failure_of(const nb::python_error& raised, const std::string& gate, const SiteSpec& spec,
                 const CallContext& context, const std::string& lane = "");

}  // namespace callgate::bindings

// Python functions that the runtime calls off its fast path: to make and keep errors, to deal with
// escaped views, to bind a call site's description. Set once at import (`start` in
// python/callgate/_runtime/lifecycle.py); each is documented there. All of this runs under the GIL.
#pragma once

#include <cstdint>
#include <string>

#include "bindings/python/gil.h"
#include "bindings/python/python.h"
#include "core/array_view.h"
#include "core/call.h"
#include "core/error.h"

namespace callgate::bindings {

// X(name): each a function but the last.
#define CALLGATE_HOOKS(X)                                                            \
  X(failed)        /* (exception, gate, site, layout, shard, run, thread) -> text */ \
  X(escaped)       /* (gate, spec, suspects, raising, make_private) or raises */     \
  X(result_error)  /* (gate, spec, index, expected, got) raises */                   \
  X(input_written) /* (gate, spec, index) raises */                                  \
  X(deferred)      /* (text) keeps a failure for barrier() and errors() */           \
  X(stalled)       /* (what, call, timed_out) -> report text */                      \
  X(kernel_failed) /* (kernel, message, site) -> text for XLA's error */             \
  X(kernel_raised) /* (exception) -> message that stands for it */                   \
  X(undefined)     /* (name) -> whether it is defined now */                         \
  X(self_wait)     /* (gate, thread) -> why the thread waits for itself, or "" */    \
  X(interrupted)   /* () raises a gate's KeyboardInterrupt, if one waits */          \
  X(device_worker) /* (begin) an own thread's calls are a GPU's from here, or end */ \
  X(stream_as)     /* (library, stream, ordinal) -> the library's stream object */   \
  X(capture_error) /* the class of the error of a call that can't be recorded */

struct Hooks {
#define X(name) PyObject* name = nullptr;
  CALLGATE_HOOKS(X)
#undef X

  static Hooks& instance();
};

// Marks the thread as running a hook for as long as it lives: an interrupt to be raised waits.
class RunningHook : Immovable {
 public:
  RunningHook() noexcept;
  ~RunningHook();

 private:
  bool outer_;
};

// Calls a hook that makes a text or keeps something, whose own error would be dropped.
template <typename... Args>
PyObject* call_hook(PyObject* hook, const char* format, Args... args) {
  RunningHook running;
  return call_python(hook, format, args...);
}

// Keeps a failure that its program was not told of, by way of the `deferred` hook.
void call_deferred(const Error& error);

// The report on a call of a gate or kernel that takes long, by way of the `stalled` hook.
std::string stall_text(const std::string& what, const std::string& call, bool timed_out);

// A str as UTF-8, with what has none (half of a pair of UTF-16) written out.
std::string text_of(nb::handle text);

// The current exception as an object, cleared; with its traceback attached.
nb::object take_raised();
// Makes it the current exception again.
void restore_raised(nb::object exception);

// The current Python exception as text for XLA, by way of the `failed` hook, which keeps the
// exception for the caller. Clears the exception. `layout` and the call's shard say on which part
// of its arrays the call was, in a program over several devices (SiteSpec::layout).
std::string take_exception(const std::string& gate, const std::string& site,
                           const std::string& layout = "", const CallContext& context = {});

}  // namespace callgate::bindings

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

struct Hooks {
  PyObject* failed = nullptr;         // (exception, gate, site, layout, shard, run) -> text
  PyObject* escaped = nullptr;        // (gate, spec, suspects, raising, make_private) or raises
  PyObject* result_error = nullptr;   // (gate, spec, index, expected, got) raises
  PyObject* input_written = nullptr;  // (gate, spec, index) raises
  PyObject* deferred = nullptr;       // (text) keeps a failure for barrier() and errors()
  PyObject* stalled = nullptr;        // (what, call, timed_out) -> report text
  PyObject* kernel_failed = nullptr;  // (kernel, message, site) -> text for XLA's error
  PyObject* kernel_raised = nullptr;  // (exception) -> message that stands for it
  PyObject* undefined = nullptr;      // (name) -> whether it is defined now
  PyObject* self_wait = nullptr;      // (gate, thread) -> why the thread waits for itself, or ""
  PyObject* interrupted = nullptr;    // () raises a gate's KeyboardInterrupt, if one waits
  PyObject* device_worker = nullptr;  // () on each own thread that runs calls of a GPU's programs
  PyObject* stream_as = nullptr;      // (library, stream, ordinal) -> the library's stream object
  PyObject* capture_error = nullptr;  // the class of the error of a call that can't be recorded

  static Hooks& instance();
};

// Marks the thread as running a hook for as long as it lives: an interrupt to be raised waits.
class RunningHook {
 public:
  RunningHook() noexcept;
  ~RunningHook();
  RunningHook(const RunningHook&) = delete;
  RunningHook& operator=(const RunningHook&) = delete;

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
void call_deferred(const Failure& failure);

// A str as UTF-8, with what has none (half of a pair of UTF-16) written out.
std::string text_of(nb::handle text);

// The current exception as an object, cleared; with its traceback attached.
nb::object take_raised();

// The current Python exception as text for XLA, by way of the `failed` hook, which keeps the
// exception for the caller. Clears the exception. `layout` and the call's shard say on which part
// of its arrays the call was, in a program over several devices (SiteSpec::layout).
std::string take_exception(const std::string& gate, const std::string& site,
                           const std::string& layout = "", const CallContext& context = {});

}  // namespace callgate::bindings

// Python, NumPy's C API and nanobind, included one way by every file of this folder, and the GIL.
//
// module.cc defines CALLGATE_IMPORT_NUMPY and owns NumPy's function table; the others share it.
//
// The GIL is taken from threads that Python did not make cheaply and safely:
// PyGILState_Ensure creates a thread state for a foreign thread and Release destroys it:
// microseconds a call, and the thread's Python-side locals are lost each time. So a foreign thread
// is attached once, by an Ensure that is never released; from then on Ensure only swaps the state
// in. Threads of callgate's take their state away before they end (end_thread() in
// core/lifecycle.h). XLA's are not asked; they live as long as the process, so what they leave
// behind is bounded by their number.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL callgate_numpy_api
#ifndef CALLGATE_IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>
#include <unistd.h>

#include <optional>

#include "core/lifecycle.h"
#include "core/lifetime.h"

namespace callgate::bindings {

namespace nb = nanobind;

// What each file of this layer adds to the module; channel/channel.h names its own.
void bind_buffer(nb::module_& module);     // `Buffer`
void bind_upload(nb::module_& module);     // `Upload`: an item of a feed on its way to a GPU
void bind_gate(nb::module_& module);       // `Callee`, `Check`, `Context`
void bind_kernel(nb::module_& module);     // `Kernel`, `KernelTurn`, `CudaKernel`, `Nvrtc`
void bind_progress(nb::module_& module);   // the board of bars, for the thread that draws them
void bind_interrupt(nb::module_& module);  // Ctrl-C in Python's terms, for core/lifecycle.h
// The very end of the process, after Python's: what came too late is reported, and failures that
// were found at the end make the exit status say so.
void bind_exit(nb::module_& module);

// Runs `body`, which runs Python code, under the GIL. While it does, the interpreter may begin to
// finalize, and Python up to 3.13 then ends this thread by a forced unwind. Destructors on its way
// would drop references, and release the GIL, without having it; so the thread stops here for good,
// as in Python 3.14 (see also xla/ffi.h).
template <typename Body>
auto running_python(Body&& body) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Takes away what attach_thread() made.
inline void detach_thread() noexcept {
  running_python([] {
    (void)PyGILState_Ensure();
    PyGILState_Release(PyGILState_LOCKED);    // that one
    PyGILState_Release(PyGILState_UNLOCKED);  // and the first, which leaves none
  });
}

// Makes sure that this thread has a thread state that outlives the next Release.
inline void attach_thread() {
  thread_local bool attached = false;
  if (attached) return;
  attached = true;
  if (PyGILState_GetThisThreadState() != nullptr) return;  // Python's own thread
  (void)PyGILState_Ensure();
  (void)PyEval_SaveThread();
  at_thread_end = detach_thread;
}

// Holds the GIL for its lifetime. Nests, also with a GIL held already.
class GilScope : Immovable {
 public:
  GilScope() : state_(take()) {}
  ~GilScope() { PyGILState_Release(state_); }

 private:
  static PyGILState_STATE take() {
    attach_thread();
    return PyGILState_Ensure();
  }

  PyGILState_STATE state_;
};

// The same as a call that is under way (core/lifecycle.h): false, without the GIL, once the process
// is ending.
class ActiveGil {
 public:
  ActiveGil() {
    if (active_.entered()) gil_.emplace();
  }
  explicit operator bool() const noexcept { return active_.entered(); }

 private:
  ActiveCall active_;
  std::optional<GilScope> gil_;
};

// Runs `body` without the GIL, which this thread has. nanobind's gil_scoped_release takes it back
// in a destructor, where the end of a daemon thread in a finalizing interpreter, a forced unwind,
// ends the process; here the thread stops for good, as above. What it then holds is held for ever,
// so `body` returns with nothing locked.
template <typename Body>
auto without_gil(Body&& body) -> decltype(body()) {
  struct Unlocked {
    Unlocked() : state(PyEval_SaveThread()) {}
    ~Unlocked() {
      try {
        PyEval_RestoreThread(state);
      } catch (abi::__forced_unwind&) {
        for (;;) pause();
      }
    }
    PyThreadState* state;
  } unlocked;
  return body();
}

// PyObject_CallFunction by running_python().
template <typename... Args>
PyObject* call_python(PyObject* function, const char* format, Args... args) {
  return running_python([&] { return PyObject_CallFunction(function, format, args...); });
}

}  // namespace callgate::bindings

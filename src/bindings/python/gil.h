// SPDX-License-Identifier: Apache-2.0
// The common include of Python, NumPy's C API and nanobind for this folder, the GIL, and references
// that die on threads without it.
//
// module.cc defines CALLGATE_IMPORT_NUMPY and owns NumPy's function table; the others share it.
//
// Threads that Python didn't create take the GIL cheaply and safely here. PyGILState_Ensure creates
// a thread state for a foreign thread and Release destroys it, which costs microseconds per call
// and loses the thread's Python locals. So a foreign thread is attached once, by an Ensure that is
// never released; later Ensures only switch to its state. callgate's threads remove their state
// before they end (end_thread() in core/lifecycle.h). XLA's threads live as long as the process, so
// the number of their states is bounded.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL callgate_numpy_api
#ifndef CALLGATE_IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <nanobind/nanobind.h>
#include <numpy/arrayobject.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/system.h"

namespace callgate::bindings {

namespace nb = nanobind;

// Each function adds its file's contents to the module.
void bind_buffer(nb::module_& module);        // `Buffer`
void bind_jitted(nb::module_& module);        // calls of jitted functions, and their errors
void bind_signs(nb::module_& module);         // signs that programs have ended
void bind_live_objects(nb::module_& module);  // in free-threaded Python
void bind_upload(nb::module_& module);        // `Upload`: a feed's item on its way to a GPU
void bind_gate(nb::module_& module);          // `Callee`, `Check`, `Context`, watches of calls
void bind_threads(nb::module_& module);       // jobs on callgate's threads; `NamedThread`
void bind_tape(nb::module_& module);          // recordings of calls
void bind_peers(nb::module_& module);         // `TvmFunction`, `PackedKernel`
void bind_kernel(nb::module_& module);        // `Kernel`, `KernelTurn`, `CudaKernel`, `Nvrtc`
void bind_channel(nb::module_& module);       // `Consumer`, `Channel`, `Tap`: before the next three
void bind_py_consumer(nb::module_& module);   // `python_consumer`
void bind_sinks(nb::module_& module);         // `jsonl_sink`, ..., `RecordWriter`
void bind_stream(nb::module_& module);        // `stream_sink`, `StreamReader`, outfeeds of 2020
void bind_steer(nb::module_& module);         // `Knob`, `Stop`
void bind_progress(nb::module_& module);      // the board of bars, for the drawing thread
void bind_workers(nb::module_& module);       // `WorkerPool`, `WorkerCallee`
void bind_serve(nb::module_& module);         // the code of worker processes
void bind_executors(nb::module_& module);     // `ExecutorCallee`, `CallLanes`

// Runs `body`, which runs Python code, under the GIL. Meanwhile the interpreter may begin to
// finalize, and Python up to 3.13 then ends this thread by a forced unwind. Destructors would drop
// references and release the GIL without having it. So the thread stops here for good instead, as
// in Python 3.14 (see also xla/ffi.h).
template <typename Body>
auto running_python(Body&& body) {
  return outliving_thread_exit(body);
}

// Holds the GIL for its lifetime. Nests, also if the GIL is already held.
class GilScope : Immovable {
 public:
  GilScope() : state_((attach_thread(), PyGILState_Ensure())) {}
  ~GilScope() { PyGILState_Release(state_); }

 private:
  // Gives this thread a thread state that outlives the next Release.
  static void attach_thread() {
    thread_local bool attached = false;
    if (std::exchange(attached, true)) return;
    if (PyGILState_GetThisThreadState() != nullptr) return;  // Python's own thread
    (void)PyGILState_Ensure();
    (void)PyEval_SaveThread();
    at_thread_end = []() noexcept {
      running_python([] {
        (void)PyGILState_Ensure();
        PyGILState_Release(PyGILState_LOCKED);    // the second Ensure
        PyGILState_Release(PyGILState_UNLOCKED);  // the first, which leaves none
      });
    };
  }

  PyGILState_STATE state_;
};

// The same for an active call (core/lifecycle.h): false, without the GIL, once the process is
// ending.
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

// Runs `body` without the GIL, which this thread holds. nanobind's gil_scoped_release takes the GIL
// back in a destructor; there, the forced unwind of a daemon thread in a finalizing interpreter
// ends the process. Here the thread stops for good, as above. Its locks are then never released, so
// `body` must return without locks.
template <typename Body>
auto without_gil(Body&& body) -> decltype(body()) {
  struct Unlocked {
    ~Unlocked() {
      running_python([this] { PyEval_RestoreThread(state); });
    }
    PyThreadState* state = PyEval_SaveThread();
  } unlocked;
  return body();
}

// PyObject_CallFunction by running_python(). Returns no object, with a Python error, if it raised.
template <typename... Args>
nb::object call_python(PyObject* function, const char* format, Args... args) {
  return nb::steal(
      running_python([&] { return PyObject_CallFunction(function, format, args...); }));
}

// `taken(f(...))`: the new reference from a function of Python or NumPy. Raises the pending Python
// error if it returned null.
inline nb::object taken(PyObject* made) {
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

// Raises a Python exception.
[[noreturn]] inline void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  nb::raise_python_error();
}

// The Python exception that `body` raises, if any.
template <typename Body>
std::optional<nb::python_error> raised_by(Body&& body) try {
  body();
  return std::nullopt;
} catch (nb::python_error& error) {
  return std::move(error);
}

inline std::chrono::nanoseconds seconds_of(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

inline nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// A dictionary from alternating keys and values.
template <typename... Items>
nb::dict dict_of(const Items&... items) {
  nb::dict made;
  auto add = [&made](auto&& again, const char* key, const auto& value, const auto&... rest) {
    made[key] = value;
    if constexpr (sizeof...(rest) != 0) again(again, rest...);
  };
  add(add, items...);
  return made;
}

// An address as Python's integer.
inline std::uintptr_t number_of(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// --- State that threads share --------------------------------------------------------------------
//
// With the GIL, a function that runs no Python code is a single step for other threads.
// Free-threaded Python has no GIL: there, `GilScope` only attaches the thread. So state of several
// threads is a `Shared` value, or is guarded by nb::ft_mutex, which does nothing with the GIL.
// Unlike std::mutex, it lets the collector stop a thread that waits for it.

// A value whose steps are atomic, by the GIL or without it.
template <typename T>
class Shared {
 public:
  Shared(T value = {}) noexcept : value_(value) {}
  Shared(const Shared& other) noexcept : Shared(static_cast<T>(other)) {}  // before it is shared

#ifdef Py_GIL_DISABLED
  // Relaxed, except for exchange(), by which one thread takes over another one's object.
  operator T() const noexcept { return value_.load(std::memory_order_relaxed); }
  T operator=(T value) noexcept { return value_.store(value, std::memory_order_relaxed), value; }
  void operator+=(T more) noexcept { value_.fetch_add(more, std::memory_order_relaxed); }
  T exchange(T value) noexcept { return value_.exchange(value, std::memory_order_acq_rel); }

 private:
  std::atomic<T> value_;
#else
  operator T() const noexcept { return value_; }
  T operator=(T value) noexcept { return value_ = value; }
  void operator+=(T more) noexcept { value_ += more; }
  T exchange(T value) noexcept { return std::exchange(value_, value); }

 private:
  T value_;
#endif
};

// --- References ----------------------------------------------------------------------------------
//
// XLA destroys executables, and with them the last reference to a callable, on arbitrary threads.
// Taking the GIL there could deadlock with a thread that holds it and waits for this one. So the
// reference is queued and dropped later by a thread with the GIL: the main thread, through a
// pending call, or any binding that drains the queue.

// The lock guards only the queue. Objects are destroyed outside it, because their destructors may
// run any Python code.
struct ReleaseQueue {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  bool scheduled = false, stopped = false;
};

// Drops the queued references. The GIL is held.
inline void drain_released() noexcept {
  auto& queue = immortal<ReleaseQueue>();
  std::vector<PyObject*> objects;
  {
    std::lock_guard lock(queue.mutex);
    objects.swap(queue.objects);
    queue.scheduled = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

// Takes the reference over and drops it soon under the GIL. Thread-safe, with or without the GIL.
inline void release_later(PyObject* object) noexcept {
  auto& queue = immortal<ReleaseQueue>();
  {
    std::lock_guard lock(queue.mutex);
    if (queue.stopped) return;
    queue.objects.push_back(object);
    if (std::exchange(queue.scheduled, true)) return;
  }
  // The interpreter has few pending calls, so one serves the whole queue. If its table is full, the
  // next binding that drains takes the queue.
  auto call = [](void*) {
    drain_released();
    return 0;
  };
  if (Py_AddPendingCall(call, nullptr) == 0) return;
  std::lock_guard lock(queue.mutex);
  queue.scheduled = false;
}

// A reference that may die on any thread.
struct ReleaseLater {
  void operator()(PyObject* object) const noexcept { release_later(object); }
};
using LateReference = std::unique_ptr<PyObject, ReleaseLater>;
inline LateReference late(nb::object object) { return LateReference(object.release().ptr()); }

// From now on, queued references leak, because the interpreter is ending.
inline void stop_releasing() noexcept {
  drain_released();
  std::lock_guard lock(immortal<ReleaseQueue>().mutex);
  immortal<ReleaseQueue>().stopped = true;
}

}  // namespace callgate::bindings

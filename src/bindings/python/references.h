// Python references that die on threads without the GIL, and callees that Python refers to.
//
// XLA destroys executables, and with them the last reference to a callable, on whatever thread
// comes by. Taking the GIL there could deadlock with a thread that holds it and waits for this one.
// So the reference is queued and dropped later by a thread that has the GIL: the main thread,
// through a pending call, or any binding that drains on its way.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/gil.h"
#include "core/lifetime.h"
#include "core/registry.h"

namespace callgate::bindings {

// The lock guards the queue alone: objects are destroyed outside it, since their destructors may
// run any Python code.
struct ReleaseQueue {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  bool scheduled = false, stopped = false;
};

// Drops what is queued. The GIL is held.
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

// Takes the reference over; drops it soon under the GIL. Any thread, GIL held or not.
inline void release_later(PyObject* object) noexcept {
  auto& queue = immortal<ReleaseQueue>();
  {
    std::lock_guard lock(queue.mutex);
    if (queue.stopped) return;
    queue.objects.push_back(object);
    if (std::exchange(queue.scheduled, true)) return;
  }
  // The interpreter keeps few pending calls, so one stands for the whole queue. A full table is no
  // loss: the next binding that drains takes the queue along.
  auto call = [](void*) {
    drain_released();
    return 0;
  };
  if (Py_AddPendingCall(call, nullptr) == 0) return;
  std::lock_guard lock(queue.mutex);
  queue.scheduled = false;
}

// A reference that may die anywhere.
struct ReleaseLater {
  void operator()(PyObject* object) const noexcept { release_later(object); }
};
using LateReference = std::unique_ptr<PyObject, ReleaseLater>;
inline LateReference late(nb::object object) { return LateReference(object.release().ptr()); }

// After this, queued references are leaked: the interpreter is going away.
inline void stop_releasing() noexcept {
  drain_released();
  std::lock_guard lock(immortal<ReleaseQueue>().mutex);
  immortal<ReleaseQueue>().stopped = true;
}

// `Callee`, `Check`, `Kernel`, `CudaKernel` and `Tap`: keeps a callee, and its name, alive. The GIL
// is held, so what has died elsewhere, and what dies with the callee, dies at once.
template <typename C>
class Handle {
 public:
  explicit Handle(std::shared_ptr<C> callee) : callee_(std::move(callee)) {
    drain_released();
    Registry::instance().add(callee_);
  }
  Handle(Handle&&) noexcept = default;
  ~Handle() {
    if (callee_ == nullptr) return;
    Registry::instance().remove(*callee_);
    callee_.reset();
    drain_released();
  }

  C& callee() const { return *callee_; }
  const std::shared_ptr<C>& shared() const { return callee_; }
  const std::string& name() const { return callee_->name(); }

 private:
  std::shared_ptr<C> callee_;
};

// The Python type of a handle. Its `__init__` is for the caller to add.
template <typename H, typename... Extra>
nb::class_<H> bind_handle(nb::module_& module, const char* name, const Extra&... extra) {
  return nb::class_<H>(module, name, nb::is_weak_referenceable(), extra...)
      .def_prop_ro("name", &H::name);
}

}  // namespace callgate::bindings

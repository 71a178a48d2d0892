// The lock guards the queue alone: objects are destroyed outside it, since their destructors may
// run any Python code.
#include "bindings/python/deferred.h"

#include <mutex>
#include <utility>
#include <vector>

#include "core/lifetime.h"

namespace callgate::bindings {
namespace {

struct Queue {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  bool scheduled = false;
  bool stopped = false;
};

Queue& queue() { return immortal<Queue>(); }

}  // namespace

void release_later(PyObject* object) noexcept {
  Queue& q = queue();
  bool schedule = false;
  {
    std::lock_guard lock(q.mutex);
    if (q.stopped) return;
    q.objects.push_back(object);
    schedule = !std::exchange(q.scheduled, true);
  }
  if (!schedule) return;
  // The interpreter keeps few pending calls, so one stands for the whole queue. A full table is no
  // loss: the next binding that drains takes the queue along.
  auto call = [](void*) {
    drain_released();
    return 0;
  };
  if (Py_AddPendingCall(call, nullptr) != 0) {
    std::lock_guard lock(q.mutex);
    q.scheduled = false;
  }
}

void drain_released() noexcept {
  Queue& q = queue();
  std::vector<PyObject*> objects;
  {
    std::lock_guard lock(q.mutex);
    objects.swap(q.objects);
    q.scheduled = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

void stop_releasing() noexcept {
  drain_released();
  std::lock_guard lock(queue().mutex);
  queue().stopped = true;
}

}  // namespace callgate::bindings

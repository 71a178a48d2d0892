// SPDX-License-Identifier: Apache-2.0
// Python jobs on callgate's threads: on a worker, or in the queue of a named thread.
#include "bindings/gate/thread.h"

#include <nanobind/stl/string.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/threads.h"

namespace callgate::bindings {
namespace {

// A job that calls `job()`, which must not raise.
std::function<void()> python_job(nb::object job) {
  return [held = std::make_shared<LateReference>(late(std::move(job)))] {
    ActiveGil gil;
    if (!gil) return;  // the process is ending
    nb::object result = call_unraisable(held->get(), nullptr);
    held->reset();
    drain_released();
  };
}

// Runs `job()` soon on a worker, without locks; no job waits for another. False if the process is
// ending, or is a fork's child, which has no such threads.
bool submit_job(nb::object job) {
  auto run = python_job(std::move(job));
  return without_gil([&] { return WorkerPool::instance().submit(std::move(run)); });
}

}  // namespace

void bind_threads(nb::module_& module) {
  module.def(
      "submit", &submit_job, nb::arg("job"),
      "Calls job(), which must not raise, on one of callgate's threads; False if there is none.");
  nb::class_<ThreadHandle>(module, "NamedThread", "A thread that runs its jobs in order.")
      .def(nb::init<std::string>(), nb::arg("name"))
      .def_prop_ro("number", [](const ThreadHandle& h) { return h.thread->number(); })
      .def("is_here", [](const ThreadHandle& h) { return h.thread->is_here(); })
      .def(
          "submit",
          [](const ThreadHandle& h, nb::object job) {
            auto run = python_job(std::move(job));
            return without_gil([&] { return h.thread->submit(std::move(run)); });
          },
          nb::arg("job"),
          "Calls job(), which must not raise, on the thread; False once it is closed.")
      .def("close", [](const ThreadHandle& h) { h.thread->close(); })
      .def(
          "has_ended",
          [](const ThreadHandle& h, double seconds) {
            return without_gil([&] { return h.thread->has_ended(seconds_of(seconds)); });
          },
          nb::arg("seconds"), "After close(): True if it has ended in time.");
  module.def("current_thread", &NamedThread::current,
             "The number of the running named thread; 0 on other threads.");
  module.def(
      "serve_thread",
      [](double seconds) {
        return without_gil([&] { return NamedThread::serve(seconds_of(seconds)); });
      },
      nb::arg("seconds"),
      "On a named thread: runs its next job inside the current one, if one comes in time.");
}

}  // namespace callgate::bindings

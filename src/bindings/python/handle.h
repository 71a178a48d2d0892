// SPDX-License-Identifier: Apache-2.0
// Python's handle on a callee of the runtime, which the cycle collector can traverse, and its
// Python type. The GIL is held in all of these.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "bindings/python/gil.h"
#include "core/call.h"
#include "core/lifetime.h"

namespace callgate::bindings {

// Calls the function that waits for the process's first callee, once (jitted.cc).
void tell_first_callee();

// `Callee`, `Check`, `Kernel`, `CudaKernel` and `Tap`: keeps a callee, and its name, alive. The GIL
// is held, so queued references, and those of the callee, are dropped at once.
template <typename C>
struct Handle : Immovable {
  explicit Handle(std::shared_ptr<C> of) : callee(std::move(of)) {
    tell_first_callee();
    drain_released();
    Registry::instance().add(callee);
  }
  ~Handle() {
    Registry::instance().remove(*callee);
    callee.reset();
    drain_released();
  }

  std::shared_ptr<C> callee;
};

template <typename H>
constexpr bool kHasReferences = requires(const H& handle) { handle.callee->references(); };

// Lets Python's cycle collector traverse the handle of a callee with `references()`, or a handle
// with visit() and clear(), because a callable may refer to its own gate. Only while no executable
// shares the callee, since the collector can't follow that reference.
template <typename H>
int traverse_handle(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const H& handle = *nb::inst_ptr<H>(self);
  if (handle.callee.use_count() != 1) return 0;
  if constexpr (kHasReferences<H>) {
    for (const LateReference* held : handle.callee->references()) Py_VISIT(held->get());
    return 0;
  } else {
    return handle.visit(visit, arg);
  }
}

template <typename H>
int clear_handle(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  const H& handle = *nb::inst_ptr<H>(self);
  if (handle.callee.use_count() != 1) return 0;
  if constexpr (kHasReferences<H>) {
    for (LateReference* held : handle.callee->references()) {
      LateReference none = late(nb::none());
      std::swap(*held, none);
      Py_XDECREF(none.release());
    }
  } else {
    handle.clear();
  }
  return 0;
}

// The Python type of a callee's handle, with the collector's functions, and with the statistics of
// a callee that has `counters`. The caller adds `__init__`.
template <typename H, typename... Extra>
nb::class_<H> bind_callee(nb::module_& module, const char* name, const Extra&... extra) {
  static PyType_Slot slots[] = {{0, nullptr}, {0, nullptr}, {0, nullptr}};
  if constexpr (kHasReferences<H> || requires(const H& handle) { handle.clear(); }) {
    slots[0] = {Py_tp_traverse, reinterpret_cast<void*>(&traverse_handle<H>)};
    slots[1] = {Py_tp_clear, reinterpret_cast<void*>(&clear_handle<H>)};
  }
  nb::class_<H> made(module, name, nb::type_slots(slots), nb::is_weak_referenceable(), extra...);
  made.def_prop_ro("name", [](const H& handle) { return handle.callee->name(); });
  made.def(
      "give_up_name", [](const H& handle) { Registry::instance().remove(*handle.callee); },
      "Frees its name. Loaded programs keep calling it.");
  made.def(
      "claim_name", [](const H& handle) { Registry::instance().claim(handle.callee); },
      "Later loaded programs call it, even if another callee has its name.");
  made.def(
      "release_name", [](const H& handle) { Registry::instance().release(*handle.callee); },
      "Ends claim_name().");
  if constexpr (requires(const H& handle) { handle.callee->counters; })
    made.def("stats", [](const H& handle) {
      const auto& kept = handle.callee->counters;
      auto number = [](std::int64_t count) { return count; };  // of an integer or an atomic
      return dict_of("calls", number(kept.calls), "errors", number(kept.errors), "bytes",
                     number(kept.bytes), "python_ns", number(kept.python_ns), "gil_wait_ns",
                     number(kept.gil_wait_ns));
    });
  return made;
}

}  // namespace callgate::bindings

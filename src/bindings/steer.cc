// SPDX-License-Identifier: Apache-2.0
// Knobs and requests to stop, which programs read without the GIL.
#include "cells/steer.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bindings/python/gil.h"
#include "bindings/python/handle.h"

namespace callgate::bindings {
namespace {

struct KnobHandle : Handle<KnobCallee> {
  KnobHandle(std::string name, std::uint64_t bits)
      : Handle(std::make_shared<KnobCallee>(std::move(name), bits)) {}
};

struct StopHandle : Handle<StopCallee> {
  explicit StopHandle(std::string name) : Handle(std::make_shared<StopCallee>(std::move(name))) {}
};

// No signal handler can raise between the two steps; it would leave a stop that counts a dispatch
// that never happened.
nb::object run_dispatched(const nb::list& stops, const nb::handle& run, const nb::args& args,
                          const nb::kwargs& kwargs) {
  for (nb::handle stop : stops) nb::cast<const StopHandle&>(stop).callee->dispatched();
  return run(*args, **kwargs);
}

}  // namespace

void bind_steer(nb::module_& module) {
  bind_callee<KnobHandle>(module, "Knob", "A number that programs read and the host writes.")
      .def(nb::init<std::string, std::uint64_t>(), nb::arg("name"), nb::arg("bits"))
      .def("set", [](const KnobHandle& knob, std::uint64_t bits) { knob.callee->set(bits); });
  bind_callee<StopHandle>(module, "Stop", "True if a program was asked to stop.")
      .def(nb::init<std::string>(), nb::arg("name"));
  module.def("run_dispatched", &run_dispatched, nb::arg("stops"), nb::arg("run"), nb::arg("args"),
             nb::arg("kwargs"), "Calls run(*args, **kwargs), which dispatches the stops' program.");
  module.def("request_stop", &StopRequests::add);
  module.def("stop_requests", &StopRequests::count);
}

}  // namespace callgate::bindings

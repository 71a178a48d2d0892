// SPDX-License-Identifier: Apache-2.0
// Gates whose lanes a Python function sends elsewhere: to an executor, or to the workers with the
// objects of a call. The function gets all lanes of a call and delivers their results. Under the
// GIL.
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/gate/gate.h"
#include "bindings/gate/site.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/python/hooks.h"
#include "bindings/workers/lanes.h"

namespace callgate::bindings {
namespace {

class ExecutorCallee final : public GateCallee,
                             public std::enable_shared_from_this<ExecutorCallee> {
 public:
  // `run(spec, lanes)` runs all lanes of a CallLanes.
  ExecutorCallee(std::string name, nb::object of)
      : GateCallee(std::move(name)), run(late(std::move(of))) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  std::array<LateReference*, 1> references() { return {&run}; }

  LateReference run;
  Counters counters;
};

class ExecutorSite final : public GateSite<ExecutorSite, ExecutorCallee> {
 public:
  ExecutorSite(std::shared_ptr<ExecutorCallee> callee, SiteSpec spec)
      : GateSite(std::move(callee), std::move(spec)) {}

  void run_watched(const Call& call) {
    const std::optional<LanesOfCall> of_call = lanes_of(call);
    const LanesOfCall* lanes = of_call ? &*of_call : nullptr;
    std::int64_t first = 0, failed = -1;  // the last part's first lane; its failed lane
    auto run = [&](const Call& part, const LanesOfCall* of_part, std::int64_t lane) {
      first = lane;
      run_lanes(part, of_part == nullptr ? nullptr : &**of_part, failed);
    };
    run_counted(
        call, lanes == nullptr ? 1 : (*lanes)->count(), [&] { make_lanes(call, lanes, run); },
        [&] { return lanes == nullptr || failed < 0 ? "" : lanes->name(first + failed); });
  }

 private:
  void run_lanes(const Call& call, const Lanes* lanes, std::int64_t& failed) {
    auto made = std::make_unique<CallLanes>(call, lanes, name(), spec_.spec, casts());
    CallLanes& borrowed = *made;
    nb::object shown = nb::cast(made.release(), nb::rv_policy::take_ownership);
    nb::object done = call_python(callee_->run.get(), "sO", spec_.spec.c_str(), shown.ptr());
    borrowed.end();  // `shown` keeps it
    failed = borrowed.failed;
    if (!done.is_valid()) nb::raise_python_error();
  }
};

std::shared_ptr<Site> ExecutorCallee::specialise(SiteSpec spec) {
  return std::make_shared<ExecutorSite>(shared_from_this(), std::move(spec));
}

using ExecutorHandle = Handle<ExecutorCallee>;

}  // namespace

void bind_executors(nb::module_& module) {
  nb::class_<CallLanes>(module, "CallLanes", "The lanes of one call of an executor's gate.")
      .def("__len__", &CallLanes::count)
      .def("take", &CallLanes::take, nb::arg("lane"), "Copies of a lane's flat operands.")
      .def("empty", &CallLanes::empty, "Uninitialized arrays for a lane's results.")
      .def("give", &CallLanes::give, nb::arg("lane"), nb::arg("values"),
           "Checks and stores a tuple of a lane's flat results.")
      .def_prop_rw(
          "failed", [](const CallLanes& lanes) -> std::int64_t { return lanes.failed; },
          [](CallLanes& lanes, std::int64_t lane) { lanes.failed = lane; },
          "The lane whose exception the call raises, or -1.")
      .def("take_one", &CallLanes::take_one, nb::arg("lane"), nb::arg("operand"),
           "A copy of one of a lane's flat operands.")
      .def_prop_ro("cast", &CallLanes::cast, "True if results are cast to their declared types.");
  bind_callee<ExecutorHandle>(module, "ExecutorCallee",
                              "The runtime's handle on an executor's callable, by name.")
      .def(
          "__init__",
          [](ExecutorHandle* self, std::string name, nb::object run) {
            new (self)
                ExecutorHandle(std::make_shared<ExecutorCallee>(std::move(name), std::move(run)));
          },
          nb::arg("name"), nb::arg("run"));
}

}  // namespace callgate::bindings

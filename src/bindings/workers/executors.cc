// SPDX-License-Identifier: Apache-2.0
// Gates whose lanes an executor of Python's runs: what XLA calls hands all lanes of a call to a
// function of Python's, which sends them out and brings their results back. Under the GIL.
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/results.h"
#include "bindings/arrays/views.h"
#include "bindings/gate/gate.h"
#include "bindings/gate/tape.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/threads.h"

namespace callgate::bindings {
namespace {

// The lanes of one call, for as long as it runs.
class CallLanes : Immovable {
 public:
  CallLanes(const Call& call, const Lanes* lanes, std::string gate, std::string spec, bool cast)
      : call_(&call), lanes_(lanes), gate_(std::move(gate)), spec_(std::move(spec)), cast_(cast) {}

  void end() { call_ = nullptr; }
  std::int64_t count() const { return lanes_ == nullptr ? 1 : lanes_->count(); }

  // Copies of a lane's operands.
  nb::tuple take(std::int64_t lane) const {
    check(lane);
    std::vector<ArrayView> views(call_->operands.begin(), call_->operands.end());
    if (lanes_ != nullptr) lanes_->select_operands(lane, call_->operands, views);
    nb::list arrays;
    for (const ArrayView& view : views) arrays.append(make_copy(view));
    return nb::tuple(arrays);
  }

  // Of a lane's results, without their values.
  nb::tuple empty() const {
    check(0);
    std::vector<ArrayView> views(call_->results.begin(), call_->results.end());
    if (lanes_ != nullptr) lanes_->select_results(0, call_->results, views);
    nb::list arrays;
    for (const ArrayView& view : views) arrays.append(new_array(view, /*data=*/nullptr, 0));
    return nb::tuple(arrays);
  }

  // A lane's results, flat.
  void give(std::int64_t lane, const nb::object& values) const {
    check(lane);
    std::vector<ArrayView> views(call_->results.begin(), call_->results.end());
    if (lanes_ != nullptr) lanes_->select_results(lane, call_->results, views);
    if (!PyTuple_Check(values.ptr()) || nb::len(values) != views.size())
      mismatch(-1, "a tuple of " + std::to_string(views.size()) + " arrays",
               nb::type_name(values.type()).c_str());
    for (std::size_t i = 0; i < views.size(); ++i) {
      nb::object value = values[i];
      auto came = value.is_none() ? std::optional<std::string>("None")
                                  : store(views[i], value.ptr(), cast_);
      if (came) mismatch(static_cast<int>(i), to_string(views[i]), *came);
    }
  }

 private:
  void check(std::int64_t lane) const {
    if (call_ == nullptr) raise(PyExc_RuntimeError, "CallLanes: the call has ended");
    if (lane < 0 || lane >= count()) raise(PyExc_IndexError, "CallLanes: no such lane");
  }
  [[noreturn]] void mismatch(int index, const std::string& expected, const std::string& got) const {
    call_python(hooks.result_error, "ssiss", gate_.c_str(), spec_.c_str(), index, expected.c_str(),
                got.c_str());
    nb::raise_python_error();
  }

  const Call* call_;
  const Lanes* lanes_;
  std::string gate_, spec_;
  bool cast_;
};

class ExecutorCallee final : public GateCallee,
                             public std::enable_shared_from_this<ExecutorCallee> {
 public:
  // `run(spec, lanes)` runs all lanes of a CallLanes.
  ExecutorCallee(std::string name, nb::object of)
      : GateCallee(std::move(name)), run(late(std::move(of))) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  bool reads_context() const noexcept override { return false; }

  const LateReference run;
  Counters counters;
};

class ExecutorSite final : public Site {
 public:
  ExecutorSite(std::shared_ptr<ExecutorCallee> callee, SiteSpec spec)
      : callee_(std::move(callee)), spec_(std::move(spec)) {}

  void run(const Call& call) override {
    watched_for_stalls(callee_, call, [&] { run_counted(call); });
  }

 private:
  void run_counted(const Call& call) {
    std::optional<LanesOfCall> of_call;
    if (!spec_.lanes.empty()) of_call.emplace(spec_.lanes, call.operands, call.results);
    const bool cast = !spec_.held.text("cast").empty();
    GilScope gil;
    Counters& counters = callee_->counters;
    counters.bytes += nbytes(call);
    const Lanes* lanes = of_call ? &**of_call : nullptr;
    counters.calls += lanes == nullptr ? 1 : lanes->count();
    auto run = [&](const Call& part, const Lanes* of_part, std::int64_t) {
      run_lanes(part, of_part, cast);
    };
    auto raised = raised_by([&] {
      if (!is_taping()) return run(call, lanes, 0);
      lanes_on_tape(callee_->name(), spec_, call, lanes, run);
    });
    if (!raised) return;
    counters.errors += 1;
    throw Error::verbatim(ErrorCode::kInternal, failure_text(*raised, callee_->name(), spec_.site,
                                                             spec_.layout, call.context));
  }

  void run_lanes(const Call& call, const Lanes* lanes, bool cast) {
    auto made = std::make_unique<CallLanes>(call, lanes, callee_->name(), spec_.spec, cast);
    CallLanes& borrowed = *made;
    nb::object shown = nb::cast(made.release(), nb::rv_policy::take_ownership);
    nb::object done = call_python(callee_->run.get(), "sO", spec_.spec.c_str(), shown.ptr());
    borrowed.end();  // `shown` keeps it
    if (!done.is_valid()) nb::raise_python_error();
  }

  std::shared_ptr<ExecutorCallee> callee_;
  SiteSpec spec_;
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
      .def("empty", &CallLanes::empty, "Arrays of a lane's results' types.")
      .def("give", &CallLanes::give, nb::arg("lane"), nb::arg("values"),
           "Takes a tuple of a lane's flat results, checked.");
  bind_handle<ExecutorHandle>(module, "ExecutorCallee",
                              "The runtime's handle on a callable that an executor runs, by name.")
      .def(
          "__init__",
          [](ExecutorHandle* self, std::string name, nb::object run) {
            new (self)
                ExecutorHandle(std::make_shared<ExecutorCallee>(std::move(name), std::move(run)));
          },
          nb::arg("name"), nb::arg("run"))
      .def("stats", [](const ExecutorHandle& handle) {
        const Counters& kept = handle.callee->counters;
        return dict_of("calls", kept.calls, "errors", kept.errors, "bytes", kept.bytes, "python_ns",
                       kept.python_ns, "gil_wait_ns", kept.gil_wait_ns);
      });
}

}  // namespace callgate::bindings

// SPDX-License-Identifier: Apache-2.0
// Workers and their gates, for Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/gate/gate.h"
#include "bindings/python/gil.h"
#include "bindings/python/handle.h"
#include "bindings/workers/lanes.h"
#include "bindings/workers/site.h"

namespace callgate::bindings {
namespace {

using WorkerHandle = Handle<WorkerCallee>;

// --- Calls that Python makes

struct SiteOfPython {
  std::shared_ptr<WorkerSite> site;
};

SiteOfPython site_of_python(const WorkerHandle& handle, const std::string& spec, bool cast) {
  SiteSpec chosen;
  chosen.spec = spec;
  if (cast) chosen.held.add_string("cast", "yes");
  return {std::static_pointer_cast<WorkerSite>(handle.callee->specialise(std::move(chosen)))};
}

std::vector<ArrayView> views_of(const nb::object& arrays) {
  std::vector<ArrayView> views;
  for (nb::handle array : arrays) {
    auto view = known_view(array);
    if (!view || PyArray_ISCARRAY_RO(as_array(array)) == 0)
      raise(PyExc_TypeError, "WorkerSite: expected dense arrays of dtypes that JAX has");
    views.push_back(*view);
  }
  return views;
}

// One lane, from NumPy arrays.
void run_arrays(const SiteOfPython& site, const nb::object& operands, const nb::object& results,
                std::int64_t lane, std::uint32_t interrupts) {
  const std::vector<ArrayView> inputs = views_of(operands);
  std::vector<ArrayView> outputs = views_of(results);
  Chosen chosen;
  chosen.first_lane = lane;
  chosen.interrupts = interrupts;
  site.site->run_from_python(Call{inputs, outputs, {}}, Lanes(), chosen);
}

// All lanes of a running call; returns the workers that ran them.
std::vector<std::uint64_t> run_lanes(const SiteOfPython& site, CallLanes& lanes,
                                     const std::vector<std::uint64_t>& placed, bool send_results) {
  std::vector<std::uint64_t> ran_on(static_cast<std::size_t>(lanes.count()));
  if (!placed.empty() && placed.size() != ran_on.size())
    raise(PyExc_ValueError, "WorkerSite: expected a worker for each lane");
  Chosen chosen;
  chosen.placed = placed;
  chosen.ran_on = ran_on;
  chosen.send_results = send_results;
  const Lanes none;
  std::int64_t failed = -1;
  chosen.failed = &failed;
  auto raised = raised_by([&] {
    site.site->run_from_python(lanes.call(), lanes.lanes() == nullptr ? none : *lanes.lanes(),
                               chosen);
  });
  if (!raised) return ran_on;
  lanes.failed = failed;
  throw *std::move(raised);
}

}  // namespace

void bind_workers(nb::module_& module) {
  nb::class_<PoolHandle>(module, "WorkerPool",
                         "Worker processes, and the calls that wait for them.")
      .def(
          "__init__",
          [](PoolHandle* self, std::vector<std::string> command,
             std::vector<std::string> environment, const nb::bytes& start, std::size_t workers) {
            new (self) PoolHandle({std::move(command), std::move(environment),
                                   std::string(start.c_str(), start.size()), workers});
          },
          nb::arg("command"), nb::arg("environment"), nb::arg("start"), nb::arg("workers"))
      .def("pids",
           [](const PoolHandle& h) {
             std::vector<int> pids;
             for (pid_t pid : h.pool->pids()) pids.push_back(static_cast<int>(pid));
             return pids;
           })
      .def("replaced", [](const PoolHandle& h) { return h.pool->replaced(); })
      .def("closed", [](const PoolHandle& h) { return h.pool->closed(); })
      .def(
          "worker",
          [](const PoolHandle& h, std::uint64_t number) -> nb::object {
            if (int index = h.pool->index_of(number); index != Pool::kAny) return nb::int_(index);
            const WorkerFailure why = h.pool->gone(number);
            return dict_of("worker", why.worker, "pid", static_cast<int>(why.pid), "code",
                           why.how.code, "signal", why.how.signal, "said", bytes_of(why.said));
          },
          nb::arg("number"), "A worker's index by its number, or its end if it has ended.")
      .def(
          "drop",
          [](const PoolHandle& h, std::uint64_t object, std::uint64_t worker) {
            h.pool->forget(object | kObject, worker);
          },
          nb::arg("object"), nb::arg("worker"),
          "Lets the worker of this number drop an object; 0 stands for all workers.")
      .def(
          "close",
          [](const PoolHandle& h, double seconds) {
            without_gil([&] { h.pool->shut_down(seconds_of(seconds)); });
          },
          nb::arg("seconds"), "Ends the workers, after this time for their running code.");
  bind_callee<WorkerHandle>(module, "WorkerCallee",
                            "The runtime's handle on a callable in worker processes, by name.")
      .def(
          "__init__",
          [](WorkerHandle* self, std::string name, nb::object start, nb::object describe,
             nb::object failed, double timeout, double loading, int retries, bool in_order,
             bool by_lane) {
            new (self) WorkerHandle(std::make_shared<WorkerCallee>(
                std::move(name), std::move(start), std::move(describe), std::move(failed),
                WorkerOptions{seconds_of(timeout), seconds_of(loading), retries, in_order,
                              by_lane}));
          },
          nb::arg("name"), nb::kw_only(), nb::arg("start"), nb::arg("describe"), nb::arg("failed"),
          nb::arg("timeout"), nb::arg("loading"), nb::arg("retries"), nb::arg("in_order"),
          nb::arg("by_lane"))
      .def("site", &site_of_python, nb::arg("spec"), nb::arg("cast"),
           "A call site, for calls from Python.");
  nb::class_<SiteOfPython>(module, "WorkerSite", "A call site of workers, for calls from Python.")
      .def("run", &run_arrays, nb::arg("operands"), nb::arg("results"), nb::arg("lane"),
           nb::arg("interrupts"),
           "Runs one lane of flat arrays and raises its failure. A Ctrl-C after `interrupts` of "
           "them ends it.")
      .def("run_lanes", &run_lanes, nb::arg("lanes"), nb::arg("placed"), nb::arg("send_results"),
           "Runs all lanes of a call on the workers with these numbers (empty: any workers); "
           "returns the numbers of the workers that ran them.");
}

}  // namespace callgate::bindings

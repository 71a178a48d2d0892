// SPDX-License-Identifier: Apache-2.0
// Gates that run in worker processes, as compiled programs call them: without the GIL, until
// something fails. A worker's side is serve.cc.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/views.h"
#include "bindings/gate/gate.h"
#include "bindings/gate/tape.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/threads.h"
#include "workers/spread.h"

namespace callgate::bindings {
namespace {

// Numbers of definitions.
std::uint64_t next_definition() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);  // a number, no order
}

// A definition that the pool's workers drop when nobody needs it any more.
class HeldDefinition : Immovable {
 public:
  HeldDefinition(std::shared_ptr<Pool> pool, std::uint64_t of, std::string bytes)
      : pool_(std::move(pool)), definition_{next_definition(), of, std::move(bytes)} {}
  ~HeldDefinition() { pool_->forget(definition_.id); }

  const Definition& get() const noexcept { return definition_; }

 private:
  std::shared_ptr<Pool> pool_;
  Definition definition_;
};

std::string bytes_in(const nb::object& given) {
  const auto bytes = nb::cast<nb::bytes>(given);
  return {bytes.c_str(), bytes.size()};
}

struct PoolHandle {
  explicit PoolHandle(PoolOptions options)
      : pool(without_gil([&] { return Pool::make(std::move(options)); })) {}
  PoolHandle(const PoolHandle&) = delete;
  PoolHandle& operator=(const PoolHandle&) = delete;
  ~PoolHandle() {
    without_gil([&] { pool.reset(); });
  }

  std::shared_ptr<Pool> pool;
};

struct WorkerOptions {
  std::chrono::nanoseconds timeout{0};
  int retries = 0;
  bool in_order = false, by_lane = false;
};

// Relaxed throughout: counts, which order nothing.
struct SharedCounters {
  std::atomic<std::int64_t> calls{0}, errors{0}, bytes{0}, python_ns{0};
};

class WorkerCallee final : public GateCallee, public std::enable_shared_from_this<WorkerCallee> {
 public:
  // `start()` gives the WorkerPool, `describe(spec, cast)` the bytes that define a call site for a
  // worker, and `describe(None, False)` those that define the gate; `failed(what)` makes an
  // exception of a WorkerFailure.
  WorkerCallee(std::string name, nb::object started, nb::object described, nb::object made,
               WorkerOptions chosen)
      : GateCallee(std::move(name)),
        options(chosen),
        start(late(std::move(started))),
        describe(late(std::move(described))),
        failed(late(std::move(made))) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  bool reads_context() const noexcept override { return options.by_lane; }

  const WorkerOptions options;
  LateReference start, describe, failed;
  SharedCounters counters;
  // From the first site on that is to call a worker; under the GIL.
  std::shared_ptr<Pool> pool;
  std::shared_ptr<HeldDefinition> definition;
};

class WorkerSite final : public Site {
 public:
  WorkerSite(std::shared_ptr<WorkerCallee> callee, SiteSpec spec)
      : callee_(std::move(callee)), spec_(std::move(spec)) {}

  // Has the definitions made that workers need, and the pool, once. Under the GIL; throws a Python
  // exception.
  void prepare() {
    auto given = [](nb::object object) {
      if (!object.is_valid()) nb::raise_python_error();
      return object;
    };
    if (prepared_.load(std::memory_order_relaxed)) return;  // under the GIL
    if (callee_->definition == nullptr) {
      nb::object started = given(call_python(callee_->start.get(), ""));
      nb::object described = given(call_python(callee_->describe.get(), "OO", Py_None, Py_False));
      callee_->pool = nb::cast<const PoolHandle&>(started).pool;
      callee_->definition = std::make_shared<HeldDefinition>(callee_->pool, 0, bytes_in(described));
    }
    const bool cast = !spec_.held.text("cast").empty();
    nb::object described = given(
        call_python(callee_->describe.get(), "sO", spec_.spec.c_str(), cast ? Py_True : Py_False));
    if (prepared_.load(std::memory_order_relaxed)) return;  // another thread's, meanwhile
    gate_ = callee_->definition;
    site_ = std::make_unique<HeldDefinition>(callee_->pool, gate_->get().id, bytes_in(described));
    prepared_.store(true, std::memory_order_release);  // who sees it sees both definitions
  }

  void run(const Call& call) override {
    watched_for_stalls(callee_, call, [&] { run_counted(call); });
  }

 private:
  void run_counted(const Call& call) {
    const bool timed = settings.recorded.load(std::memory_order_relaxed) != 0;  // see Settings
    const auto begin = std::chrono::steady_clock::now();
    callee_->counters.bytes.fetch_add(nbytes(call), std::memory_order_relaxed);
    std::optional<LanesOfCall> of_call;
    if (!spec_.lanes.empty()) of_call.emplace(spec_.lanes, call.operands, call.results);
    const Lanes* lanes = of_call ? &**of_call : nullptr;
    callee_->counters.calls.fetch_add(lanes == nullptr ? 1 : lanes->count(),
                                      std::memory_order_relaxed);
    if (is_taping() || !prepared_.load(std::memory_order_acquire)) {  // see prepare()
      run_under_gil(call, lanes);
    } else {
      try {
        spread_call(call, lanes, first_lane_of(call, lanes));
      } catch (const WorkerFailure& why) {
        GilScope gil;
        fail(raised_by([&] { raise_failure(why, call); }), call, why.kind);
      }
    }
    if (!timed) return;
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    callee_->counters.python_ns.fetch_add(took.count(), std::memory_order_relaxed);
    if ((settings.recorded.load(std::memory_order_relaxed) & Settings::kTracing) == 0) return;
    thread_local const std::int64_t thread = thread_number();
    std::lock_guard lock(immortal<Trace>().mutex);
    immortal<Trace>().events.emplace_back(
        callee_->name(), thread, std::chrono::nanoseconds(begin.time_since_epoch()).count(), 0,
        took.count());
  }

  // A call that Python has to do with before workers have, if they have at all.
  void run_under_gil(const Call& call, const Lanes* lanes) {
    auto kind = WorkerFailure::Kind::kRaised;
    auto make = [&](const Call& part, const Lanes* of_part, std::int64_t lane) {
      prepare();
      std::optional<WorkerFailure> why;
      without_gil([&] {
        try {
          spread_call(part, of_part, first_lane_of(call, lanes) + lane);
        } catch (const WorkerFailure& failure) {
          why = failure;
        }
      });
      if (!why) return;
      kind = why->kind;
      raise_failure(*why, part);
    };
    GilScope gil;
    auto raised = raised_by([&] {
      if (!is_taping()) return make(call, lanes, 0);
      lanes_on_tape(callee_->name(), spec_, call, lanes, make);
    });
    if (raised) fail(std::move(raised), call, kind);
  }

  static std::int64_t first_lane_of(const Call& call, const Lanes* lanes) {
    return std::max(call.context.shard, 0) * (lanes == nullptr ? 1 : lanes->count());
  }

  void spread_call(const Call& call, const Lanes* lanes, std::int64_t first_lane) {
    const std::array<const Definition*, 2> definitions{&gate_->get(), &site_->get()};
    SpreadOptions options{.definitions = definitions,
                          .timeout = callee_->options.timeout,
                          .retries = callee_->options.retries,
                          .in_order = callee_->options.in_order,
                          .by_lane = callee_->options.by_lane};
    options.check_writes = settings.check_writes.load(std::memory_order_relaxed);  // see there
    options.first_lane = first_lane;
    spread(*callee_->pool, options, call, lanes, lane_time_);
  }

  // Raises the Python exception that a failure stands for. Under the GIL.
  [[noreturn]] void raise_failure(const WorkerFailure& why, const Call& call) {
    if (why.kind == WorkerFailure::Kind::kInterrupted)
      throw Error(ErrorCode::kAborted,
                  "Ctrl-C ended the program at its call of '" + callee_->name() + "'");
    nb::object given = call_python(
        callee_->failed.get(), "(N)",
        dict_of("kind", static_cast<int>(why.kind), "text", why.what(), "raised",
                bytes_of(why.raised), "worker", why.worker, "pid", static_cast<int>(why.pid),
                "code", why.how.code, "signal", why.how.signal, "said", bytes_of(why.said),
                "arguments", to_string(call.operands))
            .release()
            .ptr());
    if (given.is_valid()) PyErr_SetObject(given.type().ptr(), given.ptr());
    nb::raise_python_error();
  }

  [[noreturn]] void fail(std::optional<nb::python_error> raised, const Call& call,
                         WorkerFailure::Kind kind) {
    callee_->counters.errors.fetch_add(1, std::memory_order_relaxed);
    const bool overdue = kind == WorkerFailure::Kind::kOverdue;
    throw Error::verbatim(
        overdue ? ErrorCode::kDeadlineExceeded : ErrorCode::kInternal,
        failure_text(*raised, callee_->name(), spec_.site, spec_.layout, call.context));
  }

  std::shared_ptr<WorkerCallee> callee_;
  SiteSpec spec_;
  std::atomic<bool> prepared_{false};
  std::shared_ptr<HeldDefinition> gate_;
  std::unique_ptr<HeldDefinition> site_;
  LaneTime lane_time_{0};
};

std::shared_ptr<Site> WorkerCallee::specialise(SiteSpec spec) {
  GilScope gil;
  const std::string place = spec.site;
  auto site = std::make_shared<WorkerSite>(shared_from_this(), std::move(spec));
  if (is_replaying()) return site;  // a recording answers its calls: workers may never be needed
  if (auto raised = raised_by([&] { site->prepare(); }))
    throw Error::verbatim(ErrorCode::kInvalidArgument, failure_text(*raised, name(), place));
  return site;
}

using WorkerHandle = Handle<WorkerCallee>;

// For Python's cycle collector, as PyCallee's handle in gate.cc.
int traverse_worker(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  WorkerCallee& callee = *nb::inst_ptr<WorkerHandle>(self)->callee;
  if (callee.weak_from_this().use_count() != 1) return 0;
  for (const LateReference* held : {&callee.start, &callee.describe, &callee.failed})
    Py_VISIT(held->get());
  return 0;
}

int clear_worker(PyObject* self) {
  WorkerCallee& callee = *nb::inst_ptr<WorkerHandle>(self)->callee;
  if (callee.weak_from_this().use_count() != 1) return 0;
  for (LateReference* held : {&callee.start, &callee.describe, &callee.failed}) {
    LateReference none = late(nb::none());
    std::swap(*held, none);
    Py_XDECREF(none.release());
  }
  return 0;
}

PyType_Slot worker_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse_worker)},
                              {Py_tp_clear, reinterpret_cast<void*>(&clear_worker)},
                              {0, nullptr}};

nb::dict stats_of_workers(const WorkerHandle& handle) {
  const SharedCounters& kept = handle.callee->counters;
  auto now = [](const std::atomic<std::int64_t>& count) {
    return count.load(std::memory_order_relaxed);
  };
  return dict_of("calls", now(kept.calls), "errors", now(kept.errors), "bytes", now(kept.bytes),
                 "python_ns", now(kept.python_ns), "gil_wait_ns", 0);
}

}  // namespace

void bind_workers(nb::module_& module) {
  nb::class_<PoolHandle>(module, "WorkerPool", "Worker processes, and who waits for them.")
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
          "close",
          [](const PoolHandle& h, double seconds) {
            without_gil([&] { h.pool->shut_down(seconds_of(seconds)); });
          },
          nb::arg("seconds"), "Ends the workers; what they run has so long to end by itself.");
  bind_handle<WorkerHandle>(module, "WorkerCallee", nb::type_slots(worker_slots),
                            "The runtime's handle on a callable of worker processes, by name.")
      .def(
          "__init__",
          [](WorkerHandle* self, std::string name, nb::object start, nb::object describe,
             nb::object failed, double timeout, int retries, bool in_order, bool by_lane) {
            new (self) WorkerHandle(std::make_shared<WorkerCallee>(
                std::move(name), std::move(start), std::move(describe), std::move(failed),
                WorkerOptions{seconds_of(timeout), retries, in_order, by_lane}));
          },
          nb::arg("name"), nb::kw_only(), nb::arg("start"), nb::arg("describe"), nb::arg("failed"),
          nb::arg("timeout"), nb::arg("retries"), nb::arg("in_order"), nb::arg("by_lane"))
      .def("stats", &stats_of_workers);
}

}  // namespace callgate::bindings

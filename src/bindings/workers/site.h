// SPDX-License-Identifier: Apache-2.0
// A gate that runs in worker processes, and its call sites, which take the GIL only for failures
// and recordings. serve.cc is the worker's side.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings/gate/gate.h"
#include "bindings/gate/site.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/timeline.h"
#include "workers/protocol.h"
#include "workers/spread.h"

namespace callgate::bindings {

// Numbers of definitions.
inline std::uint64_t next_definition() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);  // only a number, no order
}

// A definition that the pool's workers drop when it is no longer needed.
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

inline std::string bytes_in(const nb::object& given) {
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
  std::chrono::nanoseconds timeout{0}, loading{0};
  int retries = 0;
  bool in_order = false, by_lane = false;
};

class WorkerCallee final : public GateCallee, public std::enable_shared_from_this<WorkerCallee> {
 public:
  // `start()` returns the WorkerPool. `describe(spec, cast)` returns the bytes that define a call
  // site for a worker, and `describe(None, False)` those that define the gate. `failed(what)` makes
  // an exception from a WorkerFailure.
  WorkerCallee(std::string name, nb::object started, nb::object described, nb::object made,
               WorkerOptions chosen)
      : GateCallee(std::move(name)),
        options(chosen),
        start(late(std::move(started))),
        describe(late(std::move(described))),
        failed(late(std::move(made))) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  bool reads_context() const noexcept override { return options.by_lane; }
  std::array<LateReference*, 3> references() { return {&start, &describe, &failed}; }

  const WorkerOptions options;
  LateReference start, describe, failed;
  SharedCounters counters;
  // Set by the first site that calls a worker.
  nb::ft_mutex mutex;  // guards them
  std::shared_ptr<Pool> pool;
  std::shared_ptr<HeldDefinition> definition;
};

// Python's choices for a call that it makes itself.
struct Chosen {
  std::int64_t first_lane = 0;
  std::span<const std::uint64_t> placed;
  std::span<std::uint64_t> ran_on;
  bool send_results = false;
  std::optional<std::uint32_t> interrupts;
  std::int64_t* failed = nullptr;  // gets the lane that raised, or -1
};

class WorkerSite final : public GateSite<WorkerSite, WorkerCallee> {
 public:
  WorkerSite(std::shared_ptr<WorkerCallee> callee, SiteSpec spec)
      : GateSite(std::move(callee), std::move(spec)) {}

  // Makes the workers' definitions and the pool, once. Under the GIL; throws a Python exception.
  void prepare() {
    auto given = [](nb::object object) {
      if (!object.is_valid()) nb::raise_python_error();
      return object;
    };
    if (prepared_.load(std::memory_order_acquire)) return;  // see below
    if (!has_definition()) {
      nb::object started = given(call_python(callee_->start.get(), ""));
      nb::object described = given(call_python(callee_->describe.get(), "OO", Py_None, Py_False));
      auto pool = nb::cast<const PoolHandle&>(started).pool;
      auto definition = std::make_shared<HeldDefinition>(pool, 0, bytes_in(described));
      nb::ft_lock_guard lock(callee_->mutex);
      if (callee_->definition == nullptr) {  // not by another thread meanwhile
        callee_->pool = std::move(pool);
        callee_->definition = std::move(definition);
      }
    }
    nb::object described = given(call_python(callee_->describe.get(), "sO", spec_.spec.c_str(),
                                             casts() ? Py_True : Py_False));
    nb::ft_lock_guard lock(callee_->mutex);
    if (prepared_.load(std::memory_order_relaxed)) return;  // by another thread meanwhile
    gate_ = callee_->definition;
    site_ = std::make_unique<HeldDefinition>(callee_->pool, gate_->get().id, bytes_in(described));
    prepared_.store(true, std::memory_order_release);  // readers see both definitions
  }

  void run_watched(const Call& call) {
    if (is_taping() || !prepared_.load(std::memory_order_acquire))  // see prepare()
      return run_under_gil(call);
    try {
      run_in_workers(call, spec_.lanes, {});
    } catch (const WorkerFailure& why) {
      rethrow(why, call);
    }
  }

  // A call from Python, which holds the GIL; raises its failure.
  void run_from_python(const Call& call, const Lanes& lanes, const Chosen& chosen) {
    prepare();
    auto failure = run_without_gil(call, lanes, chosen);
    if (!failure) return;
    if (chosen.failed != nullptr) *chosen.failed = failed_lane(*failure);
    throw exception_of(*failure, call);
  }

 private:
  bool has_definition() {
    nb::ft_lock_guard lock(callee_->mutex);
    return callee_->definition != nullptr;
  }

  std::optional<WorkerFailure> run_without_gil(const Call& call, const Lanes& lanes,
                                               const Chosen& chosen) {
    std::optional<WorkerFailure> failure;
    without_gil([&] {
      try {
        run_in_workers(call, lanes, chosen);
      } catch (const WorkerFailure& why) {
        failure = why;
      }
    });
    return failure;
  }

  // A call that involves Python before the workers, or instead of them.
  void run_under_gil(const Call& call) {
    const std::optional<LanesOfCall> of_call = lanes_of(call);
    const LanesOfCall* lanes = of_call ? &*of_call : nullptr;
    const Lanes none;
    std::optional<WorkerFailure> failed;
    auto make = [&](const Call& part, const LanesOfCall* of_part, std::int64_t lane) {
      prepare();
      const Lanes* own = of_part == nullptr ? nullptr : &**of_part;
      Chosen chosen;
      chosen.first_lane = lane;
      // A part's first lane is the whole call's; run_in_workers() adds the part's own.
      if (lanes != nullptr)
        chosen.first_lane += lanes_before(&**lanes, call) - lanes_before(own, call);
      failed = run_without_gil(part, own == nullptr ? none : *own, chosen);
      if (!failed) return;
      failed->lane += lane;
      throw exception_of(*failed, part);
    };
    GilScope gil;
    auto raised = raised_by([&] { make_lanes(call, lanes, make); });
    if (raised) throw error_of(*raised, call, failed);
  }

  void run_in_workers(const Call& call, const Lanes& lanes, const Chosen& chosen) {
    const bool timed = settings.recorded.load(std::memory_order_relaxed) != 0;  // see Settings
    const auto begin = std::chrono::steady_clock::now();
    callee_->counters.bytes.fetch_add(nbytes(call), std::memory_order_relaxed);
    try {
      spread_call(call, lanes, chosen);
    } catch (const WorkerFailure&) {
      callee_->counters.errors.fetch_add(1, std::memory_order_relaxed);
      throw;
    }
    if (!timed) return;
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    callee_->counters.python_ns.fetch_add(took.count(), std::memory_order_relaxed);
    if (Timeline::on())
      Timeline::add("workers", name(), std::chrono::nanoseconds(begin.time_since_epoch()).count(),
                    0, took.count());
  }

  void spread_call(const Call& call, const Lanes& levels, const Chosen& chosen) {
    const std::array<const Definition*, 2> definitions{&gate_->get(), &site_->get()};
    SpreadOptions options{.definitions = definitions,
                          .timeout = callee_->options.timeout,
                          .retries = callee_->options.retries,
                          .in_order = callee_->options.in_order,
                          .by_lane = callee_->options.by_lane,
                          .loading = callee_->options.loading,
                          .placed = chosen.placed,
                          .ran_on = chosen.ran_on,
                          .send_results = chosen.send_results,
                          .interrupts = chosen.interrupts};
    options.check_writes = settings.check_writes.load(std::memory_order_relaxed);  // see there
    std::optional<LanesOfCall> lanes;
    if (!levels.empty()) lanes.emplace(levels, call.operands, call.results);
    const std::int64_t count = lanes ? (*lanes)->count() : 1;
    callee_->counters.calls.fetch_add(count, std::memory_order_relaxed);
    options.first_lane = chosen.first_lane + lanes_before(lanes ? &**lanes : nullptr, call);
    spread(*callee_->pool, options, call, lanes ? &**lanes : nullptr, lane_time_);
  }

  [[noreturn]] void rethrow(const WorkerFailure& why, const Call& call) const {
    if (why.kind == WorkerFailure::Kind::kInterrupted) throw interrupted(name());
    GilScope gil;
    throw error_of(exception_of(why, call), call, why);
  }

  // The number of lanes of all shards before a call's first one, if numbered levels are outermost.
  // `lanes` is null for a call without levels.
  static std::int64_t lanes_before(const Lanes* lanes, const Call& call) {
    const std::int64_t total = lanes == nullptr ? 1 : lanes->total();
    const std::int64_t count = lanes == nullptr ? 1 : lanes->count();
    return std::max(call.context.shard, 0) * total + call.context.lane * count;
  }

  // The lane whose function raised; -1 if the worker failed, which may have had several lanes.
  static std::int64_t failed_lane(const WorkerFailure& why) {
    return why.kind == WorkerFailure::Kind::kRaised ? why.lane : -1;
  }

  // The XLA error for an exception, from a worker's failure or from Python. Under the GIL.
  Error error_of(const nb::python_error& raised, const Call& call,
                 const std::optional<WorkerFailure>& why) const {
    if (!why || why->kind != WorkerFailure::Kind::kOverdue) {
      const std::int64_t lane = why && !spec_.lanes.empty() ? failed_lane(*why) : -1;
      return failure_of(
          raised, name(), spec_, call.context,
          lane < 0 ? ""
                   : LanesOfCall(spec_.lanes, call.operands, call.results, call.context.lane)
                         .name(lane));
    }
    return Error::verbatim(ErrorCode::kDeadlineExceeded,
                           failure_text(raised, name(), spec_.site, spec_.layout, call.context));
  }

  // The exception for a failure. Under the GIL.
  nb::python_error exception_of(const WorkerFailure& why, const Call& call) const {
    nb::object given = call_python(
        callee_->failed.get(), "(N)",
        dict_of("kind", static_cast<int>(why.kind), "text", why.what(), "raised",
                bytes_of(why.raised), "worker", why.worker, "pid", static_cast<int>(why.pid),
                "code", why.how.code, "signal", why.how.signal, "said", bytes_of(why.said),
                "arguments", to_string(call.operands))
            .release()
            .ptr());
    if (given.is_valid()) PyErr_SetObject(given.type().ptr(), given.ptr());
    return nb::python_error();
  }

  std::atomic<bool> prepared_{false};
  std::shared_ptr<HeldDefinition> gate_;
  std::unique_ptr<HeldDefinition> site_;
  LaneTime lane_time_{0};
};

inline std::shared_ptr<Site> WorkerCallee::specialise(SiteSpec spec) {
  GilScope gil;
  const std::string place = spec.site;
  auto site = std::make_shared<WorkerSite>(shared_from_this(), std::move(spec));
  if (is_replaying()) return site;  // a recording answers its calls: it may need no workers
  if (auto raised = raised_by([&] { site->prepare(); }))
    throw Error::verbatim(ErrorCode::kInvalidArgument, failure_text(*raised, name(), place));
  return site;
}

}  // namespace callgate::bindings

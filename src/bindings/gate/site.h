// SPDX-License-Identifier: Apache-2.0
// The base of a gate's call sites, for each place of its function: here (gate_site.cc), on an
// executor (workers/executors.cc), or in workers (workers/site.h). A site adds `run_watched(call)`,
// one call under a watch for stalls, which throws Error.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/gate/gate.h"
#include "bindings/gate/scopes.h"
#include "bindings/gate/tape.h"
#include "bindings/python/gil.h"
#include "bindings/python/hooks.h"
#include "core/call.h"
#include "core/lanes.h"
#include "core/threads.h"
#include "core/timeline.h"

namespace callgate::bindings {

// `Runner` is the derived class; `C` is the callee.
template <typename Runner, typename C>
class GateSite : public Site {
 public:
  void run(const Call& call) override {
    const std::int64_t stall = settings.stall_ns.load(std::memory_order_relaxed);  // see Settings
    if (stall == 0) return static_cast<Runner*>(this)->run_watched(call);
    StallWatch watch(std::chrono::nanoseconds(stall), callee_,
                     [text = to_string(call.operands)] { return text; });
    static_cast<Runner*>(this)->run_watched(call);
  }

 protected:
  const std::string& name() const noexcept { return callee_->name(); }
  bool casts() const { return !spec_.held.text("cast").empty(); }  // same-kind casts of results

  // The lanes of a call; empty without levels. Throws Error if the call's arrays don't have them.
  std::optional<LanesOfCall> lanes_of(const Call& call) const {
    if (spec_.lanes.empty()) return std::nullopt;
    return std::optional<LanesOfCall>(std::in_place, spec_.lanes, call.operands, call.results,
                                      call.context.lane);
  }

  // Calls `make(part, lanes, first lane)` for the lanes that an open recording doesn't answer, all
  // at once or one after another; `lanes` is null for a call without lanes.
  template <typename Make>
  void make_lanes(const Call& call, const LanesOfCall* lanes, Make&& make) const {
    if (!is_taping()) return make(call, lanes, std::int64_t{0});
    lanes_on_tape(name(), spec_, call, lanes, make);
  }

  // Runs `body`, which makes a call of `calls` lanes, under the GIL. Counts the call, and measures
  // its time if requested. Throws the error of an exception in the lane `failed_lane()`.
  template <typename Body, typename Lane>
  void run_counted(const Call& call, std::int64_t calls, Body&& body, Lane&& failed_lane) {
    const std::int64_t bytes = nbytes(call);
    const bool timed = settings.recorded.load(std::memory_order_relaxed) != 0;  // see Settings
    const std::int64_t start = timed ? Timeline::now_ns() : 0;
    GilScope gil;
    const std::int64_t locked = timed ? Timeline::now_ns() : 0;
    std::optional<ProfiledSpan> span;
    if (timed) [[unlikely]]
      span.emplace(name(), locked - start);
    Counters& counters = callee_->counters;
    counters.calls += calls;
    counters.bytes += bytes;
    auto raised = raised_by(body);
    span.reset();
    if (timed) record(start, locked - start, Timeline::now_ns() - locked);
    if (!raised) return;
    counters.errors += 1;
    throw failure_of(*raised, name(), spec_, call.context, failed_lane());
  }

  const std::shared_ptr<C> callee_;
  SiteSpec spec_;

 private:
  friend Runner;
  GateSite(std::shared_ptr<C> callee, SiteSpec spec)
      : callee_(std::move(callee)), spec_(std::move(spec)) {}

  void record(std::int64_t start_ns, std::int64_t gil_wait_ns, std::int64_t python_ns) {
    callee_->counters.gil_wait_ns += gil_wait_ns;
    callee_->counters.python_ns += python_ns;
    if (Timeline::on())
      Timeline::add("gate", name(), start_ns, gil_wait_ns, gil_wait_ns + python_ns);
  }
};

}  // namespace callgate::bindings

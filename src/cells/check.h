// SPDX-License-Identifier: Apache-2.0
// Calls that run only if a predicate is false: checks and breakpoints.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/array_view.h"
#include "core/call.h"
#include "core/error.h"
#include "core/lanes.h"

namespace callgate {

// True if checks and breakpoints are active. Relaxed: a late reader misses one or makes one more.
struct CheckSwitches {
  std::atomic<bool> checks{true}, breakpoints{true};
};
inline constinit CheckSwitches check_switches;

class CheckSite final : public Site {
 public:
  CheckSite(std::shared_ptr<Site> failed, Lanes lanes, const std::atomic<bool>& on)
      : failed_(std::move(failed)), lanes_(std::move(lanes)), on_(on) {}

  void run(const Call& call) override { holds(call) ? pass_on(call) : failed_->run(call); }
  bool run_replayed(const Call& call) override { return holds(call); }

 private:
  bool holds(const Call& call) const noexcept {
    if (!on_.load(std::memory_order_relaxed)) return true;  // see CheckSwitches
    const ArrayView& predicate = call.operands[0];
    std::size_t count = predicate.size();
    return count == 0 || std::memchr(predicate.data, 0, count) == nullptr;
  }

  // The results are the operands behind the predicate.
  void pass_on(const Call& call) const {
    if (call.results.empty()) return;
    if (call.operands.size() <= call.results.size())
      throw Error("a breakpoint's call", "an operand for each result, behind the predicate",
                  std::to_string(call.operands.size()) + " operands for " +
                      std::to_string(call.results.size()) + " results");
    if (lanes_.empty()) return copy(call.operands.subspan(1), call.results);
    LanesOfCall lanes(lanes_, call.operands, call.results);
    std::vector<ArrayView> operands(call.operands.size()), results(call.results.size());
    for (std::int64_t lane = 0; lane < lanes->count(); ++lane) {
      lanes->select_operands(lane, call.operands, operands);
      lanes->select_results(lane, call.results, results);
      copy(std::span(operands).subspan(1), results);
    }
  }
  static void copy(std::span<const ArrayView> from, std::span<const ArrayView> to) {
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (from[i].nbytes() != to[i].nbytes())
        throw Error("a breakpoint's result", to_string(from[i]), to_string(to[i]));
      if (from[i].data != to[i].data && to[i].nbytes() != 0)
        std::memcpy(to[i].data, from[i].data, to[i].nbytes());
    }
  }

  std::shared_ptr<Site> failed_;
  Lanes lanes_;
  const std::atomic<bool>& on_;
};

// Runs another callee, which raises the error or stops for the user, if a predicate is false. The
// predicate is the first operand, a bool or one per lane. If all are true, a call only reads them;
// its results, if it has any, are its next operands.
class CheckCallee final : public Callee {
 public:
  // `waits`: a GPU's program waits for the call, as for gates, and gets its results.
  CheckCallee(std::string name, std::shared_ptr<Callee> failed, const std::atomic<bool>& on,
              bool waits)
      : name_(std::move(name)), failed_(std::move(failed)), on_(on), waits_(waits) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override {
    Lanes lanes = spec.lanes;
    return std::make_shared<CheckSite>(failed_->specialise(std::move(spec)), std::move(lanes), on_);
  }
  const std::string& name() const noexcept override { return name_; }
  void defer(const Error& error) override { failed_->defer(error); }
  std::string stall_report(const std::string& call, bool timed_out) override {
    return failed_->stall_report(call, timed_out);
  }
  bool quiet_at_exit() const noexcept override { return true; }
  OnDevice on_device() const noexcept override {
    return waits_ ? OnDevice::kStaged : OnDevice::kDeferred;
  }
  bool reads_context() const noexcept override { return failed_->reads_context(); }

 private:
  std::string name_;
  std::shared_ptr<Callee> failed_;
  const std::atomic<bool>& on_;
  bool waits_;
};

}  // namespace callgate

// A check: a callee that runs another one only when a predicate is false.
//
// Its first operand is the predicate, a bool or one for each lane. As long as all are true, a call
// costs a look at them; the other callee, which makes the error, is not touched.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "core/call.h"

namespace callgate {

class CheckSite final : public Site {
 public:
  explicit CheckSite(std::shared_ptr<Site> failed) : failed_(std::move(failed)) {}

  void run(const Call& call) override {
    if (!holds(call)) failed_->run(call);
  }
  bool run_replayed(const Call& call) override { return holds(call); }

 private:
  static bool holds(const Call& call) noexcept {
    const ArrayView& predicate = call.operands[0];
    std::size_t count = predicate.size();
    return count == 0 || std::memchr(predicate.data, 0, count) == nullptr;
  }

  std::shared_ptr<Site> failed_;
};

class CheckCallee final : public Callee {
 public:
  CheckCallee(std::string name, std::shared_ptr<Callee> failed)
      : name_(std::move(name)), failed_(std::move(failed)) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override {
    return std::make_shared<CheckSite>(failed_->specialise(std::move(spec)));
  }
  const std::string& name() const noexcept override { return name_; }
  void defer(const Error& error) override { failed_->defer(error); }
  std::string stall_report(const std::string& call, bool timed_out) override {
    return failed_->stall_report(call, timed_out);
  }
  bool quiet_at_exit() const noexcept override { return true; }
  OnDevice on_device() const noexcept override { return OnDevice::kDeferred; }
  bool reads_context() const noexcept override { return failed_->reads_context(); }

 private:
  std::string name_;
  std::shared_ptr<Callee> failed_;
};

}  // namespace callgate

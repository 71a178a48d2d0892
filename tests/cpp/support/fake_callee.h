// SPDX-License-Identifier: Apache-2.0
// A callee made of C++ functions, for tests of what calls it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "outcome.h"

namespace callgate::fake {

class FunctionSite final : public Site {
 public:
  using Function = std::function<Outcome(const Call&)>;

  explicit FunctionSite(Function function) : function_(std::move(function)) {}
  void run(const Call& call) override { function_(call).raise(); }

 private:
  Function function_;
};

class FunctionCallee final : public Callee {
 public:
  struct Options {
    bool own_thread = false;
    std::chrono::nanoseconds timeout{0};
    std::function<std::string(const std::string&)> report;
    std::function<void(SiteSpec)> on_specialise;
    std::function<void(const Error&)> on_defer;
  };

  explicit FunctionCallee(std::string name) : FunctionCallee(std::move(name), nullptr, {}) {}
  FunctionCallee(std::string name, FunctionSite::Function function, Options options)
      : name_(std::move(name)), function_(std::move(function)), options_(std::move(options)) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override {
    if (options_.on_specialise) options_.on_specialise(std::move(spec));
    return std::make_shared<FunctionSite>(function_);
  }
  const std::string& name() const noexcept override { return name_; }
  bool own_thread() const noexcept override { return options_.own_thread; }
  std::chrono::nanoseconds timeout() const noexcept override { return options_.timeout; }
  void defer(const Error& error) override {
    if (options_.on_defer) options_.on_defer(error);
  }
  std::string stall_report(const std::string& call, bool /*timed_out*/) override {
    return options_.report ? options_.report(call) : name_ + call + " is stalled";
  }

 private:
  std::string name_;
  FunctionSite::Function function_;
  Options options_;
};

}  // namespace callgate::fake

// What kernels for the CPU and for CUDA have in common as callees.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/call.h"

namespace callgate {

// Kernels are called through targets of their own, so a program that calls one as a gate is
// another's. What is to be said of their failures is somebody else's: functions that are set before
// the first call.
class KernelCalleeBase : public Callee {
 public:
  // Makes a failure's message what the program's error says; may keep an exception for it.
  using Describe = std::function<std::string(const std::string& message, const std::string& site)>;

  explicit KernelCalleeBase(Describe describe) : describe_(std::move(describe)) {}

  std::shared_ptr<Site> specialise(SiteSpec /*spec*/) final {
    throw Error("the program's call of '" + name() + "'", "a gate", "a kernel of that name");
  }

  std::string describe(const std::string& message, const std::string& site) const {
    return describe_ ? describe_(message, site) : "kernel '" + name() + "': " + message;
  }
  void defer(const Error& error) final {
    if (defer_) defer_(error);
  }
  std::string stall_report(const std::string& call, bool /*timed_out*/) final {
    return report_ ? report_(call) : "kernel '" + name() + "'" + call;
  }

  // Takes failures that XLA can't be told of.
  void set_defer(std::function<void(const Error&)> defer) { defer_ = std::move(defer); }
  // Makes the report on a call that takes long, of its arrays as text.
  void set_report(std::function<std::string(const std::string&)> report) {
    report_ = std::move(report);
  }

 private:
  Describe describe_;
  std::function<void(const Error&)> defer_;
  std::function<std::string(const std::string&)> report_;
};

}  // namespace callgate

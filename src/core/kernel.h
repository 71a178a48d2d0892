// Native functions that compiled programs call: no Python and no allocation on the way, and no lock
// but the turn of a kernel that is not thread-safe.
//
// A kernel is a function of the form of include/callgate/kernel_abi.h with a description of its
// parameters. A call site is bound once: which arrays and attributes belong to which parameter is
// worked out then, so that a call fills in six pointers and jumps.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/attributes.h"
#include "core/call.h"
#include "core/executor.h"
#include "core/kernel_frame.h"
#include "core/kernel_turn.h"

namespace callgate {

// A kernel as it was defined.
struct KernelInfo {
  std::string name;
  callgate_function function = nullptr;
  void* user_data = nullptr;
  std::vector<callgate_parameter> parameters;
  std::vector<std::string> parameter_names;  // one each, or none
  // Calls, and lanes of a vmap, may run on several threads at once. Otherwise a call waits for its
  // turn, which kernels may share; without one given the kernel has its own.
  bool thread_safe = false;
  bool repeatable = false;  // no effects: it may run twice with the same arrays
  std::shared_ptr<KernelTurn> turn;
};

// The text that a program holds to know its kernel by: "In<float32,1>,float32,Out<float32,*>".
std::string signature(const KernelInfo& kernel);

// A parameter as messages name it: "'x'", or "2".
std::string parameter_name(const KernelInfo& kernel, std::size_t index);

// The kernels that a shared library exports, in order of definition. `table` is its function
// callgate_kernels. Throws Error for a library of another binary interface.
std::vector<KernelInfo> exported_kernels(const std::string& library,
                                         const callgate_kernel* (*table)());

// What a program says about one call of a kernel.
struct KernelSpec {
  std::string signature;  // as signature() gave it when the program was traced; "" to skip
  std::string site;
  std::string groups;  // arrays of each variadic parameter, in order, "2,3"; "" without such
  Lanes lanes;
  Attributes attributes;
};

// Calls on several threads; see parallel_for.
class KernelSite {
 public:
  // Throws Error where spec and kernel don't fit.
  KernelSite(std::shared_ptr<class KernelCallee> callee, KernelSpec spec);
  KernelSite(const KernelSite&) = delete;
  KernelSite& operator=(const KernelSite&) = delete;

  Outcome run(const Call& call, Executor* executor);

  KernelCallee& callee() const noexcept { return *callee_; }

 private:
  Outcome run_in_turn(const Call& call, Executor* executor);
  Outcome run_reported(const Call& call, Executor* executor, std::chrono::nanoseconds delay);
  Outcome run_lane(const Call& call, Executor* executor);
  Outcome run_lanes(const Call& call, Executor* executor);
  Outcome run_watched(const Call& call, Executor* executor);
  Outcome run_checked(const Call& call, Executor* executor);
  Outcome run_recorded(const Call& call, Executor* executor, ScratchSource* scratch);
  Outcome invoke(const Call& call, Executor* executor, ScratchSource* scratch);
  Outcome failed(const std::string& message) const;
  void bind_attribute(std::size_t index);
  void label_arrays();

  std::shared_ptr<KernelCallee> callee_;
  std::string site_;
  Lanes lanes_;
  Attributes attributes_;
  std::vector<callgate_attribute> ordered_;  // the attributes, by parameter
  std::vector<std::int32_t> starts_, counts_;
  callgate_call bound_{};  // what is the same in every call
  std::size_t operand_count_ = 0, result_count_ = 0;
  std::vector<std::string> operand_labels_, result_labels_;  // as messages name them
  std::vector<std::uint8_t> updated_;                        // 1 for results that are InOut
};

class KernelCallee final : public Callee, public std::enable_shared_from_this<KernelCallee> {
 public:
  // Makes a failure's message what the program's error says; may keep an exception for it.
  using Describe = std::function<std::string(const std::string& message, const std::string& site)>;

  KernelCallee(KernelInfo info, Describe describe, std::shared_ptr<void> keep = nullptr)
      : info_(std::move(info)), describe_(std::move(describe)), keep_(std::move(keep)) {
    if (info_.thread_safe) {
      info_.turn = nullptr;
    } else if (info_.turn == nullptr) {
      info_.turn = std::make_shared<KernelTurn>();
    }
  }

  // A kernel is called through its own target, so a program that calls it as a gate is another's.
  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  std::unique_ptr<KernelSite> bind(KernelSpec spec);

  const std::string& name() const noexcept override { return info_.name; }
  const KernelInfo& info() const noexcept { return info_; }

  std::string describe(const std::string& message, const std::string& site) const {
    return describe_ ? describe_(message, site) : "kernel '" + name() + "': " + message;
  }
  void defer(const Failure& failure) override {
    if (defer_) defer_(failure);
  }
  std::string stall_report(const std::string& call, bool timed_out) override {
    return report_ ? report_(call)
                   : Callee::stall_report("kernel '" + name() + "'" + call, timed_out);
  }
  // Takes failures that can't be returned to XLA. Set before the first call.
  void set_defer(std::function<void(const Failure&)> defer) { defer_ = std::move(defer); }
  // Makes the report on a call that takes long, of its arrays as text. Set before the first call.
  void set_report(std::function<std::string(const std::string&)> report) {
    report_ = std::move(report);
  }

 private:
  KernelInfo info_;
  Describe describe_;
  std::function<void(const Failure&)> defer_;
  std::function<std::string(const std::string&)> report_;
  std::shared_ptr<void> keep_;  // what the function needs to stay loaded
};

}  // namespace callgate

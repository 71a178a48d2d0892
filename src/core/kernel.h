// Native functions that compiled programs call: no Python and no allocation on the way, and no lock
// but the turn of a kernel that is not thread-safe.
//
// A kernel is a function (include/callgate/kernel_abi.h) with a description of its parameters.
// Which arrays and attributes belong to which is worked out once a call site, so that a call fills
// in six pointers and jumps.
#pragma once

#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/attributes.h"
#include "core/call.h"
#include "core/kernel_frame.h"
#include "core/lifetime.h"

namespace callgate {

// Calls that must not run at once: those of a kernel that doesn't say that it is thread-safe, and
// of all such kernels of one shared library, whose functions may share what they keep. A call has
// its turn from before its first lane to behind its last one. It may call others of the
// same turn on its own thread; on other threads these would wait for it for ever. Nobody waits for
// a turn with the GIL, which the kernel that has it may need.
class KernelTurn : public std::enable_shared_from_this<KernelTurn> {
 public:
  using Hold = std::unique_lock<std::recursive_mutex>;
  // Waits for it. In a fork's child it is another one: who had it may be a thread of the parent.
  [[nodiscard]] Hold take() { return Hold(mutexes_[process_.here() ? 0 : 1]); }

 private:
  OfProcess process_;
  std::array<std::recursive_mutex, 2> mutexes_;
};

// Of the kernels whose code is in the shared library of this address; null for none. Any thread.
inline std::shared_ptr<KernelTurn> turn_of_library(const void* address) {
  struct Turns {
    std::mutex mutex;
    std::map<const void*, std::weak_ptr<KernelTurn>> by_library;
  };
  auto& turns = immortal<Turns>();  // kernels may be made as long as the process lives
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fbase == nullptr) return nullptr;
  std::scoped_lock lock(turns.mutex);
  std::weak_ptr<KernelTurn>& known = turns.by_library[info.dli_fbase];
  std::shared_ptr<KernelTurn> turn = known.lock();
  if (turn == nullptr) known = turn = std::make_shared<KernelTurn>();
  return turn;
}

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
  std::vector<std::int64_t> groups;  // arrays of each variadic parameter, in order
  Lanes lanes;
  Attributes attributes;
};

// Calls on several threads; see parallel_for.
class KernelSite : Immovable {
 public:
  // Throws Error where spec and kernel don't fit.
  KernelSite(std::shared_ptr<class KernelCallee> callee, KernelSpec spec);
  // Throws Error where the call fails.
  void run(const Call& call, Executor* executor);
  KernelCallee& callee() const noexcept { return *callee_; }

 private:
  void run_reported(const Call& call, Executor* executor, std::chrono::nanoseconds delay);
  void run_lane(const Call& call, Executor* executor);
  void run_lanes(const Call& call, Executor* executor);
  void invoke(const Call& call, Executor* executor, ScratchSource* scratch);
  [[noreturn]] void fail(const std::string& message) const;
  void bind_attribute(std::size_t index);
  std::shared_ptr<KernelCallee> callee_;
  std::string site_;
  Lanes lanes_;
  Attributes attributes_;
  std::vector<callgate_attribute> ordered_;  // the attributes, by parameter
  std::vector<std::int32_t> starts_, counts_;
  callgate_call bound_{};  // what is the same in every call
  KernelLabels labels_;
  std::vector<std::uint8_t> updated_;  // 1 for results that are InOut
};

class KernelCallee final : public KernelCalleeBase,
                           public std::enable_shared_from_this<KernelCallee> {
 public:
  KernelCallee(KernelInfo info, Describe describe, std::shared_ptr<void> keep = nullptr)
      : KernelCalleeBase(std::move(describe)), info_(std::move(info)), keep_(std::move(keep)) {
    if (info_.turn == nullptr) info_.turn = std::make_shared<KernelTurn>();
  }

  std::unique_ptr<KernelSite> bind(KernelSpec spec) {
    return std::make_unique<KernelSite>(shared_from_this(), std::move(spec));
  }

  const std::string& name() const noexcept override { return info_.name; }
  const KernelInfo& info() const noexcept { return info_; }

 private:
  KernelInfo info_;
  std::shared_ptr<void> keep_;  // what the function needs to stay loaded
};

}  // namespace callgate

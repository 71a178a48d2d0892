// SPDX-License-Identifier: Apache-2.0
// Native functions that compiled programs call: without Python, without allocation, and without
// locks except the turn of a kernel that isn't thread-safe.
//
// A kernel is a function (include/callgate/kernel_abi.h) with a description of its parameters.
// Arrays and attributes are assigned to parameters once per call site, so a call only fills in six
// pointers and jumps.
#pragma once

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "callgate/kernel_abi.h"
#include "core/attributes.h"
#include "core/call.h"
#include "core/error.h"
#include "core/lifetime.h"
#include "core/threads.h"
#include "kernels/kernel_debug.h"
#include "kernels/kernel_frame.h"

namespace callgate {

// Serializes calls that must not overlap: those of a kernel that isn't marked thread-safe, and of
// all such kernels of one shared library, whose functions may share state. A call has its turn from
// its first lane to its last. On its own thread it may call other kernels of the same turn; on
// other threads these would wait for ever. No thread waits for a turn with the GIL, because the
// running kernel may need the GIL.
class KernelTurn : public std::enable_shared_from_this<KernelTurn> {
 public:
  using Hold = std::unique_lock<std::recursive_mutex>;
  // Waits for the turn. A fork's child has another mutex, because a thread of the parent may hold
  // the first.
  [[nodiscard]] Hold take() { return Hold(mutexes_[process_.here() ? 0 : 1]); }

 private:
  OfProcess process_;
  std::array<std::recursive_mutex, 2> mutexes_;
};

// The turn of the kernels whose code is in this address's library; null for no library.
// Thread-safe.
std::shared_ptr<KernelTurn> turn_of_library(const void* address);

// A kernel's definition.
struct KernelInfo {
  std::string name;
  callgate_function function = nullptr;
  void* user_data = nullptr;
  std::vector<callgate_parameter> parameters;
  std::vector<std::string> parameter_names;  // one per parameter, or none
  // True if calls, and lanes of a vmap, may run on several threads at once. Otherwise a call waits
  // for its turn, which kernels may share; without a shared turn, the kernel has its own.
  bool thread_safe = false;
  bool repeatable = false;  // no effects: it may run twice with the same arrays
  bool on_stream = false;   // it also takes a GPU's arrays, and works on the frame's stream there
  std::shared_ptr<KernelTurn> turn;
};

// The text by which a program identifies its kernel: "In<float32,1>,float32,Out<float32,*>".
std::string signature(const KernelInfo& kernel);

// A parameter's name in messages: "'x'", or "2".
std::string parameter_name(const KernelInfo& kernel, std::size_t index);

// The parts between commas, without surrounding spaces; empty ones are left out.
std::vector<std::string> split(std::string_view text);

// The kernels that a shared library exports, in order of definition. `table` is its function
// callgate_kernels. Throws Error for a library with another binary interface.
std::vector<KernelInfo> exported_kernels(const std::string& library,
                                         const callgate_kernel* (*table)());

// One call of a kernel, as its program describes it.
struct KernelSpec {
  std::string signature;  // from signature() when the program was traced; "" for no check
  std::string site;
  std::vector<std::int64_t> groups;  // the number of arrays of each variadic parameter, in order
  Lanes lanes;
  Attributes attributes;
};

class KernelCallee final : public KernelCalleeBase,
                           public std::enable_shared_from_this<KernelCallee> {
 public:
  KernelCallee(KernelInfo info, Describe describe, std::shared_ptr<void> keep = nullptr);

  // Throws Error if spec and kernel don't match.
  std::unique_ptr<class KernelSite> bind(KernelSpec spec);
  const std::string& name() const noexcept override { return info_.name; }
  const KernelInfo& info() const noexcept { return info_; }

 private:
  KernelInfo info_;
  std::shared_ptr<void> keep_;  // keeps the function's code loaded
};

static_assert(sizeof(callgate_array) == sizeof(ArrayView));
static_assert(offsetof(callgate_array, data) == offsetof(ArrayView, data));
static_assert(offsetof(callgate_array, dims) == offsetof(ArrayView, dims));
static_assert(offsetof(callgate_array, rank) == offsetof(ArrayView, rank));
static_assert(offsetof(callgate_array, dtype) == offsetof(ArrayView, dtype));

// One lane of a call, or a whole call without lanes.
struct KernelLane {
  const Lanes* of = nullptr;
  std::int64_t number = 0;
};

// Calls may run on several threads; see parallel_for.
class KernelSite : Immovable {
 public:
  KernelSite(std::shared_ptr<KernelCallee> callee, KernelSpec spec);

  // Throws Error if the call fails.
  void run(const Call& call, Executor* executor) {
    // Protects against handmade or damaged programs, with which a kernel would read invalid memory.
    if (call.operands.size() != labels_.operands.size() ||
        call.results.size() != labels_.results.size()) [[unlikely]] {
      auto text = [](const auto& arrays) {
        return std::to_string(arrays.operands.size()) + " operands and " +
               std::to_string(arrays.results.size()) + " results";
      };
      fail("expected " + text(labels_) + ", got " + text(call));
    }
    std::int64_t delay = kernel_stall_ns.load(std::memory_order_relaxed);
    if (delay != 0) [[unlikely]]
      return run_reported(call, executor, std::chrono::nanoseconds(delay));
    if (info_.thread_safe) return run_lanes(call, executor);
    KernelTurn::Hold turn = info_.turn->take();
    run_lanes(call, executor);
  }

  KernelCallee& callee() const noexcept { return *callee_; }

 private:
  const callgate_attribute& attribute_of(std::size_t index) const;

  // Also reports that a call waits for its turn.
  void run_reported(const Call& call, Executor* executor, std::chrono::nanoseconds delay);

  void run_lanes(const Call& call, Executor* executor) {
    if (lanes_.empty()) [[likely]]
      return run_lane(call, executor);
    run_each_lane(call, executor);
  }

  void run_each_lane(const Call& call, Executor* executor);

  void run_lane(const Call& call, Executor* executor, KernelLane lane = {}) {
    // The modes read and copy arrays, which are on a GPU if there is a stream.
    if (!any_kernel_mode() || call.context.stream != nullptr) [[likely]]
      return invoke(call, executor, /*scratch=*/nullptr, lane);
    run_in_modes(call, executor, lane);
  }

  void run_in_modes(const Call& call, Executor* executor, KernelLane lane);

  void invoke(const Call& call, Executor* executor, ScratchSource* scratch, KernelLane lane) {
    callgate_call filled = bound_;
    filled.operands = reinterpret_cast<const callgate_array*>(call.operands.data());
    filled.results = reinterpret_cast<const callgate_array*>(call.results.data());
    KernelFrame frame(filled, executor, scratch, call.context);
    if (info_.function(&frame) != 0) [[unlikely]]
      fail(frame.message(), lane);
  }

  [[noreturn]] void fail(const std::string& message, KernelLane lane = {}) const;

  std::shared_ptr<KernelCallee> callee_;
  const KernelInfo& info_;  // the callee's
  std::string site_;
  Lanes lanes_;
  Attributes attributes_;
  std::vector<callgate_attribute> ordered_;  // the attributes, by parameter
  std::vector<std::int32_t> starts_, counts_;
  callgate_call bound_{};  // the part that is equal in every call
  KernelLabels labels_;
};

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// Modes that find a kernel's faults. All are off by default, which costs one relaxed load per call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/lifetime.h"

namespace callgate {

enum class KernelMode : std::uint32_t { kCheckMemory = 1, kCrashReport = 2 };

// Relaxed throughout: a call that starts during a change may see either value.
inline constinit std::atomic<std::uint32_t> kernel_modes{0};
// A call that takes longer is reported on stderr, and continues; 0 for never.
inline constinit std::atomic<std::int64_t> kernel_stall_ns{0};

inline bool any_kernel_mode() noexcept { return kernel_modes.load(std::memory_order_relaxed) != 0; }
inline bool kernel_mode(KernelMode mode) noexcept {
  return (kernel_modes.load(std::memory_order_relaxed) & static_cast<std::uint32_t>(mode)) != 0;
}
inline void set_kernel_mode(KernelMode mode, bool on) noexcept {
  auto bit = static_cast<std::uint32_t>(mode);
  if (on) kernel_modes.fetch_or(bit, std::memory_order_relaxed);
  if (!on) kernel_modes.fetch_and(~bit, std::memory_order_relaxed);
}

// A call site's names of its kernel's arrays.
struct KernelLabels {
  std::vector<std::string> operands, results;  // for messages: "'x'", "'xs'[1]", or "2"
  std::vector<std::uint8_t> updated;           // 1 for a result that starts as an operand's value
};

// --- Crash reports: which kernel a crashing thread runs ------------------------------------------

// One call of a kernel, on its stack. A signal handler prints it with only write(2), and then
// passes the signal to the previous handler. Everything to which it points lives as long as the
// call.
struct KernelRecord {
  const char* kernel = "";
  const char* site = "";   // where the call was traced; "" when unknown
  std::int64_t lanes = 1;  // of a vmap, if the call is one of its lanes
  const KernelLabels& labels;
  const Call& call;
};

// This thread's running call; null while the report is off.
const KernelRecord* running_kernel() noexcept;

// Registers a running call on this thread for the object's lifetime.
class RunningKernel : Immovable {
 public:
  explicit RunningKernel(const KernelRecord* record) noexcept;
  ~RunningKernel();

 private:
  const KernelRecord* before_;
  std::size_t slot_ = 0;
};

// Installs the signal handlers, or restores the previous ones. Not thread-safe.
void set_crash_report(bool on);

// --- Memory checks -------------------------------------------------------------------------------
//
// A checked call runs its kernel on copies of its arrays, up to three times. Each copy is between
// two guards. Results, scratch memory and guards are filled with patterns that kernels hardly ever
// write; each array's guards have their own pattern. The check detects:
//
//   - a changed byte of a guard: a write before or after an array;
//   - a changed operand that isn't also a result;
//   - an element of a result that still has the pattern. In one run the pattern may be the correct
//     value, so a kernel without effects runs again with another pattern. A kernel with effects
//     runs once, and its results of types without a rare value (small integers, bool) are not
//     checked;
//   - results that differ with the pattern, but not from run to run: the kernel has read
//     uninitialized memory, in its results, in scratch memory or beyond its arrays.
//
// XLA's own memory is written once, after a check without findings.

// Replaces a call's scratch memory, to check its use.
class ScratchSource {
 public:
  virtual ~ScratchSource() = default;
  virtual void* take(std::size_t bytes, std::size_t alignment) noexcept = 0;
};

// Runs the kernel by `run`, which gets the copies and the source of scratch memory. `repeatable` is
// true for a kernel without effects. Returns the message of the finding, or "". An exception of
// `run` passes through, without checks.
std::string check_memory(const KernelLabels& labels, bool repeatable, const Call& call,
                         const std::function<void(const Call&, ScratchSource*)>& run);

}  // namespace callgate

// Which kernel a crashing thread runs: printed by a signal handler, before the process ends.
//
// While the report is on, each thread that runs a kernel has a record of the call, on the stack of
// the call. The handler prints it with write(2) alone, then leaves the signal to whoever handled it
// before. Nothing of this costs a call anything while the report is off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/array_view.h"
#include "core/lifetime.h"

namespace callgate {

// One call of a kernel. All that it points to lives as long as the call.
struct KernelRecord {
  const char* kernel = "";
  const char* site = "";   // where the call was traced; "" when unknown
  std::int64_t lanes = 1;  // of a vmap, of which this call is one
  std::span<const std::string> operand_labels, result_labels;
  std::span<const ArrayView> operands, results;
};

// The call that this thread runs; null while the report is off.
const KernelRecord* running_kernel() noexcept;

// Says that this thread runs a call, for as long as the object lives.
class RunningKernel : Immovable {
 public:
  explicit RunningKernel(const KernelRecord* record) noexcept;
  ~RunningKernel();

 private:
  const KernelRecord* before_;
  std::size_t slot_ = 0;
};

// Installs the handlers of SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT, or puts those of before
// back. Not to be called by two threads at once.
void set_crash_report(bool on);

}  // namespace callgate

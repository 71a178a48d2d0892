// Runs a kernel on guarded copies of its arrays, and says what it does to memory that isn't its
// own. For debugging: a checked call copies all of its arrays and runs its kernel up to three
// times.
//
// Each copy lies between two guards. Results, scratch memory and guards are filled with patterns
// that kernels hardly ever write, guards with one of their own for each array.
// What is found:
//
//   - a byte of a guard has changed: a write before or after an array;
//   - an operand has changed that is no result as well;
//   - an element of a result still has the pattern. In one run that may be its value by chance, so
//     a kernel without effects runs again with another pattern. One with effects runs once, and its
//     results of types without room for a rare value (small integers, bool) are not looked at;
//   - the results differ with the pattern, and not from run to run: the kernel has read what nobody
//     wrote, in its results, in scratch memory or beyond its arrays.
//
// XLA's own memory is written once, when all is well.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/call.h"
#include "core/kernel_frame.h"

namespace callgate {

// What a check knows of a call site's kernel.
struct CheckedSite {
  std::span<const std::string> operand_labels, result_labels;  // as messages name them
  std::span<const std::uint8_t>
      updated;              // for each result, 1 where it starts as an operand's value
  bool repeatable = false;  // the kernel has no effects
};

// Runs the kernel by `run`, which gets the copies and the source of scratch memory. The message of
// what was found, "" when nothing was. What `run` throws comes out of it, and nothing is looked at.
std::string check_memory(const CheckedSite& site, const Call& call,
                         const std::function<void(const Call&, ScratchSource*)>& run);

}  // namespace callgate

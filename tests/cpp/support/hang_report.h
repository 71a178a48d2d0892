// SPDX-License-Identifier: Apache-2.0
// Ends a test that hangs: shortly before ctest would kill it without a word, the stacks of all
// threads go to stderr, and the process aborts. Every test program has it, by linking the .cc file.
#pragma once

#include <chrono>

namespace callgate::fake {

// Reports, and aborts, in `limit` from now instead of when it was to before. Each test's beginning
// and end do so with the limit of a test. A child of fork has no limit until it asks for one.
void report_hang_in(std::chrono::milliseconds limit);

}  // namespace callgate::fake

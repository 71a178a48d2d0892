// SPDX-License-Identifier: Apache-2.0
// Checks the clock and runs signal handlers on the main thread.
#include "core/main_thread.h"

namespace callgate {

void MainThread::look_closer() {
  const Clock::duration now = Clock::now().time_since_epoch();
  looks_ = now - last_ < kQuick ? (looks_ < kMostLooks ? 2 * looks_ : kMostLooks) : 1;
  looks_left_ = looks_;
  last_ = now;
  RunHandlers run = run_.load(std::memory_order_acquire);  // see set_run_handlers()
  if (now < next_ || run == nullptr) return;
  next_ = now + kPeriod;
  run();
  // Other threads may have held the GIL for long; the wait for it must stay a small part of the
  // program's time.
  const Clock::duration end = Clock::now().time_since_epoch();
  next_ = end + kPeriod + 20 * (end - now);
}

}  // namespace callgate

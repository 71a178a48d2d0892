// SPDX-License-Identifier: Apache-2.0
// Words on which threads, and processes that share their memory, sleep
// (https://man7.org/linux/man-pages/man2/futex.2.html). Only on Linux; on other systems nothing
// sleeps.
#pragma once

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace callgate {

// Sleeps while the word is `seen`, for at most the given time. May return spuriously.
inline void sleep_at(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                     std::chrono::nanoseconds most) noexcept {
#ifdef __linux__
  auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
  const timespec time{static_cast<time_t>(seconds.count()),
                      static_cast<long>((most - seconds).count())};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
  (void)word, (void)seen, (void)most;
#endif
}

// Wakes all sleepers on the word, in any process.
inline void wake_at(std::atomic<std::uint32_t>& word) noexcept {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Spins until `done()`, or for a while. For waits on another core, during which this core has no
// other work.
template <typename Done>
void watch_for(std::chrono::nanoseconds most, Done&& done) {
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + most; !done() && Clock::now() < end;) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
}

// A count on which one side sleeps and which others increment. A wake costs a system call only if
// somebody sleeps.
struct EventCount {
  std::atomic<std::uint32_t> events{0};
  std::atomic<std::uint32_t> asleep{0};

  void add() noexcept {
    // Sequentially consistent, as below: one of the two sides sees the other's write.
    events.fetch_add(1, std::memory_order_seq_cst);
    if (asleep.load(std::memory_order_seq_cst) != 0) wake_at(events);
  }
  std::uint32_t now() const noexcept {
    return events.load(std::memory_order_acquire);  // writes before the event are visible
  }
  // Spins until there are more than `seen` events, or for a while.
  void watch(std::uint32_t seen, std::chrono::nanoseconds most) const noexcept {
    watch_for(most, [&] { return now() != seen; });
  }
  // Returns when there are more than `seen` events, or after a while.
  void wait(std::uint32_t seen, std::chrono::nanoseconds most) noexcept {
    asleep.store(1, std::memory_order_seq_cst);
    if (events.load(std::memory_order_seq_cst) == seen) sleep_at(events, seen, most);
    asleep.store(0, std::memory_order_relaxed);  // a superfluous wake does no harm
  }
};

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// Words that threads sleep at, and processes that share their memory
// (https://man7.org/linux/man-pages/man2/futex.2.html). Linux alone: elsewhere nothing sleeps.
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

// Sleeps while the word is `seen`, for at most so long. May return for no reason.
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

// Wakes who sleeps there, in whatever process.
inline void wake_at(std::atomic<std::uint32_t>& word) noexcept {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Stays awake until `done()`, or for a while. For who waits for another core: this one can't do
// meanwhile what is waited for.
template <typename Done>
void watch_for(std::chrono::nanoseconds most, Done&& done) {
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + most; !done() && Clock::now() < end;) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
}

// A count that one side sleeps at and others add to: a wake costs a system call only where somebody
// sleeps.
struct EventCount {
  std::atomic<std::uint32_t> events{0};
  std::atomic<std::uint32_t> asleep{0};

  void add() noexcept {
    // Sequentially consistent, as below: one of the two sees what the other has written.
    events.fetch_add(1, std::memory_order_seq_cst);
    if (asleep.load(std::memory_order_seq_cst) != 0) wake_at(events);
  }
  std::uint32_t now() const noexcept {
    return events.load(std::memory_order_acquire);  // what came before the event is seen
  }
  // Stays awake until more than `seen` have come, or for a while.
  void watch(std::uint32_t seen, std::chrono::nanoseconds most) const noexcept {
    watch_for(most, [&] { return now() != seen; });
  }
  // Returns when more than `seen` have come, or after a while.
  void wait(std::uint32_t seen, std::chrono::nanoseconds most) noexcept {
    asleep.store(1, std::memory_order_seq_cst);
    if (events.load(std::memory_order_seq_cst) == seen) sleep_at(events, seen, most);
    asleep.store(0, std::memory_order_relaxed);  // a wake too many does no harm
  }
};

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// Memory that processes share, and words in it that they sleep at.
//
// The memory has no name (memfd_create): it is passed on as a descriptor, and gone with the last
// process that has it. Linux alone; elsewhere whoever makes one gets an Error.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// What a failing system call says.
inline Error system_error(const std::string& what) {
  return {ErrorCode::kResourceExhausted, what + ": " + std::strerror(errno)};
}

// A descriptor of this process's own.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const noexcept { return number_; }
  bool open() const noexcept { return number_ >= 0; }
  void reset() noexcept {
    if (number_ >= 0) close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

class SharedMemory : Immovable {
 public:
  // New memory, of zeros. Throws Error where the system gives none.
  explicit SharedMemory(std::size_t bytes) {
#ifdef __linux__
    file_ = Descriptor(memfd_create("callgate", MFD_CLOEXEC));
#else
    errno = ENOSYS;
#endif
    if (!file_.open()) throw system_error("memory for worker processes");
    grow(bytes);
  }
  // That of another process, by its descriptor, which it takes over.
  SharedMemory(int file, std::size_t bytes) : file_(file) { map(bytes); }
  ~SharedMemory() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }
  int file() const noexcept { return file_.get(); }

  // Has at least so many bytes from here on. What was there stays; the address may change.
  void grow(std::size_t bytes) {
    if (bytes <= bytes_) return;
    bytes = (bytes + kPage - 1) / kPage * kPage;
    // Not left to the first write, where there being no memory would end the process.
#ifdef __linux__
    if (int error = posix_fallocate(file_.get(), 0, static_cast<off_t>(bytes)); error != 0) {
      errno = error;
      throw system_error(std::to_string(bytes) + " bytes of memory for a worker process");
    }
#endif
    map(bytes);
  }
  // The same where another process has grown it to so many bytes.
  void follow(std::size_t bytes) {
    if (bytes > bytes_) map(bytes);
  }

 private:
  static constexpr std::size_t kPage = 4096, kHuge = std::size_t{2} << 20;

  void map(std::size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    if (mapped == MAP_FAILED) throw system_error("memory of a worker process");
#ifdef __linux__
    if (bytes >= kHuge) (void)madvise(mapped, bytes, MADV_HUGEPAGE);  // where the system has it so
#endif
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = static_cast<std::byte*>(mapped);
    bytes_ = bytes;
  }

  Descriptor file_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// --- Words to sleep at (https://man7.org/linux/man-pages/man2/futex.2.html) ----------------------

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

// The core that this thread runs on; -1 where that is not known.
inline std::int32_t current_core() noexcept {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// A count that one side sleeps at and others add to: a wake costs a system call only where somebody
// sleeps.
struct alignas(64) EventCount {
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
  // Stays awake until more than `seen` have come, or for a while. For who waits for another core:
  // one that would come on this one can't meanwhile.
  void watch(std::uint32_t seen, std::chrono::nanoseconds most) const noexcept {
    using Clock = std::chrono::steady_clock;
    for (const auto end = Clock::now() + most; now() == seen && Clock::now() < end;) {
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }
  }
  // Returns when more than `seen` have come, or after a while.
  void wait(std::uint32_t seen, std::chrono::nanoseconds most) noexcept {
    asleep.store(1, std::memory_order_seq_cst);
    if (events.load(std::memory_order_seq_cst) == seen) sleep_at(events, seen, most);
    asleep.store(0, std::memory_order_relaxed);  // a wake too many does no harm
  }
};

}  // namespace callgate

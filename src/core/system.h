// SPDX-License-Identifier: Apache-2.0
// Differences between systems: Linux with glibc and libstdc++, the main target; Linux with libc++,
// as in wheels built by a cross compiler; and macOS, for which the sources compile, but which is
// untested. A missing feature of a system is left out or approximated.
#pragma once

#include <cxxabi.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#include <sys/prctl.h>
#endif

#include <cstdint>
#include <cstdlib>

namespace callgate {

// Names the running thread, with at most 15 characters.
inline void name_thread(const char* name) noexcept {
#ifdef __APPLE__
  pthread_setname_np(name);
#else
  pthread_setname_np(pthread_self(), name);
#endif
}

// The running thread's number in the system's tools.
inline std::int64_t thread_number() noexcept {
#ifdef __APPLE__
  std::uint64_t number = 0;
  pthread_threadid_np(nullptr, &number);
  return static_cast<std::int64_t>(number);
#else
  return gettid();
#endif
}

// The running thread's number in Python: threading.get_ident().
inline unsigned long python_thread() noexcept {
#ifdef __APPLE__
  return reinterpret_cast<unsigned long>(pthread_self());
#else
  return pthread_self();
#endif
}

// The core that runs this thread; -1 if unknown.
inline std::int32_t current_core() noexcept {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// Makes short pauses of the running thread end on time; by default the system may add 50 µs.
inline void pause_exactly() noexcept {
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 10'000);  // nanoseconds
#endif
}

// Calls `at_end` once with the exit status when the C library ends the process. macOS doesn't
// report the status: there it is 0.
inline void call_at_end(void (*at_end)(int status, void*)) noexcept {
#ifdef __APPLE__
  static void (*call)(int, void*) = nullptr;
  call = at_end;
  atexit([] { call(0, nullptr); });
#else
  on_exit(at_end, nullptr);
#endif
}

// The fcntl command that locks bytes of a file for the open file. macOS only has locks of the
// process, which don't keep two sinks of one process apart.
#ifdef __APPLE__
inline constexpr int kSetFileLock = F_SETLK;
#else
inline constexpr int kSetFileLock = F_OFD_SETLK;
#endif

// Returns body(). If glibc ends the thread meanwhile (pthread_exit, a forced unwind), the thread
// stops here for good instead: the destructors would use resources that it no longer has.
template <typename Body>
auto outliving_thread_exit(Body&& body) -> decltype(body()) try {
  return body();
#ifdef __GLIBCXX__
} catch (abi::__forced_unwind&) {
  for (;;) pause();
}
#else
  // libc++ has no name for it, and no type for exceptions that C++ code didn't throw.
} catch (...) {
  if (abi::__cxa_current_exception_type() != nullptr) throw;
  for (;;) pause();
}
#endif

}  // namespace callgate

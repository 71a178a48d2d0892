// SPDX-License-Identifier: Apache-2.0
// A timer's signal, not a thread: death tests fork, and tests count threads. Whichever thread gets
// the signal asks the others by a second one, one after the other, so that stacks don't mix.
//
// The handlers call what signal handlers may, but for the sanitizers' printing of a stack, which
// locks: a thread that hangs within the sanitizer itself is not reported. ctest's limit ends it.
#include "hang_report.h"

#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>

// With files and lines; there in programs that were built with a sanitizer.
extern "C" [[gnu::weak]] void __sanitizer_print_stack_trace();  // NOLINT: the sanitizers' name

#ifdef __SANITIZE_THREAD__
// sigaction itself, under a name that the thread sanitizer leaves alone: behind the other it holds
// signals back until the thread calls a function that it knows, and a latch's wait is none.
extern "C" int __sigaction(int, const struct sigaction*, struct sigaction*) noexcept;  // NOLINT
#define SET_HANDLER __sigaction
#else
#define SET_HANDLER sigaction
#endif

namespace callgate::fake {
namespace {

// ctest ends a suite after 300 s: what is left is for reading the program's debug information.
constexpr std::chrono::milliseconds kTestLimit = std::chrono::seconds(100);
constexpr int kAnswerSteps = 300;  // of 10 ms; a sanitizer's own thread never answers

std::array<char, 256> g_test{};  // its name; nothing outside of a test
std::atomic<bool> g_reporting{false};
std::atomic<int> g_answered{0};

int hang_signal() { return SIGRTMIN + 6; }
int stack_signal() { return SIGRTMIN + 7; }

void say(std::string_view text) {
  [[maybe_unused]] ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

void print_stack() {
  if (__sanitizer_print_stack_trace != nullptr) return __sanitizer_print_stack_trace();
  std::array<void*, 64> frames;
  backtrace_symbols_fd(frames.data(), backtrace(frames.data(), frames.size()), STDERR_FILENO);
}

void on_stack_signal(int) {
  int error = errno;
  print_stack();
  g_answered.fetch_add(1);
  errno = error;
}

// "== thread 123 (name)", with what /proc calls it.
void say_thread(std::string_view tid) {
  std::array<char, 64> path{"/proc/self/task/"};
  std::memcpy(path.data() + std::strlen(path.data()), tid.data(), tid.size());
  std::memcpy(path.data() + std::strlen(path.data()), "/comm", 6);
  std::array<char, 32> name{};
  int file = ::open(path.data(), O_RDONLY);
  ssize_t size = file < 0 ? 0 : ::read(file, name.data(), name.size() - 1);
  if (file >= 0) ::close(file);
  while (size > 0 && name[static_cast<std::size_t>(size) - 1] == '\n') --size;
  say("== thread ");
  say(tid);
  say(" (");
  say({name.data(), static_cast<std::size_t>(size < 0 ? 0 : size)});
  say(")\n");
}

void report_thread(std::string_view text) {
  std::int64_t tid = 0;
  std::from_chars(text.data(), text.data() + text.size(), tid);
  if (tid == 0) return;  // "." and ".."
  say_thread(text);
  if (tid == syscall(SYS_gettid)) return print_stack();
  int before = g_answered.load();
  if (syscall(SYS_tgkill, getpid(), tid, stack_signal()) != 0) return say("has ended\n");
  for (int step = 0; step < kAnswerSteps && g_answered.load() == before; ++step) {
    timespec pause{0, 10'000'000};
    nanosleep(&pause, nullptr);
  }
  if (g_answered.load() == before) say("does not answer\n");
}

void on_hang_signal(int) {
  if (g_reporting.exchange(true)) return;
  say("\n== ");
  say(g_test[0] == 0 ? "the test program, outside of a test," : std::string_view(g_test.data()));
  say(" hangs; all threads' stacks:\n");
  // readdir() allocates; this is what it calls.
  alignas(dirent64) std::array<char, 4096> entries;
  int folder = ::open("/proc/self/task", O_RDONLY | O_DIRECTORY);
  for (;;) {
    auto bytes = syscall(SYS_getdents64, folder, entries.data(), entries.size());
    if (bytes <= 0) break;
    for (std::int64_t at = 0; at < bytes;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries.data() + at);
      report_thread(entry->d_name);
      at += entry->d_reclen;
    }
  }
  std::abort();
}

timer_t make_timer() {
  // These functions load their libraries now: not in a handler.
  std::array<void*, 1> frame;
  backtrace(frame.data(), 1);
  struct sigaction action{};
  action.sa_flags = SA_RESTART;
  action.sa_handler = &on_hang_signal;
  SET_HANDLER(hang_signal(), &action, nullptr);
  action.sa_handler = &on_stack_signal;
  SET_HANDLER(stack_signal(), &action, nullptr);
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = hang_signal();
  timer_t timer{};
  EXPECT_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
  return timer;
}

class Limits : public ::testing::EmptyTestEventListener {
 public:
  void OnTestProgramStart(const ::testing::UnitTest&) override { report_hang_in(kTestLimit); }
  void OnTestStart(const ::testing::TestInfo& test) override {
    std::string name = std::string(test.test_suite_name()) + "." + test.name();
    name.copy(g_test.data(), g_test.size() - 1);
    report_hang_in(kTestLimit);
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    g_test.fill(0);
    report_hang_in(kTestLimit);
  }
};

[[maybe_unused]] const bool kAdded = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Limits());
  return true;
}();

}  // namespace

void report_hang_in(std::chrono::milliseconds limit) {
  // Timers are not inherited.
  static pid_t process = 0;
  static timer_t timer{};
  if (process != getpid()) timer = make_timer();
  process = getpid();
  itimerspec when{};
  when.it_value = {limit.count() / 1000, limit.count() % 1000 * 1'000'000};
  EXPECT_EQ(timer_settime(timer, 0, &when, nullptr), 0);
}

}  // namespace callgate::fake

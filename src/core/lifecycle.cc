// SPDX-License-Identifier: Apache-2.0
// The end of the process, and the decision on each Ctrl-C.
#include "core/lifecycle.h"

#include <thread>

namespace callgate {
namespace {

std::int64_t steady_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // allowed in signal handlers
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

bool Lifecycle::close(std::chrono::nanoseconds wait) {
  // Both orders: later calls see the bit, and this thread sees the effects of earlier calls.
  state_.fetch_or(kClosed, std::memory_order_acq_rel);
  auto deadline = std::chrono::steady_clock::now() + wait;
  while (active() != 0) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

void LateCalls::add(const std::string& callee) noexcept {
  try {
    std::lock_guard lock(mutex_);
    ++counts_[callee];
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to count with
  }
}

std::map<std::string, std::uint64_t> LateCalls::all() const {  // by the callee's name
  std::lock_guard lock(mutex_);
  return counts_;
}

void Interrupts::watch() noexcept {
  static constinit std::mutex mutex;
  static constinit bool found = false;
  std::lock_guard lock(mutex);
  struct sigaction now;
  if (sigaction(SIGINT, nullptr, &now) != 0) return;
  bool with_info = (now.sa_flags & SA_SIGINFO) != 0;
  if (with_info && now.sa_sigaction == &on_signal) return;
  if (found && !same(now, before_)) return;
  if (!with_info && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)) return;
  if (!found) before_ = now;
  found = true;
  now.sa_flags |= SA_SIGINFO;
  now.sa_sigaction = &on_signal;
  sigaction(SIGINT, &now, nullptr);
}

bool Interrupts::end_since(std::uint32_t before) noexcept {
  std::uint32_t epoch = epoch_.load(std::memory_order_seq_cst);  // see end_all()
  return epoch != before && (all_.load(std::memory_order_seq_cst) || judged(epoch));
}

bool Interrupts::recent() noexcept {
  std::int64_t came = came_ns_.load(std::memory_order_relaxed);  // the value needs no other memory
  return came != 0 && steady_ns() - came < 1'000'000'000;
}

void Interrupts::end_all(bool on) noexcept {
  // Sequentially consistent: a thread that sees the epoch also sees these values.
  all_.store(on, std::memory_order_seq_cst);
  std::uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  verdict_.store(std::uint64_t{epoch} * 2 + 1, std::memory_order_seq_cst);
  epoch_.store(epoch, std::memory_order_seq_cst);
}

bool Interrupts::same(const struct sigaction& a, const struct sigaction& b) noexcept {
  bool with_info = (a.sa_flags & SA_SIGINFO) != 0;
  if (with_info != ((b.sa_flags & SA_SIGINFO) != 0)) return false;
  return with_info ? a.sa_sigaction == b.sa_sigaction : a.sa_handler == b.sa_handler;
}

void Interrupts::on_signal(int number, siginfo_t* info, void* context) {
  came_ns_.store(steady_ns(), std::memory_order_relaxed);  // the value needs no other memory
  epoch_.fetch_add(1, std::memory_order_relaxed);          // as above
  if ((before_.sa_flags & SA_SIGINFO) != 0) return before_.sa_sigaction(number, info, context);
  before_.sa_handler(number);
}

bool Interrupts::decide(InterruptedRun& slot, std::int64_t run, const void* place) noexcept {
  std::uint32_t epoch = epoch_.load(std::memory_order_seq_cst);  // see end_all()
  if (all_.load(std::memory_order_seq_cst)) return true;
  std::uint32_t begun = begun_at(run, place, epoch);
  bool ends = begun != epoch && judged(epoch);
  if (begun != epoch && !ends) begun = begun_at(run, place, epoch, true);  // the run continues
  slot.epoch.store(begun, std::memory_order_relaxed);
  slot.run.store(run, std::memory_order_release);  // see ends()
  return ends;
}

std::uint32_t Interrupts::begun_at(std::int64_t run, const void* place, std::uint32_t now,
                                   bool anew) noexcept {
  static constinit std::mutex mutex;
  try {
    std::lock_guard lock(mutex);
    std::uint32_t& begun = immortal<BegunRuns>().of(run, 0, place, [&] { return now; });
    return anew ? begun = now : begun;
  } catch (...) {
    return now;  // no memory by which to identify the run
  }
}

bool Interrupts::judged(std::uint32_t epoch) noexcept {
  std::uint64_t verdict = verdict_.load(std::memory_order_seq_cst);  // see end_all()
  if (verdict / 2 == epoch) return verdict % 2 != 0;
  Judge judge = judge_.load(std::memory_order_acquire);  // see set_judge()
  ActiveCall active;
  const bool ends = judge != nullptr && active.entered() && judge();
  // Relaxed: one number has the whole verdict, and judging twice does no harm.
  verdict_.store(std::uint64_t{epoch} * 2 + (ends ? 1 : 0), std::memory_order_relaxed);
  return ends;
}

Error interrupted(const std::string& callee) {
  return {ErrorCode::kAborted, "Ctrl-C ended the program at its call of '" + callee + "'"};
}

}  // namespace callgate

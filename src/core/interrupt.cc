// See the header. All state is constant-initialised: the handler may run at any time.
#include "core/interrupt.h"

#include <csignal>
#include <ctime>
#include <mutex>

#include "core/lifecycle.h"

namespace callgate {
namespace {

constinit std::atomic<Interrupts::Judge> g_judge{nullptr};
constinit std::atomic<std::int64_t> g_came_ns{0};  // by the steady clock; 0: never
constinit std::atomic<bool> g_all{false};
// The last epoch that was judged, times two, and whether it ends programs.
constinit std::atomic<std::uint64_t> g_verdict{0};
struct sigaction g_before;  // written once, before the handler is there

std::int64_t steady_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // allowed in a signal handler
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

bool same(const struct sigaction& a, const struct sigaction& b) noexcept {
  bool with_info = (a.sa_flags & SA_SIGINFO) != 0;
  if (with_info != ((b.sa_flags & SA_SIGINFO) != 0)) return false;
  return with_info ? a.sa_sigaction == b.sa_sigaction : a.sa_handler == b.sa_handler;
}

}  // namespace

constinit std::array<Interrupts::Slot, Interrupts::kSlots> Interrupts::slots_{};
constinit std::atomic<std::uint32_t> Interrupts::epoch_{0};

struct InterruptHandler {
  static void on_signal(int number, siginfo_t* info, void* context) {
    Interrupts::came();
    if ((g_before.sa_flags & SA_SIGINFO) != 0) {
      g_before.sa_sigaction(number, info, context);
    } else {
      g_before.sa_handler(number);
    }
  }
};

void Interrupts::came() noexcept {
  g_came_ns.store(steady_ns(), std::memory_order_relaxed);  // what it says is in itself
  epoch_.fetch_add(1, std::memory_order_relaxed);           // likewise
}

void Interrupts::set_judge(Judge judge) noexcept {
  g_judge.store(judge, std::memory_order_release);  // whoever reads it may call it
}

void Interrupts::watch() noexcept {
  static constinit std::mutex mutex;
  static constinit bool found = false;
  std::lock_guard lock(mutex);
  struct sigaction now;
  if (sigaction(SIGINT, nullptr, &now) != 0) return;
  bool with_info = (now.sa_flags & SA_SIGINFO) != 0;
  if (with_info && now.sa_sigaction == &InterruptHandler::on_signal) return;
  if (found && !same(now, g_before)) return;
  if (!with_info && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN)) return;
  if (!found) g_before = now;
  found = true;
  now.sa_flags |= SA_SIGINFO;
  now.sa_sigaction = &InterruptHandler::on_signal;
  sigaction(SIGINT, &now, nullptr);
}

bool Interrupts::recent() noexcept {
  std::int64_t came = g_came_ns.load(std::memory_order_relaxed);  // as above
  return came != 0 && steady_ns() - came < 1'000'000'000;
}

void Interrupts::end_all(bool on) noexcept {
  // Sequentially consistent: who sees the epoch sees the rest.
  g_all.store(on, std::memory_order_seq_cst);
  std::uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  g_verdict.store(std::uint64_t{epoch} * 2 + 1, std::memory_order_seq_cst);
  epoch_.store(epoch, std::memory_order_seq_cst);
}

bool Interrupts::decide(Slot& slot, std::int64_t run) noexcept {
  std::uint32_t epoch = epoch_.load(std::memory_order_seq_cst);  // see end_all()
  if (g_all.load(std::memory_order_seq_cst)) return true;
  if (slot.run.load(std::memory_order_acquire) != run) {  // see ends()
    slot.epoch.store(epoch, std::memory_order_relaxed);
    slot.run.store(run, std::memory_order_release);  // see ends()
    return false;
  }
  // Relaxed: a verdict says all in one number, and to judge twice does no harm.
  std::uint64_t verdict = g_verdict.load(std::memory_order_seq_cst);
  if (verdict / 2 != epoch) {
    Judge judge = g_judge.load(std::memory_order_acquire);  // see set_judge()
    ActiveCall active;
    bool ends = judge != nullptr && active.entered() && judge();
    verdict = std::uint64_t{epoch} * 2 + (ends ? 1 : 0);
    g_verdict.store(verdict, std::memory_order_relaxed);  // as above
  }
  if (verdict % 2 == 0) slot.epoch.store(epoch, std::memory_order_relaxed);  // it goes on
  return verdict % 2 != 0;
}

}  // namespace callgate

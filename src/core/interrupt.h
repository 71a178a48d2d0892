// Ctrl-C, as compiled programs see it.
//
// While a program runs, the main thread is inside XLA, where Python's handler of SIGINT only leaves
// a note: nothing that Python would raise can end the program. So a handler of ours stands before
// Python's and counts. Runs that have called callgate before the last interrupt are refused at
// their next call, where it is to end programs; those that begin later, such as a last
// checkpoint's, are not. Lock-free on the call's side.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace callgate {

class Interrupts {
 public:
  // Asked once an interrupt, on any thread that makes a call: does it end programs? Not where the
  // user's own handler takes it for a request to stop soon.
  using Judge = bool (*)();
  static void set_judge(Judge judge) noexcept;

  // Puts the handler before the one that is there, unless the signal is ignored or ends the
  // process. The first one found is the only one that ours ever calls: whoever comes between later
  // may call ours, and the two would call each other for ever. So ours is put back only when that
  // first one stands alone again. Any thread.
  static void watch() noexcept;

  // Whether the call of this run (XLA's number of it, -1 for none) is to end its program.
  static bool ends(std::int64_t run) noexcept {
    Slot& slot = slot_of(run);
    // Acquire: the epoch is that of this run. Relaxed: a late look costs one more call.
    if (slot.run.load(std::memory_order_acquire) == run &&
        slot.epoch.load(std::memory_order_relaxed) == epoch_.load(std::memory_order_relaxed))
        [[likely]]
      return false;
    return run != -1 && decide(slot, run);
  }

  // Whether one came within the last second.
  static bool recent() noexcept;

  // At the end of the process, after an interrupt: every call is to end its program, until `false`,
  // after which that holds for runs that have begun.
  static void end_all(bool on) noexcept;

 private:
  // When a run made its first call: after how many interrupts. A run that loses its slot to another
  // counts as new.
  struct Slot {
    std::atomic<std::int64_t> run{-1};
    std::atomic<std::uint32_t> epoch{0};
  };
  static constexpr std::size_t kSlots = 256;

  static Slot& slot_of(std::int64_t run) noexcept {
    return slots_[static_cast<std::uint64_t>(run) % kSlots];
  }
  static bool decide(Slot& slot, std::int64_t run) noexcept;
  static void came() noexcept;

  static std::array<Slot, kSlots> slots_;
  static std::atomic<std::uint32_t> epoch_;  // interrupts so far

  friend struct InterruptHandler;
};

}  // namespace callgate

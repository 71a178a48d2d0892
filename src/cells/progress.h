// SPDX-License-Identifier: Apache-2.0
// Progress bars as programs update them: numbers in slots, which a Python thread draws.
//
// A program that runs a loop begins a bar, updates it now and then, and ends it (ProgressCallee).
// The Python thread polls the board and releases bars after it has drawn their end. An update is
// lock-free, on any XLA thread; beginning takes a lock, once per loop. A handle names a slot of the
// board and its generation, so a late update has no effect.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/lifetime.h"

namespace callgate {

// The current state of one bar.
struct ProgressState {
  enum class Phase { kFree, kLive, kEnded, kFailed };

  std::int32_t handle = 0;  // changes when the bar begins again
  std::int64_t bar = 0;     // stays the same until the bar is released
  std::string spec;         // the program's text for the bar; the board doesn't read it
  std::int64_t run = -1;
  std::int64_t total = -1;  // -1 if unknown
  std::int64_t count = 0;
  std::int64_t age_ns = 0;      // since the beginning
  std::int64_t elapsed_ns = 0;  // since the beginning, until the end
  Phase phase = Phase::kFree;
  std::int64_t lane = -1;  // for a loop with a bar per lane
  // For a bar that a value moves instead of the steps: the value's start, end and current value.
  // Otherwise NaN.
  float first = kNoValue, last = kNoValue, at = kNoValue;

  static constexpr float kNoValue = std::numeric_limits<float>::quiet_NaN();
};

// The identity and extent of a new bar.
struct ProgressStart {
  std::int64_t site = 0;    // the call site; a bar of the same run and site continues
  std::int64_t every = 0;   // steps between updates; 0 to choose by time
  std::int64_t total = -1;  // -1 if unknown
  std::int64_t lane = -1;   // as in ProgressState; each lane of a site has its own bar
  float first = ProgressState::kNoValue, last = ProgressState::kNoValue;
};

class ProgressBoard {
 public:
  static ProgressBoard& instance() { return immortal<ProgressBoard>(); }
  using Clock = std::function<std::chrono::nanoseconds()>;
  explicit ProgressBoard(Clock clock = {}) : clock_(std::move(clock)) {}

  // The bar's handle, or 0 for none: another device of the run draws, or there are too many bars.
  std::int32_t begin(const std::string& spec, const ProgressStart& start,
                     const CallContext& context);

  // Sets the count, of which only the lowest 32 bits are passed. Returns the number of steps until
  // the next update: `every`, or a number with which updates come every few milliseconds.
  std::int32_t update(std::int32_t handle, std::uint32_t count,
                      float at = ProgressState::kNoValue) noexcept;

  // Does nothing for a bar that has ended.
  void end(std::int32_t handle, std::uint32_t count, float at = ProgressState::kNoValue) noexcept;

  // Counts one step of a bar that begins with its first step and ends with its last.
  void step(const std::string& spec, const ProgressStart& start, const CallContext& context);

  // Ends the bars of the run at their current count, because its program failed.
  void fail(std::int64_t run) noexcept;

  // All bars that have begun and are not released.
  std::vector<ProgressState> poll() const;

  // Frees the bar's slot, unless the bar began again or is still live.
  void release(std::int32_t handle) noexcept;

  // `wake` is called, without a lock, by the first bar that begins while no thread draws.
  void set_wake(std::function<void()> wake);

  // Stops drawing if there are no bars; false if there are some.
  bool retire();

 private:
  using Phase = ProgressState::Phase;
  // The time between two updates of a bar that chooses by time, far above an update's cost.
  static constexpr std::int64_t kUpdateNs = 5'000'000;
  static constexpr std::int64_t kGrowth = 8;  // limits the effect of a slow first step
  static constexpr std::int64_t kMostSteps = std::int64_t{1} << 30;
  static constexpr std::int64_t kNoRun = -1;     // runs may have any other number, also negative
  static constexpr std::int32_t kIndexBits = 8;  // of a handle; the rest is the generation
  static constexpr std::int32_t kGenerations = std::int32_t{1} << (31 - kIndexBits);
  static constexpr std::size_t kSlots = 256, kOwners = 256;

  struct Slot {
    std::atomic<std::int32_t> handle{0};
    std::atomic<Phase> phase{Phase::kFree};
    std::atomic<std::int64_t> count{0};
    std::atomic<std::int64_t> updated_ns{0};  // or ended
    std::atomic<float> at{0};
    // The members below change under the lock, before `handle` does.
    std::atomic<std::int64_t> every{0};  // updates read it, hence atomic
    std::int64_t began_ns = 0, bar = 0, site = 0, run = -1, device = -1, total = -1, lane = -1;
    float first = 0, last = 0;
    std::string spec;
  };

  static std::int64_t next_chunk(std::int64_t steps, std::int64_t elapsed_ns) noexcept;

  std::int64_t now() const;

  Slot* find(std::int32_t handle) noexcept;

  // One device of a run draws. A run without an id, or with one device, always draws.
  bool owns(const CallContext& context);

  // The slot of the same bar if it has ended; otherwise a free slot, or the slot that ended first.
  Slot* take(const ProgressStart& start, const CallContext& context);

  void store_count(Slot& slot, std::uint32_t count) noexcept;

  Clock clock_;
  mutable std::mutex mutex_;
  std::array<Slot, kSlots> slots_;
  // The device that draws for a run: the first that began a bar. Only for the latest runs.
  struct Owner {
    std::int64_t run = -1, device = -1;
  };
  std::array<Owner, kOwners> owners_{};
  std::size_t next_owner_ = 0;
  std::int32_t generation_ = 0;
  std::int64_t next_bar_ = 1;
  bool drawn_ = false;
  std::function<void()> wake_;
};

}  // namespace callgate

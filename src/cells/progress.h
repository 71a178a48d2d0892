// SPDX-License-Identifier: Apache-2.0
// Progress bars as programs feed them: numbers in slots, which somebody else draws.
//
// A program that runs a loop begins a bar, updates it now and then, and ends it (ProgressCallee). A
// Python thread draws: it polls the board, and releases bars that it has drawn for the last time.
// An update is lock-free, on any XLA thread; beginning takes a lock, once a loop. A handle names a
// slot of the board and its generation, so that a late update finds nobody.
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

// One bar as of now.
struct ProgressState {
  enum class Phase { kFree, kLive, kEnded, kFailed };

  std::int32_t handle = 0;  // changes when the bar begins again
  std::int64_t bar = 0;     // stays the same until the bar is released
  std::string spec;         // what the program says of the bar; the board doesn't read it
  std::int64_t run = -1;
  std::int64_t total = -1;  // -1 when unknown
  std::int64_t count = 0;
  std::int64_t age_ns = 0;      // since it began
  std::int64_t elapsed_ns = 0;  // the same, until its end
  Phase phase = Phase::kFree;
  std::int64_t lane = -1;  // of a loop with a bar for each of its lanes
  // A bar that a value moves, not the steps, has where it began, where it ends, where it is. NaN
  // otherwise.
  float first = kNoValue, last = kNoValue, at = kNoValue;

  static constexpr float kNoValue = std::numeric_limits<float>::quiet_NaN();
};

// A bar that begins: its identity, and its extent.
struct ProgressStart {
  std::int64_t site = 0;    // its call site; a bar of the same run and site is taken up again
  std::int64_t every = 0;   // steps between updates; 0 to choose by time
  std::int64_t total = -1;  // -1 when unknown
  std::int64_t lane = -1;   // as in ProgressState; lanes of a site have bars of their own
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

  // Sets the count, of which only the lowest 32 bits come. Returns the number of steps until the
  // next update: such that updates come every few milliseconds, or `every`.
  std::int32_t update(std::int32_t handle, std::uint32_t count,
                      float at = ProgressState::kNoValue) noexcept;

  // Nothing for a bar that has ended.
  void end(std::int32_t handle, std::uint32_t count, float at = ProgressState::kNoValue) noexcept;

  // Counts one step of a bar that begins with its first step and ends with its last.
  void step(const std::string& spec, const ProgressStart& start, const CallContext& context);

  // The bars of the run end where they stand: its program failed.
  void fail(std::int64_t run) noexcept;

  // All bars that have begun and have not been released.
  std::vector<ProgressState> poll() const;

  // Frees the bar's slot, unless it began again or still lives.
  void release(std::int32_t handle) noexcept;

  // `wake` is called, without a lock held, by the first bar that begins while nobody draws.
  void set_wake(std::function<void()> wake);

  // Whoever draws stops, if there are no bars; false when there are.
  bool retire();

 private:
  using Phase = ProgressState::Phase;
  // Time between two updates of a bar that chooses by time: far above what an update costs.
  static constexpr std::int64_t kUpdateNs = 5'000'000;
  static constexpr std::int64_t kGrowth = 8;  // a first, slow step must not decide for long
  static constexpr std::int64_t kMostSteps = std::int64_t{1} << 30;
  static constexpr std::int64_t kNoRun = -1;     // all others may be a run's, negative ones, too
  static constexpr std::int32_t kIndexBits = 8;  // of a handle; the rest is its generation
  static constexpr std::int32_t kGenerations = std::int32_t{1} << (31 - kIndexBits);
  static constexpr std::size_t kSlots = 256, kOwners = 256;

  struct Slot {
    std::atomic<std::int32_t> handle{0};
    std::atomic<Phase> phase{Phase::kFree};
    std::atomic<std::int64_t> count{0};
    std::atomic<std::int64_t> updated_ns{0};  // or ended
    std::atomic<float> at{0};
    // The rest changes under the lock, before `handle` does.
    std::atomic<std::int64_t> every{0};  // read by updates, so atomic
    std::int64_t began_ns = 0, bar = 0, site = 0, run = -1, device = -1, total = -1, lane = -1;
    float first = 0, last = 0;
    std::string spec;
  };

  static std::int64_t next_chunk(std::int64_t steps, std::int64_t elapsed_ns) noexcept;

  std::int64_t now() const;

  Slot* find(std::int32_t handle) noexcept;

  // One device of a run draws; a run without an id, or with one device, always does.
  bool owns(const CallContext& context);

  // The slot of the same bar, which has ended; else a free one; else the one that ended first.
  Slot* take(const ProgressStart& start, const CallContext& context);

  void store_count(Slot& slot, std::uint32_t count) noexcept;

  Clock clock_;
  mutable std::mutex mutex_;
  std::array<Slot, kSlots> slots_;
  // The device that draws, by run: the first of the run that began a bar. The latest runs alone.
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

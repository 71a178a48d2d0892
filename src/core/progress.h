// SPDX-License-Identifier: Apache-2.0
// Progress bars as programs feed them: numbers in slots, which somebody else draws.
//
// A program that runs a loop begins a bar, updates it now and then, and ends it (ProgressCallee).
// Who draws (a Python thread) polls the board, and releases what it has drawn for the last time. An
// update is lock-free, on any XLA thread; beginning takes a lock, once a loop. A handle names a
// slot of the board and its generation, so that a late update finds nobody.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
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
  // Of a bar that a value moves, not the steps: where it began, where it ends, where it is. NaN
  // otherwise.
  float first = kNoValue, last = kNoValue, at = kNoValue;

  static constexpr float kNoValue = std::numeric_limits<float>::quiet_NaN();
};

// What identifies a bar that begins.
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
                     const CallContext& context) {
    std::int32_t handle = 0;
    std::function<void()> wake;
    {
      std::lock_guard lock(mutex_);
      if (!owns(context)) return 0;
      Slot* slot = take(start, context);
      if (slot == nullptr) return 0;
      generation_ = generation_ % (kGenerations - 1) + 1;
      handle = (generation_ << kIndexBits) | static_cast<std::int32_t>(slot - slots_.data());
      slot->spec = spec;
      slot->site = start.site;
      slot->run = context.run;
      slot->device = context.device;
      slot->total = start.total;
      slot->lane = start.lane;
      slot->first = start.first;
      slot->last = start.last;
      slot->began_ns = now();
      // Relaxed: all of it is published by the handle's release below.
      slot->every.store(start.every, std::memory_order_relaxed);
      slot->count.store(0, std::memory_order_relaxed);
      slot->at.store(start.first, std::memory_order_relaxed);
      slot->updated_ns.store(slot->began_ns, std::memory_order_relaxed);
      slot->phase.store(Phase::kLive, std::memory_order_relaxed);
      slot->handle.store(handle, std::memory_order_release);
      if (!std::exchange(drawn_, true)) wake = wake_;
    }
    if (wake) wake();
    return handle;
  }

  // Sets the count, of which only the lowest 32 bits come. Returns the number of steps until the
  // next update: such that updates come every few milliseconds, or `every`.
  std::int32_t update(std::int32_t handle, std::uint32_t count,
                      float at = ProgressState::kNoValue) noexcept {
    Slot* slot = find(handle);
    // Relaxed: see store_count().
    if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) != Phase::kLive)
      return static_cast<std::int32_t>(kMostSteps);
    std::int64_t before = slot->count.load(std::memory_order_relaxed);
    store_count(*slot, count);
    slot->at.store(at, std::memory_order_relaxed);  // see store_count()
    std::int64_t every = slot->every.load(std::memory_order_relaxed);
    if (every > 0) return static_cast<std::int32_t>(std::min(every, kMostSteps));
    std::int64_t time = now();
    std::int64_t elapsed = time - slot->updated_ns.exchange(time, std::memory_order_relaxed);
    std::int64_t steps = slot->count.load(std::memory_order_relaxed) - before;
    return static_cast<std::int32_t>(next_chunk(steps, elapsed));
  }

  // Nothing for a bar that has ended.
  void end(std::int32_t handle, std::uint32_t count, float at = ProgressState::kNoValue) noexcept {
    Slot* slot = find(handle);
    // Relaxed: this program's loop alone ends it, or has failed.
    if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) != Phase::kLive) return;
    store_count(*slot, count);
    slot->at.store(at, std::memory_order_relaxed);             // published by the phase below
    slot->updated_ns.store(now(), std::memory_order_relaxed);  // published by the phase below
    Phase live = Phase::kLive;
    // Release: who reads the end reads the last count, too. A failed bar stays failed.
    slot->phase.compare_exchange_strong(live, Phase::kEnded, std::memory_order_release,
                                        std::memory_order_relaxed);
  }

  // Counts one step of a bar that begins with its first step and ends with its last.
  void step(const std::string& spec, const ProgressStart& start, const CallContext& context) {
    if (start.total <= 0) return;  // its end could not be told
    std::int32_t handle = 0;
    {
      std::lock_guard lock(mutex_);
      for (const Slot& slot : slots_) {
        // Relaxed: see take().
        bool live = slot.phase.load(std::memory_order_relaxed) == Phase::kLive;
        if (live && slot.run == context.run && slot.site == start.site &&
            slot.device == context.device)
          handle = slot.handle.load(std::memory_order_relaxed);
      }
    }
    if (handle == 0) handle = begin(spec, start, context);
    Slot* slot = find(handle);
    if (slot == nullptr) return;
    // Relaxed: see store_count().
    auto count = static_cast<std::uint32_t>(slot->count.load(std::memory_order_relaxed)) + 1;
    store_count(*slot, count);
    if (slot->count.load(std::memory_order_relaxed) >= start.total) end(handle, count);
  }

  // The bars of the run end where they stand: its program failed.
  void fail(std::int64_t run) noexcept {
    if (run == kNoRun) return;
    std::lock_guard lock(mutex_);
    for (Slot& slot : slots_) {
      Phase live = Phase::kLive;
      // Relaxed: the count stands since its last update, whoever reads it.
      if (slot.run == run)
        slot.phase.compare_exchange_strong(live, Phase::kFailed, std::memory_order_relaxed);
    }
  }

  // All bars that have begun and have not been released.
  std::vector<ProgressState> poll() const {
    std::lock_guard lock(mutex_);
    std::vector<ProgressState> states;
    for (const Slot& slot : slots_) {
      // Acquire: pairs with end(), so that an ended bar has its last count.
      Phase phase = slot.phase.load(std::memory_order_acquire);
      if (phase == Phase::kFree) continue;
      std::int64_t time = now(), until = time;
      if (phase != Phase::kLive) until = slot.updated_ns.load(std::memory_order_relaxed);
      states.push_back({slot.handle.load(std::memory_order_relaxed), slot.bar, slot.spec, slot.run,
                        slot.total, slot.count.load(std::memory_order_relaxed),
                        time - slot.began_ns, until - slot.began_ns, phase, slot.lane, slot.first,
                        slot.last, slot.at.load(std::memory_order_relaxed)});
    }
    return states;
  }

  // Frees the bar's slot, unless it began again or still lives.
  void release(std::int32_t handle) noexcept {
    std::lock_guard lock(mutex_);
    Slot* slot = find(handle);
    // Relaxed: under the lock.
    if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) == Phase::kLive) return;
    slot->handle.store(0, std::memory_order_relaxed);
    slot->phase.store(Phase::kFree, std::memory_order_relaxed);
  }

  // `wake` is called, without a lock held, by the first bar that begins while nobody draws.
  void set_wake(std::function<void()> wake) {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }

  // Whoever draws stops, if there are no bars; false when there are.
  bool retire() {
    std::lock_guard lock(mutex_);
    bool empty = std::ranges::all_of(slots_, [](const Slot& slot) {
      // Relaxed: under the lock.
      return slot.phase.load(std::memory_order_relaxed) == Phase::kFree;
    });
    if (empty) drawn_ = false;
    return empty;
  }

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

  static std::int64_t next_chunk(std::int64_t steps, std::int64_t elapsed_ns) noexcept {
    steps = std::clamp<std::int64_t>(steps, 1, kMostSteps);
    double wanted = static_cast<double>(steps) * kUpdateNs /
                    static_cast<double>(std::max<std::int64_t>(elapsed_ns, 1));
    double most = static_cast<double>(std::min(steps * kGrowth, kMostSteps));
    return static_cast<std::int64_t>(std::clamp(wanted, 1.0, most));
  }

  std::int64_t now() const {
    using std::chrono::nanoseconds, std::chrono::steady_clock;
    return (clock_ ? clock_() : nanoseconds(steady_clock::now().time_since_epoch())).count();
  }

  Slot* find(std::int32_t handle) noexcept {
    if (handle <= 0) return nullptr;
    Slot& slot = slots_[static_cast<std::size_t>(handle) % kSlots];
    // Acquire: pairs with the store in begin(), behind the slot's other fields.
    return slot.handle.load(std::memory_order_acquire) == handle ? &slot : nullptr;
  }

  // One device of a run draws; a run without an id, or with one device, always does.
  bool owns(const CallContext& context) {
    if (context.run == kNoRun) return true;
    for (const Slot& slot : slots_) {  // a bar that is still there, however many runs came since
      // Relaxed: see take().
      bool live = slot.phase.load(std::memory_order_relaxed) == Phase::kLive;
      if (live && slot.run == context.run) return slot.device == context.device;
    }
    for (const Owner& owner : owners_)
      if (owner.run == context.run) return owner.device == context.device;
    owners_[next_owner_] = {context.run, context.device};
    next_owner_ = (next_owner_ + 1) % kOwners;
    return true;
  }

  // The slot of the same bar, which has ended; else a free one; else the one that ended first.
  Slot* take(const ProgressStart& start, const CallContext& context) {
    Slot* found = nullptr;
    Slot* oldest = nullptr;
    for (Slot& slot : slots_) {
      // Relaxed: phases change to live or free under the lock alone.
      Phase phase = slot.phase.load(std::memory_order_relaxed);
      if (phase == Phase::kEnded && slot.run == context.run && slot.site == start.site &&
          slot.lane == start.lane)
        return &slot;
      if (phase == Phase::kFree && found == nullptr) found = &slot;
      if (phase == Phase::kLive || phase == Phase::kFree) continue;
      if (oldest == nullptr || slot.bar < oldest->bar) oldest = &slot;
    }
    if (found == nullptr) found = oldest;
    if (found != nullptr) found->bar = next_bar_++;
    return found;
  }

  void store_count(Slot& slot, std::uint32_t count) noexcept {
    // Relaxed: one program's loop is the only writer, and whoever draws takes any recent value.
    std::int64_t before = slot.count.load(std::memory_order_relaxed);
    auto more = static_cast<std::int32_t>(count - static_cast<std::uint32_t>(before));
    if (more > 0) slot.count.store(before + more, std::memory_order_relaxed);
  }

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

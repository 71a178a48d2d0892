// SPDX-License-Identifier: Apache-2.0
// The board's slots: how bars take, update and end them.
#include "cells/progress.h"

#include <algorithm>

namespace callgate {

std::int32_t ProgressBoard::begin(const std::string& spec, const ProgressStart& start,
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
    // Relaxed: the release of the handle below publishes all of it.
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

std::int32_t ProgressBoard::update(std::int32_t handle, std::uint32_t count, float at) noexcept {
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

void ProgressBoard::end(std::int32_t handle, std::uint32_t count, float at) noexcept {
  Slot* slot = find(handle);
  // Relaxed: only this program's loop ends the bar, or it has failed.
  if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) != Phase::kLive) return;
  store_count(*slot, count);
  slot->at.store(at, std::memory_order_relaxed);             // published by the phase below
  slot->updated_ns.store(now(), std::memory_order_relaxed);  // published by the phase below
  Phase live = Phase::kLive;
  // Release: a thread that reads the end also reads the last count. A failed bar stays failed.
  slot->phase.compare_exchange_strong(live, Phase::kEnded, std::memory_order_release,
                                      std::memory_order_relaxed);
}

void ProgressBoard::step(const std::string& spec, const ProgressStart& start,
                         const CallContext& context) {
  if (start.total <= 0) return;  // the end could not be detected
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

void ProgressBoard::fail(std::int64_t run) noexcept {
  if (run == kNoRun) return;
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    Phase live = Phase::kLive;
    // Relaxed: any reader may use the count since its last update.
    if (slot.run == run)
      slot.phase.compare_exchange_strong(live, Phase::kFailed, std::memory_order_relaxed);
  }
}

std::vector<ProgressState> ProgressBoard::poll() const {
  std::lock_guard lock(mutex_);
  std::vector<ProgressState> states;
  for (const Slot& slot : slots_) {
    // Acquire: pairs with end(), so an ended bar has its last count.
    Phase phase = slot.phase.load(std::memory_order_acquire);
    if (phase == Phase::kFree) continue;
    std::int64_t time = now(), until = time;
    if (phase != Phase::kLive) until = slot.updated_ns.load(std::memory_order_relaxed);
    states.push_back({slot.handle.load(std::memory_order_relaxed), slot.bar, slot.spec, slot.run,
                      slot.total, slot.count.load(std::memory_order_relaxed), time - slot.began_ns,
                      until - slot.began_ns, phase, slot.lane, slot.first, slot.last,
                      slot.at.load(std::memory_order_relaxed)});
  }
  return states;
}

void ProgressBoard::release(std::int32_t handle) noexcept {
  std::lock_guard lock(mutex_);
  Slot* slot = find(handle);
  // Relaxed: the lock is held.
  if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) == Phase::kLive) return;
  slot->handle.store(0, std::memory_order_relaxed);
  slot->phase.store(Phase::kFree, std::memory_order_relaxed);
}

void ProgressBoard::set_wake(std::function<void()> wake) {
  std::lock_guard lock(mutex_);
  wake_ = std::move(wake);
}

bool ProgressBoard::retire() {
  std::lock_guard lock(mutex_);
  bool empty = std::ranges::all_of(slots_, [](const Slot& slot) {
    // Relaxed: the lock is held.
    return slot.phase.load(std::memory_order_relaxed) == Phase::kFree;
  });
  if (empty) drawn_ = false;
  return empty;
}

std::int64_t ProgressBoard::next_chunk(std::int64_t steps, std::int64_t elapsed_ns) noexcept {
  steps = std::clamp<std::int64_t>(steps, 1, kMostSteps);
  double wanted = static_cast<double>(steps) * kUpdateNs /
                  static_cast<double>(std::max<std::int64_t>(elapsed_ns, 1));
  double most = static_cast<double>(std::min(steps * kGrowth, kMostSteps));
  return static_cast<std::int64_t>(std::clamp(wanted, 1.0, most));
}

std::int64_t ProgressBoard::now() const {
  using std::chrono::nanoseconds, std::chrono::steady_clock;
  return (clock_ ? clock_() : nanoseconds(steady_clock::now().time_since_epoch())).count();
}

ProgressBoard::Slot* ProgressBoard::find(std::int32_t handle) noexcept {
  if (handle <= 0) return nullptr;
  Slot& slot = slots_[static_cast<std::size_t>(handle) % kSlots];
  // Acquire: pairs with the store in begin(), which follows the slot's other fields.
  return slot.handle.load(std::memory_order_acquire) == handle ? &slot : nullptr;
}

bool ProgressBoard::owns(const CallContext& context) {
  if (context.run == kNoRun) return true;
  for (const Slot& slot : slots_) {  // a bar that still exists, regardless of later runs
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

ProgressBoard::Slot* ProgressBoard::take(const ProgressStart& start, const CallContext& context) {
  Slot* found = nullptr;
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    // Relaxed: phases only change to live or free under the lock.
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

void ProgressBoard::store_count(Slot& slot, std::uint32_t count) noexcept {
  // Relaxed: one program's loop is the only writer, and drawing uses any recent value.
  std::int64_t before = slot.count.load(std::memory_order_relaxed);
  auto more = static_cast<std::int32_t>(count - static_cast<std::uint32_t>(before));
  if (more > 0) slot.count.store(before + more, std::memory_order_relaxed);
}

}  // namespace callgate

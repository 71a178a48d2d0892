// SPDX-License-Identifier: Apache-2.0
// Knobs, which compiled programs read, and requests to stop.
//
// Both are callees without operands whose one result is the value of a cell that the host writes.
// In a program over several devices each device reads by itself. All must get the same value at the
// same read, because their control flow depends on it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/main_thread.h"
#include "core/runs.h"

namespace callgate {

// Reads of one place in a program by several devices. The first device at its n-th read of a run
// decides the value that all devices get at their n-th read. Thread-safe.
class CommonReads {
 public:
  explicit CommonReads(std::size_t devices) : devices_(devices), runs_(devices, kMostRuns) {}

  // `value()` is called under the lock, for the first device at this read. `place`: see Runs.
  template <typename Value>
  std::uint64_t read(std::int64_t run, std::int64_t device, const void* place, Value&& value) {
    std::lock_guard lock(mutex_);
    Run& reads = runs_.of(run, device, place, [] { return Run{}; });
    std::uint64_t& next = reads.next_of(device);
    // A device that is further behind than the history gets the oldest value in it.
    next = std::max(next, reads.first);
    if (next - reads.first == reads.values.size()) reads.values.push_back(value());
    std::uint64_t found = reads.values[next - reads.first];
    ++next;
    reads.drop_read_by_all(devices_);
    return found;
  }

 private:
  static constexpr std::size_t kAhead = 1 << 16, kMostRuns = 1 << 12;

  struct Run {
    std::uint64_t first = 0;  // the number of the read of values[0]
    std::deque<std::uint64_t> values;
    std::vector<std::pair<std::int64_t, std::uint64_t>> next;  // by device

    std::uint64_t& next_of(std::int64_t device);
    void drop_read_by_all(std::size_t devices);
  };

  const std::size_t devices_;
  std::mutex mutex_;
  Runs<Run> runs_;
};

// A number of at most eight bytes that programs read while the host writes it.
class KnobCallee final : public Callee, public std::enable_shared_from_this<KnobCallee> {
 public:
  KnobCallee(std::string name, std::uint64_t bits) : name_(std::move(name)), bits_(bits) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  bool quiet_at_exit() const noexcept override { return true; }

  // The bytes of the number, in memory order from the first. Relaxed: it is complete in itself.
  void set(std::uint64_t bits) noexcept { bits_.store(bits, std::memory_order_relaxed); }
  std::uint64_t get() const noexcept { return bits_.load(std::memory_order_relaxed); }

  std::uint64_t read(std::int64_t run, bool once, const void* place);

 private:
  std::string name_;
  std::atomic<std::uint64_t> bits_;
  std::mutex mutex_;
  Runs<std::uint64_t> runs_;  // values that runs read once
};

// The number of requests to stop programs.
class StopRequests {
 public:
  static std::uint32_t count() noexcept { return count_.load(std::memory_order_acquire); }
  static void add() noexcept { count_.fetch_add(1, std::memory_order_acq_rel); }

 private:
  static inline constinit std::atomic<std::uint32_t> count_{0};
};

// True if one program has been asked to stop since its dispatch.
//
// XLA gives the runs of a program consecutive numbers in the order of dispatch, and each dispatch
// calls dispatched(). A dispatch with refused arguments has no number and doesn't call it. So the
// first run that asks belongs to the first dispatch, and from it follows the dispatch of each later
// run. An unknown run (of a program from a file, whose dispatch is not visible) counts from its
// first question on.
class StopCallee final : public Callee, public std::enable_shared_from_this<StopCallee> {
 public:
  explicit StopCallee(std::string name) : name_(std::move(name)) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  bool quiet_at_exit() const noexcept override { return true; }

  void dispatched();

  // 1 if the run must stop, otherwise 0.
  std::uint64_t read(std::int64_t run, bool /*once*/, const void* place);

 private:
  static constexpr std::size_t kDispatches = 1024;  // history length; XLA has at most 32 in flight

  // The requests before the run's dispatch; asked again if another run has taken its slot.
  std::uint32_t begin(std::uint32_t run, const void* place);

  std::string name_;
  std::mutex mutex_;
  std::deque<std::uint32_t> dispatches_;  // the number of requests before each dispatch
  std::uint32_t first_ = 0;               // the number of the first element
  std::optional<std::uint32_t> zeroth_;   // the run of the first dispatch
  Runs<std::uint32_t> runs_;              // the same for each run that has asked
  // Some runs, for look-ups without the lock: the run's number and the requests before it.
  std::array<std::atomic<std::uint64_t>, 64> slots_{};
};

}  // namespace callgate

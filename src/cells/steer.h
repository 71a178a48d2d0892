// SPDX-License-Identifier: Apache-2.0
// Knobs, which compiled programs read, and requests to stop.
//
// Both are callees without operands, whose one result is the value of a cell that the host writes.
// In a program over several devices each device reads by itself, and all must get the same value at
// the same read: their control flow depends on it.
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

// The reads of one place in a program by several devices: the first device that comes to its n-th
// read of a run decides on the value that all get at their n-th. Any thread.
class CommonReads {
 public:
  explicit CommonReads(std::size_t devices) : devices_(devices), runs_(devices, kMostRuns) {}

  // `value()` is asked, under the lock, where the device is the first that comes there. `place`:
  // see Runs.
  template <typename Value>
  std::uint64_t read(std::int64_t run, std::int64_t device, const void* place, Value&& value) {
    std::lock_guard lock(mutex_);
    Run& reads = runs_.of(run, device, place, [] { return Run{}; });
    std::uint64_t& next = reads.next_of(device);
    // A device that has fallen behind by more than is kept gets the oldest of it.
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
    std::uint64_t first = 0;  // the number of the read that values[0] is of
    std::deque<std::uint64_t> values;
    std::vector<std::pair<std::int64_t, std::uint64_t>> next;  // by device

    std::uint64_t& next_of(std::int64_t device);
    void drop_read_by_all(std::size_t devices);
  };

  const std::size_t devices_;
  std::mutex mutex_;
  Runs<Run> runs_;
};

// A number of at most eight bytes that programs read and the host writes, both at once.
class KnobCallee final : public Callee, public std::enable_shared_from_this<KnobCallee> {
 public:
  KnobCallee(std::string name, std::uint64_t bits) : name_(std::move(name)), bits_(bits) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  bool quiet_at_exit() const noexcept override { return true; }

  // The bytes of the number, in the memory's order from its first. Relaxed: it says all by itself.
  void set(std::uint64_t bits) noexcept { bits_.store(bits, std::memory_order_relaxed); }
  std::uint64_t get() const noexcept { return bits_.load(std::memory_order_relaxed); }

  std::uint64_t read(std::int64_t run, bool once, const void* place);

 private:
  std::string name_;
  std::atomic<std::uint64_t> bits_;
  std::mutex mutex_;
  Runs<std::uint64_t> runs_;  // what runs have read once
};

// How often programs were asked to stop.
class StopRequests {
 public:
  static std::uint32_t count() noexcept { return count_.load(std::memory_order_acquire); }
  static void add() noexcept { count_.fetch_add(1, std::memory_order_acq_rel); }

 private:
  static inline constinit std::atomic<std::uint32_t> count_{0};
};

// True if one program has been asked to stop since it was dispatched.
//
// XLA gives the runs of a program consecutive numbers, in the order of their dispatch, each of
// which calls dispatched(); a dispatch whose arguments are refused has no number, and doesn't call
// it. So the first run that asks, taken for the first dispatch, tells of each later one which
// dispatch it is. A run of which nothing is known (a program from a file, whose dispatch nobody
// sees) counts from its first question on.
class StopCallee final : public Callee, public std::enable_shared_from_this<StopCallee> {
 public:
  explicit StopCallee(std::string name) : name_(std::move(name)) {}

  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  bool quiet_at_exit() const noexcept override { return true; }

  void dispatched();

  // 1 where the run is to stop, else 0.
  std::uint64_t read(std::int64_t run, bool /*once*/, const void* place);

 private:
  static constexpr std::size_t kDispatches = 1024;  // kept; XLA has 32 under way at once

  // The requests before the run was dispatched; of one whose slot another has taken, once more.
  std::uint32_t begin(std::uint32_t run, const void* place);

  std::string name_;
  std::mutex mutex_;
  std::deque<std::uint32_t> dispatches_;  // the requests before each
  std::uint32_t first_ = 0;               // the number of the first of them
  std::optional<std::uint32_t> zeroth_;   // the run of the first dispatch
  Runs<std::uint32_t> runs_;              // the same of each run that has asked
  // For some runs, to be found without the lock: the run's number and the requests before it.
  std::array<std::atomic<std::uint64_t>, 64> slots_{};
};

}  // namespace callgate

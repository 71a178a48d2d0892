// SPDX-License-Identifier: Apache-2.0
// Waits of the host for streams, and of streams for the host.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/lifetime.h"
#include "core/system.h"
#include "cuda/device.h"
#include "cuda/memory.h"

namespace callgate::cuda {

// A device's completion thread, "cg-cuda-N". It starts with the first task, and stop() joins it.
// The object is never destroyed, because the thread may have to be left running. The thread waits
// for the tasks' events in the order of the tasks, so tasks of one stream run in the stream's
// order. It then runs the task, which must not throw, nor wait for later work of the stream. If the
// stream failed, the task gets the failure.
//
// While one thread queries an event, another thread needs five times as long to enqueue work. So
// the thread pauses between two queries, and one query serves many tasks: if a later task's event
// has come, so have the earlier ones of the same stream. Events that are waited for by queries
// (Device::Waiting::kAsking) suit this best.
//
// Replayed graphs add tasks when the stream reaches them, and not when they are launched. So once a
// device's calls are in a graph, the streams themselves add all its tasks: `in_turn`.
class Completions : Immovable {
  struct Task {
    std::optional<StreamEvent> event;
    std::function<void(Result)> run;
  };

 public:
  explicit Completions(Device& device) : device_(device) {}
  static Completions& of(Device& device) {
    return of_devices().at(device.index(), [&] { return std::make_unique<Completions>(device); });
  }

  // False if the thread has been stopped; the task didn't run and won't.
  bool after(StreamEvent event, std::function<void(Result)> task) {
    return give({std::move(event), std::move(task)});
  }

  // True if tasks must come `in_turn`, from the first `order_by_streams` on. Relaxed: set while a
  // program is recorded, before any replay of it can be enqueued.
  bool ordered_by_streams() const noexcept { return by_streams_.load(std::memory_order_relaxed); }
  void order_by_streams() noexcept { by_streams_.store(true, std::memory_order_relaxed); }
  // Adds the task when the stream reaches this point. It runs when the event, perhaps another
  // stream's, has come, too. Throws if the stream accepts no host function.
  void in_turn(Stream stream, std::optional<StreamEvent> event, std::function<void(Result)> task);

  // Adds a task behind the existing ones. Makes no driver call, so a host function may use it.
  bool later(std::function<void()> task) {
    return give({std::nullopt, [task = std::move(task)](Result) { task(); }});
  }

  // Keeps an object until the event has come, if possible. For destructors.
  bool keep(StreamEvent event, std::shared_ptr<void> kept) noexcept;

  // Waits for the earlier tasks, unless called on the thread itself. False if the time ran out.
  bool drain(std::chrono::nanoseconds limit);

  // Accepts no more tasks, runs the existing ones and joins the thread. Past the limit it returns
  // false, and the thread ends by itself.
  bool stop(std::chrono::nanoseconds limit);

  bool stopped() const noexcept;

  std::int64_t pending() const noexcept;

  // All devices at once; false if the time ran out.
  static bool drain_all(std::chrono::nanoseconds limit) { return each(&Completions::drain, limit); }
  static bool stop_all(std::chrono::nanoseconds limit) { return each(&Completions::stop, limit); }
  // In a fork's child (with one thread, and locks that may never be released): tasks are dropped.
  static void abandon_all() noexcept { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  static PerDevice<Completions>& of_devices() { return immortal<PerDevice<Completions>>(); }

  bool give(Task task);

  void work();

  static constexpr std::size_t kAtOnce = 16;               // tasks served by one driver call
  static constexpr std::chrono::microseconds kApart{100};  // between calls of the driver

  // Lets tasks gather, unless there are many, or a caller waits for them.
  void pause(std::unique_lock<std::mutex>& lock);

  // A task that waits behind another of the same stream. Tasks don't move: only the thread removes
  // them.
  struct Later {
    const StreamEvent* event = nullptr;  // null for none
    std::uint64_t number = 0;
  };
  Later find_later(const Task& first) const;

  Result wait(const Task& task, std::uint64_t number, const Later& later);

  static bool each(bool (Completions::*wait)(std::chrono::nanoseconds),
                   std::chrono::nanoseconds limit);

  static inline std::atomic<bool> abandoned_{false};
  Device& device_;
  std::atomic<bool> by_streams_{false};
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::uint64_t given_ = 0, done_ = 0;
  std::condition_variable haste_;  // ends a pause
  int in_haste_ = 0;               // callers in drain()
  bool stopping_ = false;
  std::thread thread_;

  // Only the thread uses these: the time of its last query, and the number up to which tasks need
  // none.
  std::chrono::steady_clock::time_point asked_;
  Stream reached_stream_ = nullptr;
  std::uint64_t reached_ = 0;
};

// Holds a stream back until the host opens the gate, without a waiting thread. The stream waits for
// a word in pinned memory if the device supports that, otherwise in a host function.
class StreamGate : Immovable {
 public:
  StreamGate() { word().store(0, std::memory_order_relaxed); }  // not shared yet

  // Later work of the stream starts after open(). The caller keeps the gate until then. Throws
  // Error.
  void hold(Stream stream);

  // The work behind the gate sees the host's current memory. Thread-safe, called once.
  void open() noexcept;

 private:
  // The word for host and device: pinned memory has one address for both.
  std::atomic_ref<std::uint32_t> word() const noexcept {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word_.data()));
  }

  PinnedBlock word_{sizeof(std::uint32_t)};
};

}  // namespace callgate::cuda

// SPDX-License-Identifier: Apache-2.0
// The host waits for streams, and streams wait for the host.
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

// A device's own. One thread, "cg-cuda-N", started with the first task and joined by stop(); never
// destroyed, since it may have to be left alone. It waits for the event of each task in the order
// in which tasks came, so tasks of one stream run in the stream's order, and then runs the task. A
// task must not throw, nor wait for work that is given to the stream later. Where the stream
// failed, the task is told so.
//
// While one thread asks the driver for an event, another that gives a stream work takes five times
// as long for it. So the thread pauses between two such calls, and one call answers for many tasks:
// where a later task's event has come, those of the same stream before it have. Events that are
// waited for by asking (Device::Waiting::kAsking) suit it best.
//
// Replayed graphs give tasks when the stream gets there, and not when they are launched. So once a
// device's calls are in a graph, all its tasks are given by the streams themselves: `in_turn`.
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

  // False when the thread has been stopped: the task did not run and won't.
  bool after(StreamEvent event, std::function<void(Result)> task) {
    return give({std::move(event), std::move(task)});
  }

  // True if tasks are to come `in_turn`: from the first `order_by_streams` on.
  // Relaxed: set while a program is recorded, before any replay of it can be given to a stream.
  bool ordered_by_streams() const noexcept { return by_streams_.load(std::memory_order_relaxed); }
  void order_by_streams() noexcept { by_streams_.store(true, std::memory_order_relaxed); }
  // Gives the task when the stream has got so far; it runs when the event has come, too, which may
  // be another stream's. Throws where the stream takes no host function.
  void in_turn(Stream stream, std::optional<StreamEvent> event, std::function<void(Result)> task);

  // Behind the tasks that are there. Not a call of the driver's: a host function may make it.
  bool later(std::function<void()> task) {
    return give({std::nullopt, [task = std::move(task)](Result) { task(); }});
  }

  // Keeps something until the event has come, as far as that can be done. For destructors.
  bool keep(StreamEvent event, std::shared_ptr<void> kept) noexcept;

  // Waits for the tasks given before, unless on the thread itself. False when the time ran out.
  bool drain(std::chrono::nanoseconds limit);

  // Takes no more tasks, runs what is there and joins the thread, which past the limit (then false)
  // ends by itself.
  bool stop(std::chrono::nanoseconds limit);

  bool stopped() const noexcept;

  std::int64_t pending() const noexcept;

  // All devices' at once; false when the time did not suffice.
  static bool drain_all(std::chrono::nanoseconds limit) { return each(&Completions::drain, limit); }
  static bool stop_all(std::chrono::nanoseconds limit) { return each(&Completions::stop, limit); }
  // In a fork's child (one thread; the others' locks are held for ever): tasks are dropped.
  static void abandon_all() noexcept { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  static PerDevice<Completions>& of_devices() { return immortal<PerDevice<Completions>>(); }

  bool give(Task task);

  void work();

  static constexpr std::size_t kAtOnce = 16;  // tasks that one call of the driver may answer for
  static constexpr std::chrono::microseconds kApart{100};  // calls of the driver

  // Has tasks gather, unless many have, or someone waits for them.
  void pause(std::unique_lock<std::mutex>& lock);

  // A task that waits behind another for the same stream. Tasks stay where they are: only the
  // thread takes any.
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
  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::uint64_t given_ = 0, done_ = 0;
  std::condition_variable haste_;  // ends a pause
  int in_haste_ = 0;               // who waits in drain()
  bool stopping_ = false;
  std::thread thread_;

  // The thread's alone: when it last asked the driver, and up to which task's number it need not.
  std::chrono::steady_clock::time_point asked_;
  Stream reached_stream_ = nullptr;
  std::uint64_t reached_ = 0;
};

// Holds a stream back until the host says so, without a thread that waits: it waits for a word of
// pinned memory where the device takes that, else in a host function.
class StreamGate : Immovable {
 public:
  StreamGate() { word().store(0, std::memory_order_relaxed); }  // nobody else knows of it yet

  // Work that the stream is given from here on starts after open(). The caller keeps the gate until
  // then. Throws Error.
  void hold(Stream stream);

  // The work behind sees the host's memory as it is now. Any thread, once.
  void open() noexcept;

 private:
  // As host and device see it: pinned memory has one address for both.
  std::atomic_ref<std::uint32_t> word() const noexcept {
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word_.data()));
  }

  PinnedBlock word_{sizeof(std::uint32_t)};
};

}  // namespace callgate::cuda

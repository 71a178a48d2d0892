// What is to be done on the host when a stream has got so far.
//
// One thread a device, "cg-cuda-N", started with the first task and joined by stop(). It waits for
// the event of each task in the order in which tasks came, so tasks of one stream run in the
// stream's order, and then runs the task. A task must not wait for work that is given to the stream
// later. Where the stream failed, the task is told so.
//
// Replayed graphs give tasks when the stream gets there, and not when they are launched. So once a
// device's calls are in a graph, all its tasks are given by the streams themselves: `in_turn`.
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

#include "cuda/device.h"

namespace callgate::cuda {

// The device's own; never destroyed, since the thread may have to be left alone.
class Completions : Immovable {
 public:
  explicit Completions(Device& device) : device_(device) {}
  static Completions& of(Device& device) { return device.completions(); }

  // Tasks must not throw. False when the thread has been stopped: the task did not run and won't.
  bool after(StreamEvent event, std::function<void(Result)> task);
  // Whether tasks are to come `in_turn`: from the first `order_by_streams` on.
  // Relaxed: set while a program is recorded, before any replay of it can be given to a stream.
  bool ordered_by_streams() const noexcept { return by_streams_.load(std::memory_order_relaxed); }
  void order_by_streams() noexcept { by_streams_.store(true, std::memory_order_relaxed); }
  // Gives the task when the stream has got so far. Throws where the stream takes no host function.
  void in_turn(Stream stream, std::function<void()> task);
  // Behind the tasks that are there, without an event. Calls no function of the driver's, so a host
  // function may call it.
  bool later(std::function<void()> task);

  // Keeps something until the event has come, as far as that can be done. For destructors.
  bool keep(StreamEvent event, std::shared_ptr<void> kept) noexcept;

  // Waits until the tasks that were given before have run; at once on the thread itself. False when
  // the time ran out.
  bool drain(std::chrono::nanoseconds limit);

  // Takes no more tasks, runs what is there and joins the thread. False when the time ran out: the
  // thread then ends by itself.
  bool stop(std::chrono::nanoseconds limit);

  bool stopped() const noexcept;

  // Tasks given and not yet run.
  std::int64_t pending() const noexcept;

  // All devices' at once. stop_all() runs what is there first, as far as the time allows; false
  // when it did not suffice.
  static bool drain_all(std::chrono::nanoseconds limit) { return each(&Completions::drain, limit); }
  static bool stop_all(std::chrono::nanoseconds limit) { return each(&Completions::stop, limit); }

  // In a fork's child: CUDA and the threads are gone; tasks are dropped.
  static void abandon_all() noexcept;

 private:
  struct Task {
    std::optional<StreamEvent> event;
    std::function<void(Result)> run;
  };

  bool give(Task task);
  void work();
  static bool each(bool (Completions::*wait)(std::chrono::nanoseconds),
                   std::chrono::nanoseconds limit);

  Device& device_;
  std::atomic<bool> by_streams_{false};
  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::uint64_t given_ = 0, done_ = 0;
  bool stopping_ = false;
  std::optional<std::thread> thread_;
};

}  // namespace callgate::cuda

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

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "cuda/device.h"
#include "cuda/event.h"

namespace callgate::cuda {

class Completions {
 public:
  // The device's; never destroyed.
  static Completions& of(Device& device);

  // Tasks must not throw. False when the thread has been stopped: the task did not run and won't.
  bool after(StreamEvent event, std::function<void(Result)> task);
  // Whether tasks are to come `in_turn`: from the first `order_by_streams` on.
  bool ordered_by_streams() const noexcept;
  void order_by_streams() noexcept;
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
  explicit Completions(Device& device);
  bool give(std::optional<StreamEvent> event, std::function<void(Result)> task);
  static bool each(bool (Completions::*wait)(std::chrono::nanoseconds),
                   std::chrono::nanoseconds limit);
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace callgate::cuda

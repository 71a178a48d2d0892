// SPDX-License-Identifier: Apache-2.0
// The thread that waits for a device's events, and runs the tasks behind them.
#include "cuda/completions.h"

#include <algorithm>
#include <exception>
#include <string>

namespace callgate::cuda {

void Completions::in_turn(Stream stream, std::optional<StreamEvent> event,
                          std::function<void(Result)> task) {
  struct Turn {
    Completions& completions;
    Task task;
  };
  auto turn = std::make_unique<Turn>(*this, Task{std::move(event), std::move(task)});
  auto give = [](void* data) {
    auto* due = static_cast<Turn*>(data);
    // Refused at the end of the process: the task is left alone, because its data may belong to the
    // driver.
    due->completions.later([due] {
      const Task& task = due->task;
      task.run(task.event ? task.event->wait() : Result::kSuccess);
      delete due;  // NOLINT: the stream had it
    });
  };
  check(driver().launch_host_function(stream, give, turn.get()), "cuLaunchHostFunc");
  [[maybe_unused]] const Turn* given = turn.release();  // `give` deletes it
}

bool Completions::keep(StreamEvent event, std::shared_ptr<void> kept) noexcept try {
  return after(std::move(event), [kept = std::move(kept)](Result) {});
} catch (const std::exception&) {
  return false;
}

bool Completions::drain(std::chrono::nanoseconds limit) {
  if (abandoned_.load(std::memory_order_relaxed)) return true;
  std::unique_lock lock(mutex_);
  if (!thread_.joinable() || thread_.get_id() == std::this_thread::get_id()) return true;
  ++in_haste_;
  haste_.notify_one();
  bool drained = changed_.wait_for(lock, limit, [&, until = given_] { return done_ >= until; });
  --in_haste_;
  return drained;
}

bool Completions::stop(std::chrono::nanoseconds limit) {
  if (abandoned_.load(std::memory_order_relaxed)) return true;
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  haste_.notify_one();
  if (!thread_.joinable()) return true;
  if (!changed_.wait_for(lock, limit, [this] { return done_ >= given_; })) return false;
  std::thread thread = std::move(thread_);
  lock.unlock();
  thread.join();
  return true;
}

bool Completions::stopped() const noexcept {
  std::lock_guard lock(mutex_);
  return stopping_;
}

std::int64_t Completions::pending() const noexcept {  // tasks given and not yet run
  std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(given_ - done_);
}

bool Completions::give(Task task) {
  if (abandoned_.load(std::memory_order_relaxed)) return false;
  std::lock_guard lock(mutex_);
  if (stopping_) return false;
  tasks_.push_back(std::move(task));
  ++given_;
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
  return true;
}

void Completions::work() {
  name_thread(("cg-cuda-" + std::to_string(device_.ordinal())).c_str());
  driver().context_set_current(device_.context());  // for the tasks
  pause_exactly();
  std::unique_lock lock(mutex_);
  for (;;) {
    pause(lock);
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      const Later later = find_later(task);
      std::uint64_t number = done_;
      lock.unlock();
      task.run(wait(task, number, later));
    }  // its captures die before it counts as done
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void Completions::pause(std::unique_lock<std::mutex>& lock) {
  auto in_haste = [this] { return stopping_ || in_haste_ != 0; };
  if (tasks_.size() < kAtOnce) haste_.wait_until(lock, asked_ + kApart, in_haste);
}

Completions::Later Completions::find_later(const Task& first) const {
  for (std::size_t i = first.event ? std::min(tasks_.size(), kAtOnce) : 0; i-- > 0;) {
    const std::optional<StreamEvent>& event = tasks_[i].event;
    if (event && first.event && event->stream() == first.event->stream())
      return {&*event, done_ + 1 + i};
  }
  return {};
}

Result Completions::wait(const Task& task, std::uint64_t number, const Later& later) {
  if (!task.event) return Result::kSuccess;
  const StreamEvent& event = *task.event;
  if (event.stream() == reached_stream_ && number <= reached_) return Result::kSuccess;
  Result result = later.event != nullptr ? later.event->query() : Result::kNotReady;
  if (result == Result::kSuccess) {
    reached_stream_ = event.stream();
    reached_ = later.number;
  } else {
    result = event.wait();
  }
  asked_ = std::chrono::steady_clock::now();
  return result;
}

bool Completions::each(bool (Completions::*wait)(std::chrono::nanoseconds),
                       std::chrono::nanoseconds limit) {
  bool done = true;
  auto end = std::chrono::steady_clock::now() + limit;
  for (Completions* of_device : of_devices().all()) {
    std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
    done &= (of_device->*wait)(std::max(left, std::chrono::nanoseconds(0)));
  }
  return done;
}

void StreamGate::hold(Stream stream) {
  if (driver().stream_wait_value != nullptr) {
    auto address = reinterpret_cast<DevicePointer>(word_.data());
    Result result = driver().stream_wait_value(stream, address, 1, kWaitValueGeq);
    if (result == Result::kSuccess) return;
    if (result != Result::kNotSupported) check(result, "cuStreamWaitValue32_v2");
  }
  auto wait = [](void* gate) {
    static_cast<StreamGate*>(gate)->word().wait(0, std::memory_order_acquire);  // see open()
  };
  check(driver().launch_host_function(stream, wait, this), "cuLaunchHostFunc");
}

void StreamGate::open() noexcept {
  word().store(1, std::memory_order_release);  // publishes the earlier writes
  word().notify_all();
}

}  // namespace callgate::cuda

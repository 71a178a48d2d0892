// See the header.
#include "cuda/completions.h"

#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

namespace callgate::cuda {
bool Completions::after(StreamEvent event, std::function<void(Result)> task) {
  return give({std::move(event), std::move(task)});
}

bool Completions::later(std::function<void()> task) {
  return give({std::nullopt, [task = std::move(task)](Result) { task(); }});
}

void Completions::in_turn(Stream stream, std::function<void()> task) {
  using Turn = std::pair<Completions*, std::function<void()>>;
  auto turn = std::make_unique<Turn>(this, std::move(task));
  auto give = [](void* data) {
    auto* due = static_cast<Turn*>(data);
    // Refused at the end of the process: left as it is, since what it holds may be the driver's.
    due->first->later([due] {
      due->second();
      delete due;  // NOLINT: the stream had it
    });
  };
  check(driver().launch_host_function(stream, give, turn.get()), "cuLaunchHostFunc");
  [[maybe_unused]] const Turn* given = turn.release();  // `give` deletes it
}

bool Completions::give(Task task) {
  if (abandoned_.load(std::memory_order_relaxed)) return false;
  std::lock_guard lock(mutex_);
  if (stopping_) return false;
  tasks_.push_back(std::move(task));
  ++given_;
  if (!thread_.has_value()) {
    thread_.emplace([this] { work(); });
    std::string name = "cg-cuda-" + std::to_string(device_.ordinal());
    pthread_setname_np(thread_->native_handle(), name.c_str());
  }
  changed_.notify_all();
  return true;
}

void Completions::work() {
  driver().context_set_current(device_.context());  // for the tasks
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task.run(task.event ? task.event->wait() : Result::kSuccess);
    }  // what it held dies before it counts as done
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

bool Completions::keep(StreamEvent event, std::shared_ptr<void> kept) noexcept try {
  return after(std::move(event), [kept = std::move(kept)](Result) {});
} catch (const std::exception&) {
  return false;
}

bool Completions::drain(std::chrono::nanoseconds limit) {
  if (abandoned_.load(std::memory_order_relaxed)) return true;
  std::unique_lock lock(mutex_);
  if (!thread_.has_value() || thread_->get_id() == std::this_thread::get_id()) return true;
  return changed_.wait_for(lock, limit, [this, until = given_] { return done_ >= until; });
}

bool Completions::stop(std::chrono::nanoseconds limit) {
  if (abandoned_.load(std::memory_order_relaxed)) return true;
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  if (!thread_.has_value()) return true;
  if (!changed_.wait_for(lock, limit, [this] { return done_ >= given_; })) return false;
  std::thread thread = std::move(*thread_);
  thread_.reset();
  lock.unlock();
  thread.join();
  return true;
}

bool Completions::each(bool (Completions::*wait)(std::chrono::nanoseconds),
                       std::chrono::nanoseconds limit) {
  bool done = true;
  auto end = std::chrono::steady_clock::now() + limit;
  for (Device* device : Device::in_use()) {
    std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
    done &= (device->completions().*wait)(std::max(left, std::chrono::nanoseconds(0)));
  }
  return done;
}

}  // namespace callgate::cuda

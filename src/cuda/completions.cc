// See the header.
#include "cuda/completions.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/lifetime.h"
#include "cuda/driver.h"

namespace callgate::cuda {
namespace {

struct Task {
  std::optional<StreamEvent> event;
  std::function<void(Result)> run;
};

// All devices' queues; never destroyed.
struct Queues {
  std::mutex mutex;
  std::map<const Device*, Completions*> all;
};

Queues& queues() { return immortal<Queues>(); }

// In a fork's child: the locks may be held by threads that are not in this process.
std::atomic<bool> abandoned{false};

bool is_abandoned() noexcept {
  return abandoned.load(std::memory_order_relaxed);  // the child has one thread when it is set
}

}  // namespace

// What the thread and those who ask share: the thread may have to be abandoned.
struct Completions::State {
  explicit State(Device& of) : device(of) {}

  Device& device;
  std::atomic<bool> by_streams{false};
  std::mutex mutex;  // guards all that follows
  std::condition_variable changed;
  std::deque<Task> tasks;
  std::uint64_t given = 0, done = 0;
  bool stopping = false;
  std::optional<std::thread> thread;

  void work() {
    driver().context_set_current(device.context());  // for the tasks
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stopping || !tasks.empty(); });
      if (tasks.empty()) return;
      Task task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task.run(task.event ? task.event->wait() : Result::kSuccess);
      task.run = nullptr;  // what it held dies before it counts as done
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }

  void start() {
    thread.emplace([this] { work(); });
    std::string name = "cg-cuda-" + std::to_string(device.ordinal());
    pthread_setname_np(thread->native_handle(), name.c_str());
  }
};

Completions::Completions(Device& device) : state_(std::make_shared<State>(device)) {}

Completions& Completions::of(Device& device) {
  std::lock_guard lock(queues().mutex);
  Completions*& completions = queues().all[&device];
  if (completions == nullptr) completions = new Completions(device);  // NOLINT: never destroyed
  return *completions;
}

bool Completions::after(StreamEvent event, std::function<void(Result)> task) {
  return give(std::move(event), std::move(task));
}

bool Completions::later(std::function<void()> task) {
  return give(std::nullopt, [task = std::move(task)](Result) { task(); });
}

// relaxed: set while a program is recorded, before any replay of it can be given to a stream.
bool Completions::ordered_by_streams() const noexcept {
  return state_->by_streams.load(std::memory_order_relaxed);
}
void Completions::order_by_streams() noexcept {
  state_->by_streams.store(true, std::memory_order_relaxed);
}

void Completions::in_turn(Stream stream, std::function<void()> task) {
  struct Turn {
    Completions* completions;
    std::function<void()> task;
  };
  auto turn = std::make_unique<Turn>(Turn{this, std::move(task)});
  auto give = [](void* data) {
    auto* due = static_cast<Turn*>(data);
    // Refused at the end of the process: left as it is, since what it holds may be the driver's.
    due->completions->later([due] {
      due->task();
      delete due;  // NOLINT: the stream had it
    });
  };
  check(driver().launch_host_function(stream, give, turn.get()), "cuLaunchHostFunc");
  [[maybe_unused]] const Turn* given = turn.release();  // `give` deletes it
}

bool Completions::give(std::optional<StreamEvent> event, std::function<void(Result)> task) {
  if (is_abandoned()) return false;
  std::lock_guard lock(state_->mutex);
  if (state_->stopping) return false;
  state_->tasks.push_back({std::move(event), std::move(task)});
  ++state_->given;
  if (!state_->thread.has_value()) state_->start();
  state_->changed.notify_all();
  return true;
}

bool Completions::keep(StreamEvent event, std::shared_ptr<void> kept) noexcept try {
  return after(std::move(event), [kept = std::move(kept)](Result) {});
} catch (const std::exception&) {
  return false;
}

bool Completions::drain(std::chrono::nanoseconds limit) {
  if (is_abandoned()) return true;
  std::unique_lock lock(state_->mutex);
  if (!state_->thread.has_value() || state_->thread->get_id() == std::this_thread::get_id())
    return true;
  std::uint64_t until = state_->given;
  return state_->changed.wait_for(lock, limit, [&] { return state_->done >= until; });
}

bool Completions::stop(std::chrono::nanoseconds limit) {
  if (is_abandoned()) return true;
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  if (!state_->thread.has_value()) return true;
  bool finished =
      state_->changed.wait_for(lock, limit, [&] { return state_->done >= state_->given; });
  if (!finished) return false;  // it holds on to its own state, and ends with its task
  std::thread thread = std::move(*state_->thread);
  state_->thread.reset();
  lock.unlock();
  thread.join();
  return true;
}

bool Completions::stopped() const noexcept {
  std::lock_guard lock(state_->mutex);
  return state_->stopping;
}

std::int64_t Completions::pending() const noexcept {
  std::lock_guard lock(state_->mutex);
  return static_cast<std::int64_t>(state_->given - state_->done);
}

bool Completions::each(bool (Completions::*wait)(std::chrono::nanoseconds),
                       std::chrono::nanoseconds limit) {
  if (is_abandoned()) return true;
  std::vector<Completions*> all;
  {
    std::lock_guard lock(queues().mutex);
    for (auto [device, completions] : queues().all) all.push_back(completions);
  }
  bool done = true;
  auto end = std::chrono::steady_clock::now() + limit;
  for (Completions* completions : all) {
    std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
    done &= (completions->*wait)(std::max(left, std::chrono::nanoseconds(0)));
  }
  return done;
}

void Completions::abandon_all() noexcept {
  abandoned.store(true, std::memory_order_relaxed);  // see is_abandoned()
}

}  // namespace callgate::cuda

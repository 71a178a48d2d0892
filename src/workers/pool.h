// SPDX-License-Identifier: Apache-2.0
// Worker processes: their start, assignment to calls, supervision, replacement and end.
//
// The pool's own thread starts the processes, forwards their stderr, and detects their ends. Calls
// come on any thread. Each requests workers and gets them in turn with the others, lane by lane
// (workers/spread.h). This file doesn't depend on the workers' code. No lock is held while a thread
// waits for a worker.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lifetime.h"
#include "workers/process.h"
#include "workers/protocol.h"

namespace callgate {

// The reason why a pool's call failed, for failures that aren't a plain Error.
struct WorkerFailure : Error {
  enum class Kind : std::uint8_t {
    kRaised,       // by the function: `raised` is the worker's exception
    kUndefined,    // the same, by a definition
    kNotStarted,   // a worker never started: it raised, or ended
    kEnded,        // the worker ended during the call
    kOverdue,      // exceeded its timeout, and was killed
    kInterrupted,  // by Ctrl-C
    kClosed,       // the pool is closed, or this is a fork's child
    kGone,         // the worker with the call's objects has ended
    kRestarts,     // workers ended repeatedly without work
  };
  WorkerFailure(Kind of, const std::string& text)
      : Error(Error::verbatim(ErrorCode::kInternal, text)), kind(of) {}

  Kind kind;
  int worker = -1;
  pid_t pid = -1;
  std::int64_t lane = 0;
  Ended how;
  std::string raised, said;  // `said` is the end of its stderr
};

struct PoolOptions {
  std::vector<std::string> command;      // descriptors and numbers are appended
  std::vector<std::string> environment;  // complete, each "NAME=value"
  std::string start;                     // the text for Served::start()
  std::size_t workers = 1;
};

// One process, from its start to its end. Its replacement is another Worker.
struct Worker : Immovable {
  enum class State : std::uint8_t { kStarting, kIdle, kTaken, kGone };

  explicit Worker(std::size_t place);

  const int index;
  const std::uint64_t number;               // unique in this process, from 1
  SharedMemory memory;                      // its current owner may write there
  std::uint32_t asked = 0;                  // its number of requests so far
  std::unordered_set<std::uint64_t> known;  // the definitions that it has; used by its owner

  // Only the pool's thread uses these.
  std::unique_ptr<ChildProcess> process;
  Descriptor socket;
  std::optional<std::chrono::steady_clock::time_point> asked_where;  // for its stacks

  // Under the pool's lock.
  State state = State::kStarting;
  EventCount* owner = nullptr;           // of the call that has taken it
  bool doomed = false;                   // it must end, which is no failure
  bool to_interrupt = false;             // its running function
  std::vector<std::uint64_t> forgotten;  // definitions and objects to drop
  std::optional<WorkerFailure> end;
};
using WorkerPointer = std::shared_ptr<Worker>;

// The workers of one call, under the pool's lock except the event count.
struct Claim : Immovable {
  std::uint32_t number = 0;      // of its event count in the pool's memory
  EventCount* events = nullptr;  // counts replies, grants, and ends of workers
  std::size_t waiting = 0;       // places in the queue
  std::vector<WorkerPointer> granted;
  std::optional<WorkerFailure> refused;
};

class Pool : Immovable {
 public:
  static constexpr int kAny = -1;

  // Starts the workers without waiting for them. Throws Error. In a fork's child it is never
  // destroyed, because thread and processes belong to the parent.
  static std::shared_ptr<Pool> make(PoolOptions options);
  ~Pool();

  std::size_t workers() const noexcept { return options_.workers; }
  std::vector<pid_t> pids() const;
  std::uint64_t replaced() const;

  // Throws WorkerFailure if the pool is closed, or belongs to another process.
  void open(Claim& claim);
  void close(Claim& claim) noexcept;  // returns granted workers
  // Requests one more worker, of this index or any.
  void want(Claim& claim, int index);
  // The workers granted since the last call; throws WorkerFailure if none can be.
  std::vector<WorkerPointer> granted(Claim& claim);
  void give_back(const WorkerPointer& worker) noexcept;
  // True if other calls wait for workers.
  bool contended() const;
  // The end of one of this call's workers, if it has ended.
  std::optional<WorkerFailure> end_of(const WorkerPointer& worker) const;
  // Kills a worker that a call has taken and no longer waits for. Returns its output since.
  std::string give_up(const WorkerPointer& worker);
  // Raises KeyboardInterrupt in the worker's function, if it runs Python code.
  void interrupt(const WorkerPointer& worker);

  // Lets workers drop a definition or object: all workers, or the one of this number. They learn of
  // it with their next request, or soon if there is none.
  void forget(std::uint64_t what, std::uint64_t worker = 0) noexcept;
  // Dropped definitions that a worker doesn't know of yet.
  std::vector<std::uint64_t> forgotten(Worker& worker);

  // The index of the worker of this number, or kAny if it has ended.
  int index_of(std::uint64_t worker) const;
  // The worker's end, as kGone; with few details if it was long ago.
  WorkerFailure gone(std::uint64_t worker) const;

  // Asks the workers to end, waits for a while, and then kills them. Running calls fail.
  // Thread-safe; does nothing in a fork's child.
  void shut_down(std::chrono::nanoseconds patience) noexcept;
  bool closed() const;

 private:
  struct Place {
    Claim* claim;
    int index;
  };

  explicit Pool(PoolOptions options);

  // On the pool's thread.
  void supervise();
  void start_missing(std::unique_lock<std::mutex>& lock);
  WorkerPointer start(std::size_t index) const;
  void wait_for_news(const std::vector<WorkerPointer>& watched, std::chrono::milliseconds most);
  void look_at(const WorkerPointer& worker);
  void started(const WorkerPointer& worker);
  void ended(const WorkerPointer& worker, Ended how);
  void have_forgotten();

  // Under the lock.
  void grant();
  WorkerPointer take_idle(int index);
  const WorkerFailure* hopeless(int index) const;
  void stop(Worker& worker);
  void forget_soon() noexcept;
  bool gives_up(Worker& worker);
  bool all_gone() const;

  void check_here() const;
  void wake() const noexcept;

  const PoolOptions options_;
  const OfProcess process_;
  const WorkerFailure closed_{WorkerFailure::Kind::kClosed,
                              "the workers are closed; call them before close(), or make others"};
  SharedMemory events_;
  Descriptor woken_, waker_;  // a pipe to the pool's thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;                   // a worker has ended
  std::vector<WorkerPointer> workers_;                // by index; null before a start
  std::vector<std::optional<WorkerFailure>> failed_;  // the reason why it doesn't start
  std::deque<Place> queue_;
  std::vector<std::uint32_t> free_calls_;
  std::vector<WorkerPointer> idle_;  // the most recently used one is last
  std::uint64_t replaced_ = 0;
  std::vector<int> idle_ends_;                                // by index, since its last call
  std::deque<std::pair<std::uint64_t, WorkerFailure>> gone_;  // the most recently ended workers
  // The time to tell idle workers what to drop.
  std::optional<std::chrono::steady_clock::time_point> to_forget_;
  bool closing_ = false;
  std::mutex joining_;
  std::jthread thread_;
};

}  // namespace callgate

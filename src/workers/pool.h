// SPDX-License-Identifier: Apache-2.0
// Worker processes: started, given to calls, watched, replaced and ended.
//
// One thread of the pool's own starts the processes, forwards what they say on stderr, and notices
// their ends. Calls come on any thread: each wants workers, which it gets in turn with the others,
// lane by lane (workers/spread.h). Nothing here knows what a worker runs. No lock is held while
// anybody waits for a worker.
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

// Why a call of a pool's failed, apart from what is an Error of its own.
struct WorkerFailure : Error {
  enum class Kind : std::uint8_t {
    kRaised,       // by the function: `raised` is what the worker made of it
    kUndefined,    // likewise, by a definition
    kNotStarted,   // a worker never came up: it raised, or ended
    kEnded,        // the worker ended within the call
    kOverdue,      // it took longer than its timeout, and was ended
    kInterrupted,  // by Ctrl-C
    kClosed,       // the pool is, or this is a fork's child
    kGone,         // the worker has ended that had what the call needs
    kRestarts,     // workers ended again and again, with nothing to do
  };
  WorkerFailure(Kind of, const std::string& text)
      : Error(Error::verbatim(ErrorCode::kInternal, text)), kind(of) {}

  Kind kind;
  int worker = -1;
  pid_t pid = -1;
  std::int64_t lane = 0;
  Ended how;
  std::string raised, said;  // the latter: the end of its stderr
};

struct PoolOptions {
  std::vector<std::string> command;      // descriptors and numbers are appended
  std::vector<std::string> environment;  // all of it, each "NAME=value"
  std::string start;                     // what Served::start() gets
  std::size_t workers = 1;
};

// One process, from its start to its end. Its replacement is another Worker.
struct Worker : Immovable {
  enum class State : std::uint8_t { kStarting, kIdle, kTaken, kGone };

  explicit Worker(std::size_t place);

  const int index;
  const std::uint64_t number;               // among all of the process, from 1
  SharedMemory memory;                      // whoever has taken it may write there
  std::uint32_t asked = 0;                  // requests so far, its own
  std::unordered_set<std::uint64_t> known;  // definitions that it has; whoever has taken it

  // For the pool's thread alone.
  std::unique_ptr<ChildProcess> process;
  Descriptor socket;
  std::optional<std::chrono::steady_clock::time_point> asked_where;  // it stands, before its end

  // Under the pool's lock.
  State state = State::kStarting;
  EventCount* owner = nullptr;           // of the call that has taken it
  bool doomed = false;                   // it is to end, and that is no failure
  bool to_interrupt = false;             // what it runs
  std::vector<std::uint64_t> forgotten;  // definitions and objects that it need not keep
  std::optional<WorkerFailure> end;
};
using WorkerPointer = std::shared_ptr<Worker>;

// The workers of one call, under the pool's lock but for the event count.
struct Claim : Immovable {
  std::uint32_t number = 0;      // of its event count in the pool's memory
  EventCount* events = nullptr;  // adds up replies, grants, and ends of workers
  std::size_t waiting = 0;       // places in the queue
  std::vector<WorkerPointer> granted;
  std::optional<WorkerFailure> refused;
};

class Pool : Immovable {
 public:
  static constexpr int kAny = -1;

  // Starts the workers, without waiting for them. Throws Error. In a fork's child it is never
  // destroyed: thread and processes are the parent's.
  static std::shared_ptr<Pool> make(PoolOptions options);
  ~Pool();

  std::size_t workers() const noexcept { return options_.workers; }
  std::vector<pid_t> pids() const;
  std::uint64_t replaced() const;

  // Throws WorkerFailure where the pool is closed, or is another process's.
  void open(Claim& claim);
  void close(Claim& claim) noexcept;  // gives back what was granted
  // One more worker, of this index or any, will be granted.
  void want(Claim& claim, int index);
  // The workers granted since; throws WorkerFailure where none can be.
  std::vector<WorkerPointer> granted(Claim& claim);
  void give_back(const WorkerPointer& worker) noexcept;
  // True if other calls wait for workers.
  bool contended() const;
  // The end of a worker that this call has, if it has ended.
  std::optional<WorkerFailure> end_of(const WorkerPointer& worker) const;
  // Ends a worker that a call has taken and does not wait for any more. Returns its output since.
  std::string give_up(const WorkerPointer& worker);
  // Has the function raise KeyboardInterrupt that such a worker runs, if it runs Python's own code.
  void interrupt(const WorkerPointer& worker);

  // Workers need not keep it any more: all of them, or the one of this number. They hear of it with
  // their next request, or soon if there is none.
  void forget(std::uint64_t what, std::uint64_t worker = 0) noexcept;
  // Forgotten definitions that a worker has not been told of yet.
  std::vector<std::uint64_t> forgotten(Worker& worker);

  // The index of the worker of this number, or kAny where it has ended.
  int index_of(std::uint64_t worker) const;
  // How it has ended, kGone; with little known where that is long ago.
  WorkerFailure gone(std::uint64_t worker) const;

  // Asks the workers to end, waits for a while, and then ends them. Calls that run fail. Any
  // thread; in a fork's child it does nothing.
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
  const WorkerFailure closed_{WorkerFailure::Kind::kClosed, "the workers are closed"};
  SharedMemory events_;
  Descriptor woken_, waker_;  // a pipe to the pool's thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;                   // a worker has ended
  std::vector<WorkerPointer> workers_;                // by index; null while one is to be started
  std::vector<std::optional<WorkerFailure>> failed_;  // why it does not come up
  std::deque<Place> queue_;
  std::vector<std::uint32_t> free_calls_;
  std::vector<WorkerPointer> idle_;  // the one used last comes last
  std::uint64_t replaced_ = 0;
  std::vector<int> idle_ends_;                                // by index, since the last call there
  std::deque<std::pair<std::uint64_t, WorkerFailure>> gone_;  // workers, the last ones
  // When idle workers are to hear what they need not keep.
  std::optional<std::chrono::steady_clock::time_point> to_forget_;
  bool closing_ = false;
  std::mutex joining_;
  std::jthread thread_;
};

}  // namespace callgate

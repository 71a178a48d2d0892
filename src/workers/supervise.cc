// SPDX-License-Identifier: Apache-2.0
// A pool's own thread: starts workers, reads their output, and detects their ends.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/system.h"
#include "workers/pool.h"

namespace callgate {
namespace {

using Kind = WorkerFailure::Kind;
using State = Worker::State;
using Clock = std::chrono::steady_clock;

// The time that a killed worker has to print its stacks.
constexpr auto kLastWords = std::chrono::milliseconds(150);

std::pair<Descriptor, Descriptor> make_sockets() {
  std::array<int, 2> ends{-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0)
    throw system_error("a socket to a worker process");
  for (int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

void ask_to_start(Worker& worker, const std::string& text) {
  constexpr std::size_t kPlace = kMessages + sizeof(Request);
  worker.memory.grow(kPlace + text.size());
  Request request;
  request.kind = RequestKind::kStart;
  request.text = {kPlace, text.size()};
  request_of(worker.memory) = request;
  std::memcpy(worker.memory.data() + kPlace, text.data(), text.size());
  control_of(worker.memory).bytes = worker.memory.size();
  control_of(worker.memory).requests.add();
  worker.asked = 1;
}

}  // namespace

void Pool::supervise() {
  name_thread("callgate-procs");
  std::unique_lock lock(mutex_);
  for (;;) {
    start_missing(lock);
    if (closing_ && all_gone()) return;
    std::vector<WorkerPointer> watched;
    bool hurry = false;
    have_forgotten();
    auto most = std::chrono::milliseconds(-1);
    if (to_forget_)
      most = std::chrono::ceil<std::chrono::milliseconds>(
          std::max(*to_forget_ - Clock::now(), Clock::duration::zero()));
    for (const WorkerPointer& worker : workers_) {
      if (!worker) continue;
      watched.push_back(worker);
      hurry |= worker->doomed || worker->process->ended_descriptor() < 0;
    }
    if (hurry) most = std::chrono::milliseconds(10);
    lock.unlock();
    wait_for_news(watched, most);
    for (const WorkerPointer& worker : watched) look_at(worker);
    lock.lock();
  }
}

void Pool::start_missing(std::unique_lock<std::mutex>& lock) {
  for (std::size_t index = 0; index < workers_.size(); ++index) {
    if (workers_[index] || failed_[index] || closing_) continue;
    lock.unlock();
    WorkerPointer made;
    std::optional<WorkerFailure> why;
    try {
      made = start(index);
    } catch (const std::exception& error) {
      why.emplace(Kind::kNotStarted, error.what());
      why->worker = static_cast<int>(index);
    }
    lock.lock();
    workers_[index] = std::move(made);
    failed_[index] = std::move(why);
    if (failed_[index]) grant();
  }
}

WorkerPointer Pool::start(std::size_t index) const {
  auto worker = std::make_shared<Worker>(index);
  ask_to_start(*worker, options_.start);
  auto [ours, theirs] = make_sockets();
  const std::vector<int> passed{worker->memory.file(), events_.file(), theirs.get()};
  std::vector<std::string> command = options_.command;
  for (int number : passed) command.push_back(std::to_string(number));
  command.push_back(std::to_string(getpid()));
  command.push_back(std::to_string(index));
  worker->process = std::make_unique<ChildProcess>(command, options_.environment, passed);
  worker->socket = std::move(ours);
  return worker;
}

// Returns after output, a start or an end of a worker, or after wake(); or after the given time,
// unless it is negative.
void Pool::wait_for_news(const std::vector<WorkerPointer>& watched,
                         std::chrono::milliseconds most) {
  std::vector<pollfd> all{{woken_.get(), POLLIN, 0}};
  for (const WorkerPointer& worker : watched) {
    all.push_back({worker->process->ended_descriptor(), POLLIN, 0});
    all.push_back({worker->process->said_descriptor(), POLLIN, 0});
    all.push_back({worker->socket.get(), POLLIN, 0});
  }
  (void)poll(all.data(), static_cast<nfds_t>(all.size()), static_cast<int>(most.count()));
  std::array<char, 64> woken;
  while (read(woken_.get(), woken.data(), woken.size()) > 0) {
  }
}

void Pool::look_at(const WorkerPointer& worker) {
  worker->process->read_said();
  if (worker->socket.open()) {
    char byte = 0;
    const ssize_t count = recv(worker->socket.get(), &byte, 1, MSG_DONTWAIT);
    if (count == 1) started(worker);
    if (count == 0) {  // it is ending, or its function has closed all files: it can't answer
      worker->socket.reset();
      worker->process->kill(SIGKILL);
    }
  }
  bool doomed = false, asks = false, interrupts = false;
  {
    std::lock_guard lock(mutex_);
    doomed = worker->doomed;
    interrupts = std::exchange(worker->to_interrupt, false) && !doomed;
    // A running worker prints its threads' stacks (python/callgate/_places/worker.py).
    asks = !closing_ && worker->state == State::kTaken;
  }
  if (interrupts) worker->process->kill(SIGUSR2);  // likewise
  if (doomed && !worker->asked_where) {
    worker->asked_where = Clock::now();
    worker->process->kill(asks ? SIGUSR1 : SIGKILL);
  } else if (doomed && Clock::now() > *worker->asked_where + kLastWords) {
    worker->process->kill(SIGKILL);
  }
  if (auto how = worker->process->poll()) {
    worker->process->read_said();
    ended(worker, *how);
  }
}

// Tells idle workers what to drop, when it is time. Under the lock.
void Pool::have_forgotten() {
  if (!to_forget_ || Clock::now() < *to_forget_) return;
  to_forget_.reset();
  for (const WorkerPointer& worker : std::vector<WorkerPointer>(idle_)) {
    if (worker->forgotten.empty()) continue;
    std::erase(idle_, worker);
    worker->state = State::kTaken;  // until its answer, see started()
    constexpr std::size_t kPlace = kMessages + sizeof(Request);
    const std::size_t room = (worker->memory.size() - kPlace) / sizeof(std::uint64_t);
    std::vector<std::uint64_t> ids = std::exchange(worker->forgotten, {});
    if (ids.size() > room) {
      worker->forgotten.assign(ids.begin() + static_cast<std::ptrdiff_t>(room), ids.end());
      ids.resize(room);
    }
    for (std::uint64_t id : ids) worker->known.erase(id);
    Request request;
    request.kind = RequestKind::kForget;
    request.forgotten = static_cast<std::uint32_t>(ids.size());
    request.forgotten_ids = kPlace;
    request_of(worker->memory) = request;
    std::memcpy(worker->memory.data() + kPlace, ids.data(), ids.size() * sizeof(std::uint64_t));
    control_of(worker->memory).bytes = worker->memory.size();
    ++worker->asked;
    control_of(worker->memory).requests.add();
  }
}

// A worker has started, or has answered a request that belongs to no call.
void Pool::started(const WorkerPointer& worker) {
  std::lock_guard lock(mutex_);
  const Reply& reply = control_of(worker->memory).reply;
  if (reply.kind == ReplyKind::kDone) {
    if (closing_) return stop(*worker);
    worker->state = State::kIdle;
    idle_.push_back(worker);
    if (!worker->forgotten.empty()) forget_soon();
  } else {
    worker->memory.follow(control_of(worker->memory).bytes);
    WorkerFailure why(Kind::kNotStarted, "a worker process could not start");
    why.worker = worker->index;
    why.pid = worker->process->pid();
    why.raised = {at<char>(worker->memory.data(), reply.raised.offset), reply.raised.bytes};
    why.said = worker->process->said();
    failed_[static_cast<std::size_t>(worker->index)] = std::move(why);
    worker->doomed = true;
  }
  grant();
}

void Pool::ended(const WorkerPointer& worker, Ended how) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<std::size_t>(worker->index);
  WorkerFailure why(closing_ ? Kind::kClosed : Kind::kEnded, "a worker process has ended");
  why.worker = worker->index;
  why.pid = worker->process->pid();
  why.how = how;
  why.said = worker->process->said();
  if (worker->state == State::kStarting && !worker->doomed) {
    why.kind = Kind::kNotStarted;
    failed_[index] = why;
  } else if (!closing_ && !failed_[index]) {
    ++replaced_;
    if (gives_up(*worker)) failed_[index].emplace(why).kind = Kind::kRestarts;
  }
  constexpr std::size_t kKept = 64;
  gone_.emplace_back(worker->number, why);
  if (gone_.size() > kKept) gone_.pop_front();
  worker->end = std::move(why);
  worker->state = State::kGone;
  if (worker->owner != nullptr) worker->owner->add();
  std::erase(idle_, worker);
  workers_[index].reset();
  changed_.notify_all();
  grant();
}

}  // namespace callgate

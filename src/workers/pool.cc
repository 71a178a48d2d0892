// SPDX-License-Identifier: Apache-2.0
// See the header. The pool's own thread is in supervise.cc.
#include "workers/pool.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "core/system.h"

namespace callgate {

namespace {
using Kind = WorkerFailure::Kind;
using State = Worker::State;
}  // namespace

Worker::Worker(std::size_t place)
    : index(static_cast<int>(place)),
      number([] {
        static std::atomic<std::uint64_t> last{0};
        return last.fetch_add(1, std::memory_order_relaxed) + 1;  // only a number, no order
      }()),
      memory(1 << 16) {}

std::shared_ptr<Pool> Pool::make(PoolOptions options) {
  auto destroy = [](Pool* pool) {
    if (pool->process_.here()) delete pool;
  };
  return {new Pool(std::move(options)), destroy};
}

Pool::Pool(PoolOptions options)
    : options_(std::move(options)),
      events_(sizeof(CallEvents)),
      workers_(options_.workers),
      failed_(options_.workers),
      idle_ends_(options_.workers) {
  std::array<int, 2> ends{-1, -1};
  if (pipe(ends.data()) != 0) throw system_error("a pipe for worker processes");
  woken_ = Descriptor(ends[0]);
  waker_ = Descriptor(ends[1]);
  for (int end : ends) {
    fcntl(end, F_SETFD, FD_CLOEXEC);
    fcntl(end, F_SETFL, O_NONBLOCK);
  }
  for (std::uint32_t call = kMostCalls; call-- > 0;) free_calls_.push_back(call);
  thread_ = std::jthread([this] { supervise(); });
}

Pool::~Pool() { shut_down(std::chrono::seconds(1)); }

void Pool::check_here() const {
  if (!process_.here())
    throw WorkerFailure(Kind::kClosed,
                        "this process was forked from the one that has the worker processes, and "
                        "can't call them; create workers in this process, or start processes with "
                        "multiprocessing's 'spawn' or 'forkserver'");
}

void Pool::wake() const noexcept { (void)!write(waker_.get(), "w", 1); }

std::vector<pid_t> Pool::pids() const {
  check_here();
  std::vector<pid_t> pids;
  std::lock_guard lock(mutex_);
  for (const WorkerPointer& worker : workers_)
    if (worker) pids.push_back(worker->process->pid());
  return pids;
}

std::uint64_t Pool::replaced() const {
  check_here();
  std::lock_guard lock(mutex_);
  return replaced_;
}

bool Pool::closed() const {
  if (!process_.here()) return true;
  std::lock_guard lock(mutex_);
  return closing_;
}

// --- Calls ---------------------------------------------------------------------------------------

void Pool::open(Claim& claim) {
  check_here();
  std::lock_guard lock(mutex_);
  if (closing_) throw closed_;  // NOLINT(bugprone-exception-copy-constructor-throws)
  if (free_calls_.empty())
    throw Error(ErrorCode::kResourceExhausted, "worker processes",
                "at most " + std::to_string(kMostCalls) + " calls at once", "one more");
  claim.number = free_calls_.back();
  free_calls_.pop_back();
  claim.events = &(*at<CallEvents>(events_.data(), 0))[claim.number];
}

void Pool::close(Claim& claim) noexcept {
  std::lock_guard lock(mutex_);
  std::erase_if(queue_, [&](const Place& place) { return place.claim == &claim; });
  for (const WorkerPointer& worker : claim.granted) {
    if (worker->state != State::kTaken) continue;
    worker->owner = nullptr;
    closing_ ? stop(*worker) : (worker->state = State::kIdle, idle_.push_back(worker));
  }
  claim.granted.clear();
  free_calls_.push_back(claim.number);
  grant();
}

void Pool::want(Claim& claim, int index) {
  bool to_start = false;
  {
    std::lock_guard lock(mutex_);
    if (const WorkerFailure* why = hopeless(index)) {  // again, for this call
      // Such a worker would start and end again. This call reports it, and the next one retries.
      if (why->kind == Kind::kRestarts) claim.refused = *why;
      to_start = true;
      for (std::size_t i = 0; i < failed_.size(); ++i)
        if (index == kAny || index == static_cast<int>(i)) {
          failed_[i].reset();
          idle_ends_[i] = 0;
        }
    }
    if (claim.refused) {
      claim.events->add();
    } else {
      queue_.push_back({&claim, index});
      ++claim.waiting;
      grant();
    }
  }
  if (to_start) wake();
}

std::vector<WorkerPointer> Pool::granted(Claim& claim) {
  std::lock_guard lock(mutex_);
  // NOLINTNEXTLINE(bugprone-unchecked-optional-access)
  if (claim.refused) throw *std::exchange(claim.refused, std::nullopt);
  return std::exchange(claim.granted, {});
}

void Pool::give_back(const WorkerPointer& worker) noexcept {
  std::lock_guard lock(mutex_);
  worker->owner = nullptr;
  if (worker->state != State::kTaken) return;  // it has ended meanwhile
  if (closing_) return stop(*worker);
  worker->state = State::kIdle;
  idle_.push_back(worker);
  idle_ends_[static_cast<std::size_t>(worker->index)] = 0;
  if (!worker->forgotten.empty()) forget_soon();
  grant();
}

bool Pool::contended() const {
  std::lock_guard lock(mutex_);
  return !queue_.empty();
}

std::optional<WorkerFailure> Pool::end_of(const WorkerPointer& worker) const {
  std::lock_guard lock(mutex_);
  return worker->end;
}

std::string Pool::give_up(const WorkerPointer& worker) {
  std::unique_lock lock(mutex_);
  worker->owner = nullptr;
  worker->doomed = true;
  wake();
  changed_.wait(lock, [&] { return worker->state == State::kGone; });
  return worker->end ? worker->end->said : std::string();
}

void Pool::interrupt(const WorkerPointer& worker) {
  std::lock_guard lock(mutex_);
  // Relaxed: the signal follows.
  control_of(worker->memory).interrupted.store(worker->asked, std::memory_order_relaxed);
  worker->to_interrupt = true;
  wake();
}

void Pool::forget(std::uint64_t what, std::uint64_t worker) noexcept {
  if (!process_.here()) return;
  std::lock_guard lock(mutex_);
  for (const WorkerPointer& one : workers_)
    if (one && (worker == 0 || one->number == worker)) one->forgotten.push_back(what);
  forget_soon();
}

int Pool::index_of(std::uint64_t worker) const {
  check_here();
  std::lock_guard lock(mutex_);
  for (const WorkerPointer& one : workers_)
    if (one && one->number == worker && !one->doomed) return one->index;
  return kAny;
}

WorkerFailure Pool::gone(std::uint64_t worker) const {
  check_here();
  std::lock_guard lock(mutex_);
  for (const auto& [number, end] : gone_)
    if (number == worker) {
      WorkerFailure why = end;
      why.kind = Kind::kGone;
      return why;
    }
  return {Kind::kGone, "the worker process has ended"};
}

std::vector<std::uint64_t> Pool::forgotten(Worker& worker) {
  std::lock_guard lock(mutex_);
  return std::exchange(worker.forgotten, {});
}

// --- Under the lock ------------------------------------------------------------------------------

void Pool::grant() {
  for (auto place = queue_.begin(); place != queue_.end();) {
    Claim& claim = *place->claim;
    if (WorkerPointer worker = take_idle(place->index)) {
      worker->state = State::kTaken;
      worker->owner = claim.events;
      claim.granted.push_back(std::move(worker));
    } else if (const WorkerFailure* why = hopeless(place->index)) {
      claim.refused = *why;
    } else {
      ++place;
      continue;
    }
    --claim.waiting;
    claim.events->add();
    place = queue_.erase(place);
  }
}

WorkerPointer Pool::take_idle(int index) {
  // The most recently used worker may still be awake.
  auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const WorkerPointer& worker) {
    return index == kAny || worker->index == index;
  });
  if (found == idle_.rend()) return nullptr;
  WorkerPointer worker = *found;
  idle_.erase(std::next(found).base());
  return worker;
}

const WorkerFailure* Pool::hopeless(int index) const {
  if (closing_) return &closed_;
  if (index != kAny) {
    const auto& why = failed_[static_cast<std::size_t>(index)];
    return why ? &*why : nullptr;
  }
  if (!std::ranges::all_of(failed_, [](const auto& why) { return why.has_value(); }))
    return nullptr;
  return &*failed_.front();  // NOLINT(bugprone-unchecked-optional-access)
}

bool Pool::all_gone() const {
  return std::ranges::all_of(workers_, [](const WorkerPointer& worker) { return !worker; });
}

// Asks an idle worker to end.
void Pool::stop(Worker& worker) {
  worker.state = State::kTaken;
  request_of(worker.memory).kind = RequestKind::kStop;
  control_of(worker.memory).bytes = worker.memory.size();
  control_of(worker.memory).requests.add();
}

// Not at once, because it is free with the next request.
void Pool::forget_soon() noexcept {
  constexpr auto kWhile = std::chrono::milliseconds(20);
  if (to_forget_ || closing_) return;
  to_forget_ = std::chrono::steady_clock::now() + kWhile;
  wake();
}

// Called after a worker's end: true if the workers of its index end repeatedly without work.
bool Pool::gives_up(Worker& worker) {
  constexpr int kMostEnds = 5;
  int& ends = idle_ends_[static_cast<std::size_t>(worker.index)];
  if (worker.state != State::kIdle) {
    if (worker.state == State::kTaken) ends = 0;
    return false;
  }
  return ++ends >= kMostEnds;
}

void Pool::shut_down(std::chrono::nanoseconds patience) noexcept {
  if (!process_.here()) return;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    grant();  // refuses the waiting calls
    for (const WorkerPointer& worker : std::exchange(idle_, {})) stop(*worker);
    for (const WorkerPointer& worker : workers_)
      if (worker && worker->state == State::kStarting) worker->doomed = true;
    wake();
    changed_.wait_for(lock, patience, [this] { return all_gone(); });
    for (const WorkerPointer& worker : workers_)
      if (worker) worker->doomed = true;
    wake();
  }
  std::lock_guard lock(joining_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace callgate

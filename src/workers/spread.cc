// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "workers/spread.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "core/system.h"

namespace callgate {
namespace {

using Clock = std::chrono::steady_clock;
using Kind = WorkerFailure::Kind;
using std::chrono::nanoseconds;

constexpr std::int64_t kLeastTime = 200'000, kMostTime = 10'000'000;  // nanoseconds of a piece
constexpr std::size_t kPieceBytes = std::size_t{64} << 20;
constexpr std::size_t kMostEnded = 4;  // workers that may end before they run a lane
constexpr auto kAwake = std::chrono::microseconds(60);
constexpr std::int64_t kSoon = 50'000;                 // nanoseconds: it spins for shorter pieces
constexpr auto kNap = std::chrono::milliseconds(100);  // between checks for Ctrl-C
// After Ctrl-C: for a call to end, again to notice its interrupt, and then to end.
constexpr auto kGrace = std::chrono::seconds(1), kUnwinding = std::chrono::seconds(5);

class Spread : Immovable {
 public:
  Spread(Pool& pool, const SpreadOptions& options, const Call& call, const Lanes* lanes,
         LaneTime& lane_time)
      : pool_(pool),
        options_(options),
        arrays_(call, lanes),
        run_(call.context.run),
        lane_time_(lane_time),
        most_lanes_(static_cast<std::int64_t>(
            std::max<std::size_t>(kPieceBytes / (arrays_.bytes_of_lane() + 1), 1))) {
    plan();
    pool_.open(claim_);
  }
  ~Spread() {
    for (Flight& flight : flights_) (void)pool_.give_up(flight.worker);
    for (const WorkerPointer& worker : spare_) pool_.give_back(worker);
    pool_.close(claim_);
  }

  void run() {
    for (;;) {
      const std::uint32_t seen = claim_.events->now();
      collect();
      ask_for_workers();
      hand_out();
      if (flights_.empty() && (failure_ || interrupted_ || left_ == 0)) break;
      wait(seen);
    }
    if (interrupted_ && left_ > 0) throw interruption();
    if (failure_) throw *failure_;  // NOLINT(bugprone-exception-copy-constructor-throws)
  }

 private:
  struct Flight {
    WorkerPointer worker;
    Piece piece;
  };
  // Lanes for any worker, or for a single one.
  struct Queue {
    int index = Pool::kAny;
    std::deque<Piece> pieces;
    std::uint64_t worker = 0;  // the only one; 0 for any of the index
    std::int64_t lanes = 0;    // in the queue
    std::size_t workers = 0;   // running or requested
  };

  void plan() {
    left_ = arrays_.count();
    by_index_ = options_.by_lane || !options_.placed.empty();
    queues_.resize(by_index_ ? pool_.workers() : 1);
    if (!options_.placed.empty()) return plan_placed();
    if (!options_.by_lane) return add(queues_[0], {0, left_, 1, 0});
    const auto workers = static_cast<std::int64_t>(pool_.workers());
    for (std::int64_t lane = 0; lane < std::min(workers, left_); ++lane) {
      const auto index = static_cast<std::size_t>((options_.first_lane + lane) % workers);
      queues_[index].index = static_cast<int>(index);
      add(queues_[index], {lane, (left_ - lane + workers - 1) / workers, workers, 0});
    }
  }

  // Adjacent lanes of one worker form a piece.
  void plan_placed() {
    const std::span<const std::uint64_t> placed = options_.placed;
    for (std::size_t lane = 0; lane < placed.size();) {
      std::size_t end = lane;
      while (end < placed.size() && placed[end] == placed[lane]) ++end;
      const int index = pool_.index_of(placed[lane]);
      if (index == Pool::kAny) throw gone(placed[lane], lane);
      Queue& queue = queues_[static_cast<std::size_t>(index)];
      queue.index = index;
      queue.worker = placed[lane];
      const auto count = static_cast<std::int64_t>(end - lane);
      queue.pieces.push_back({static_cast<std::int64_t>(lane), count, 1, 0});
      queue.lanes += count;
      lane = end;
    }
  }
  WorkerFailure gone(std::uint64_t worker, std::size_t lane) const {
    WorkerFailure why = pool_.gone(worker);
    why.lane = static_cast<std::int64_t>(lane);
    return why;
  }

  static void add(Queue& queue, const Piece& piece) {
    if (piece.count > 0) queue.pieces.push_front(piece);
    queue.lanes += piece.count;
  }
  Queue& queue_of(const WorkerPointer& worker) {
    return queues_[by_index_ ? static_cast<std::size_t>(worker->index) : 0];
  }

  // --- Answers

  void collect() {
    for (std::size_t i = 0; i < flights_.size();) {
      const WorkerControl& control = control_of(flights_[i].worker->memory);
      // Acquire: the reply and the results are visible.
      const bool answered =
          control.answered.load(std::memory_order_acquire) == flights_[i].worker->asked;
      std::optional<WorkerFailure> end;
      if (!answered) end = pool_.end_of(flights_[i].worker);
      if (!answered && !end) {
        ++i;
        continue;
      }
      Flight flight = std::move(flights_[i]);
      flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(i));
      if (answered) {
        settle(flight);
      } else {
        --queue_of(flight.worker).workers;
        lost(flight, std::move(*end));
      }
    }
  }

  void settle(const Flight& flight) {
    const Reply& reply = control_of(flight.worker->memory).reply;
    if (reply.kind == ReplyKind::kDone) {
      arrays_.take_results(*flight.worker, flight.piece);
      left_ -= flight.piece.count;
      note(flight);
      learn(reply.nanoseconds / std::max<std::int64_t>(flight.piece.count, 1));
    } else {
      raised(flight, reply.kind == ReplyKind::kUndefined);
    }
    // Waiting calls come first.
    if (queue_of(flight.worker).lanes > 0 && !pool_.contended())
      spare_.push_back(flight.worker);
    else
      give_back(flight.worker);
  }

  void note(const Flight& flight) {
    if (options_.in_order) next_ += flight.piece.count;
    if (options_.ran_on.empty()) return;
    for (std::int64_t k = 0; k < flight.piece.count; ++k)
      options_.ran_on[static_cast<std::size_t>(flight.piece.first + k * flight.piece.step)] =
          flight.worker->number;
  }

  void give_back(const WorkerPointer& worker) {
    --queue_of(worker).workers;
    pool_.give_back(worker);
  }

  void raised(const Flight& flight, bool undefined) {
    Worker& worker = *flight.worker;
    if (undefined)
      for (const Definition* definition : options_.definitions) worker.known.erase(definition->id);
    WorkerFailure why(undefined ? Kind::kUndefined : Kind::kRaised, "a worker's function failed");
    worker.memory.follow(control_of(worker.memory).bytes);
    const Reply& reply = control_of(worker.memory).reply;
    why.worker = worker.index;
    why.raised = {at<char>(worker.memory.data(), reply.raised.offset), reply.raised.bytes};
    why.lane = undefined ? 0 : reply.lane;
    fail(std::move(why));
  }

  // Keeps the failure of the first lane, which a loop would have met.
  void fail(WorkerFailure why) {
    if (!failure_ || why.lane < failure_->lane) failure_ = std::move(why);
    drop_rest();
  }
  void drop_rest() {
    for (Queue& queue : queues_) {
      queue.pieces.clear();
      queue.lanes = 0;
    }
  }

  void lost(const Flight& flight, WorkerFailure why) {
    // A worker that ended before it ran any of the lanes did so for its own reasons, so another try
    // is safe for any function. All idle workers may have ended before this is detected.
    const int others = static_cast<int>(std::min<std::size_t>(pool_.workers(), kMostEnded));
    const int retries = runs(flight) ? options_.retries : std::max(options_.retries, others);
    Piece piece = flight.piece;
    if (!failure_ && options_.placed.empty() && why.kind == Kind::kEnded &&
        ++piece.tries <= retries)
      return add(queue_of(flight.worker), piece);
    why.lane = piece.first;
    fail(std::move(why));
  }

  void learn(std::int64_t lane) {
    const std::int64_t before = lane_time_.load(std::memory_order_relaxed);  // see LaneTime
    lane_time_.store(std::max<std::int64_t>(before == 0 ? lane : (before + lane) / 2, 1),
                     std::memory_order_relaxed);
  }

  // --- Requests

  // As many as could run lanes now.
  void ask_for_workers() {
    for (Queue& queue : queues_) {
      if (!is_due(queue)) continue;
      const std::size_t most = by_index_ || options_.in_order ? 1 : pool_.workers();
      auto useful = std::min(most, queue.workers + static_cast<std::size_t>(queue.lanes));
      for (; queue.workers < useful && queue.lanes > 0; ++queue.workers)
        pool_.want(claim_, queue.index);
    }
  }

  // True if its turn has come, if lanes of several workers run in order.
  bool is_due(const Queue& queue) const {
    if (options_.placed.empty() || !options_.in_order || queue.pieces.empty()) return true;
    return flights_.empty() && queue.pieces.front().first == next_;
  }

  void hand_out() {
    try {
      for (WorkerPointer& worker : pool_.granted(claim_)) spare_.push_back(std::move(worker));
    } catch (WorkerFailure& refused) {
      fail(std::move(refused));
    }
    while (!spare_.empty()) {
      const WorkerPointer worker = spare_.back();
      Queue& queue = queue_of(worker);
      if (queue.lanes > 0 && queue.worker != 0 && queue.worker != worker->number)
        fail(gone(queue.worker, static_cast<std::size_t>(queue.pieces.front().first)));
      if (queue.lanes == 0 || !is_due(queue)) {
        spare_.pop_back();
        give_back(worker);
        continue;
      }
      const Piece piece = take_piece(queue);
      arrays_.ask(*worker, piece, options_.definitions, pool_.forgotten(*worker), claim_,
                  {options_.first_lane, options_.check_writes, options_.send_results});
      flights_.push_back({worker, piece});
      if (!asked_) asked_ = Clock::now();
      spare_.pop_back();
    }
  }

  Piece take_piece(Queue& queue) const {
    Piece& front = queue.pieces.front();
    Piece piece = front;
    piece.count = std::min({front.count, most_lanes_, piece_size(queue)});
    front.first += piece.count * piece.step;
    front.count -= piece.count;
    queue.lanes -= piece.count;
    if (front.count == 0) queue.pieces.pop_front();
    return piece;
  }

  // A part of the remaining lanes, so that all workers end at once; but enough lanes to justify a
  // message, and one if their duration is unknown.
  std::int64_t piece_size(const Queue& queue) const {
    const auto workers = static_cast<std::int64_t>(pool_.workers());
    auto part = [&](std::int64_t parts) { return (queue.lanes + parts - 1) / parts; };
    const std::int64_t lane = lane_time_.load(std::memory_order_relaxed);  // see LaneTime
    if (lane == 0) return 1;
    if (by_index_ || options_.in_order) return std::min(queue.lanes, kMostTime / lane + 1);
    const std::int64_t size =
        std::max(part(2 * workers), std::min(kLeastTime / lane + 1, part(workers)));
    return std::min(size, kMostTime / lane + 1);
  }

  // --- Waiting

  void wait(std::uint32_t seen) {
    const auto begin = Clock::now();
    if (answers_soon()) claim_.events->watch(seen, kAwake);
    if (claim_.events->now() != seen) return;
    nanoseconds nap = kNap;
    if (const auto end = deadline())
      nap = std::clamp<nanoseconds>(*end - begin, nanoseconds(1), kNap);
    claim_.events->wait(seen, nap);
    if (claim_.events->now() != seen) return;
    if (const auto end = deadline(); end && Clock::now() > *end) end_overdue();
    if (is_interrupted()) end_interrupted();
  }

  // True if spinning is useful: not for long pieces, nor on a core that a worker needs.
  bool answers_soon() const noexcept {
    const std::int64_t lane = lane_time_.load(std::memory_order_relaxed);  // see LaneTime
    const std::int32_t here = current_core();
    bool soon = false;
    for (const Flight& flight : flights_) {
      // Relaxed: a hint.
      if (control_of(flight.worker->memory).runs_on.load(std::memory_order_relaxed) == here)
        return false;
      soon |= lane <= kSoon / flight.piece.count;
    }
    return soon;
  }

  // Loading the code to run has its own limit.
  std::optional<Clock::time_point> deadline() {
    if (options_.timeout.count() == 0) return std::nullopt;
    look_for_begin();
    if (begin_) return *begin_ + options_.timeout;
    if (asked_ && options_.loading.count() > 0) return *asked_ + options_.loading;
    return std::nullopt;
  }

  // True if a worker has begun with the call's lanes.
  void look_for_begin() {
    if (!begin_ && std::ranges::any_of(flights_, runs)) begin_ = Clock::now();
  }
  static bool runs(const Flight& flight) noexcept {
    const Worker& worker = *flight.worker;
    // Relaxed: it orders nothing.
    return control_of(worker.memory).running.load(std::memory_order_relaxed) == worker.asked;
  }

  void end_overdue() {
    if (flights_.empty()) return;  // it waits for workers of other calls
    WorkerFailure why(Kind::kOverdue, begin_ ? "" : ": it had not loaded the function yet");
    why.worker = flights_.front().worker->index;
    why.lane = flights_.front().piece.first;
    for (Flight& flight : std::exchange(flights_, {})) {
      std::string said = pool_.give_up(flight.worker);
      if (flight.worker->index == why.worker) why.said = std::move(said);
      --queue_of(flight.worker).workers;
    }
    fail(std::move(why));
  }

  bool is_interrupted() const noexcept {
    return Interrupts::ends(run_) ||
           (options_.interrupts && Interrupts::end_since(*options_.interrupts));
  }

  static WorkerFailure interruption() { return {Kind::kInterrupted, "Ctrl-C ended the program"}; }

  // Interrupted Python code ends without the end of its worker.
  void end_interrupted() {
    drop_rest();
    if (!interrupted_) interrupted_ = Clock::now();
    const auto since = Clock::now() - *interrupted_;
    const bool heard = std::ranges::all_of(flights_, [](const Flight& flight) {
      const Worker& worker = *flight.worker;
      // Relaxed: it orders nothing.
      return control_of(worker.memory).unwinding.load(std::memory_order_relaxed) == worker.asked;
    });
    if (since > (heard ? kGrace + kUnwinding : 2 * kGrace)) throw interruption();
    if (since <= kGrace || std::exchange(workers_interrupted_, true)) return;
    for (const Flight& flight : flights_) pool_.interrupt(flight.worker);
  }

  Pool& pool_;
  const SpreadOptions& options_;
  const LaneArrays arrays_;
  const std::int64_t run_;
  LaneTime& lane_time_;
  const std::int64_t most_lanes_;  // of a piece
  std::optional<Clock::time_point> asked_, begin_, interrupted_;
  bool workers_interrupted_ = false;
  bool by_index_ = false;  // there is a queue for each worker
  std::int64_t next_ = 0;  // lane, if they run in order

  Claim claim_;
  std::int64_t left_ = 0;  // lanes without results
  std::vector<Queue> queues_;
  std::vector<Flight> flights_;
  std::vector<WorkerPointer> spare_;  // granted, without work yet
  std::optional<WorkerFailure> failure_;
};

}  // namespace

void spread(Pool& pool, const SpreadOptions& options, const Call& call, const Lanes* lanes,
            LaneTime& lane_time) {
  Spread(pool, options, call, lanes, lane_time).run();
}

}  // namespace callgate

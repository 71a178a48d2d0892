// SPDX-License-Identifier: Apache-2.0
// A channel's own thread: it takes records, calls the consumers, serves flushes, and rests.
#include <algorithm>
#include <new>
#include <set>

#include "channel/channel.h"
#include "core/error.h"
#include "core/lifecycle.h"
#include "core/system.h"

namespace callgate {
namespace {

constexpr auto kNap = std::chrono::milliseconds(5);
constexpr int kNapsBeforeSleep = 20;

// Repeats a step without which the thread can't continue, until there is memory.
template <typename Step>
auto insist(Step&& step) {
  for (;;) {
    try {
      return step();
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// Stands for the channel in reports of failures that no consumer caused.
class Itself final : public Consumer {
 public:
  void consume(std::span<const Record> /*records*/) override {}
  std::string description() const override { return "the sending"; }
};

// The batch that this thread delivers, while its large payloads may be lent.
thread_local const Batch* t_lender = nullptr;

}  // namespace

void Channel::run() {
  thread_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);  // see on_own_thread()
  delivers_here_ = true;
  insist([&] { name_thread(("cg:" + options_.name).substr(0, 15).c_str()); });
  while (inherited_ != nullptr && deliver_from(inherited_->store_)) {
  }
  inherited_.reset();
  for (bool some = true; some || rest();) {
    some = deliver_from(store_);
    report_no_memory();
    serve_waiting();
  }
  finish();
  thread_id_.store({}, std::memory_order_relaxed);  // another thread may get the same id
  end_thread();
}

// Delivers a batch of a store's waiting records and frees its places. False if none waited.
bool Channel::deliver_from(Store& store) {
  insist([&] {
    std::lock_guard lock(mutex_);
    in_delivery_ = true;
    hurried_ = false;
    current_ = consumers_;
    turns_.assign(current_.size() + 1, 0);
  });
  Delivery delivery;
  collect(store, delivery);
  if (!batch_.records().empty()) deliver(store, delivery);
  const std::size_t count = batch_.records().size();
  for (const Record& record : batch_.records()) record.let_go();
  store.settle(batch_, delivery.position, overflow_.bytes() + batch_.bytes_besides());
  batch_.clear();
  // Release: a thread that reads the counts also sees the consumers' work; see stats().
  delivered_.fetch_add(count - delivery.counted, std::memory_order_release);
  current_.clear();
  std::lock_guard lock(mutex_);
  if (&store == &store_) settled_ = {delivery.position, overflow_.taken()};
  end_delivery();
  return delivery.some || count != 0;
}

// Takes waiting and newly arrived records into the batch.
void Channel::collect(Store& store, Delivery& delivery) noexcept {
  const std::size_t before = batch_.records().size();
  const Store::Collected collected = store.collect(batch_, delivery.first);
  dropped_.fetch_add(collected.dropped, std::memory_order_release);  // see stats()
  if (collected.dropped != 0) note_no_memory(collected.no_memory);
  if (!delivery.first) delivery.first = collected.begin;
  delivery.position = collected.position;
  delivery.some = delivery.some || collected.some;
  if (&store == &store_ && overflow_.some()) overflow_.collect(batch_, collected.position);
  auto has_own = [](const Record& record) { return record.source->consumer != nullptr; };
  delivery.has_own =
      delivery.has_own || std::ranges::any_of(batch_.records().subspan(before), has_own);
}

void Channel::deliver(Store& store, Delivery& delivery) noexcept {
  for (;;) {
    std::size_t there = 0;
    for (std::size_t i = 0; i < turns_.size(); ++i) there += has_turn(i, delivery) ? 1 : 0;
    bool some_wait = false, some_are_behind = false;
    for (std::size_t i = 0; i < turns_.size(); ++i) {
      if (!has_turn(i, delivery)) continue;
      const bool through = take_turn(i, delivery, /*alone=*/there == 1);
      (through ? some_wait : some_are_behind) = true;
    }
    if (!some_are_behind) return;
    count_delivered(delivery);
    if (some_wait && may_grow()) collect(store, delivery);
  }
}

// Counts the records that all consumers have had so far. Consumers that leave, and sources' own
// consumers that come with a later record, never reduce the count.
void Channel::count_delivered(Delivery& delivery) noexcept {
  std::size_t through = batch_.records().size();
  for (std::size_t i = 0; i < turns_.size(); ++i)
    if (has_turn(i, delivery)) through = std::min(through, turns_[i]);
  if (through <= delivery.counted) return;
  // Release: as at the end of the delivery.
  delivered_.fetch_add(through - delivery.counted, std::memory_order_release);
  delivery.counted = through;
}

// True if a consumer takes turns at this index: one of `current_`, then the sources' own.
bool Channel::has_turn(std::size_t index, const Delivery& delivery) const noexcept {
  return index < current_.size() ? current_[index] != nullptr : delivery.has_own;
}

// Passes on some records; a lone consumer gets all, unless it processes them one by one. The next
// record determines the source's own consumer of the turn. True if the consumer has had all
// available records.
bool Channel::take_turn(std::size_t index, const Delivery& delivery, bool alone) noexcept {
  const std::span<const Record> records = batch_.records();
  const std::size_t begin = turns_[index];
  std::span<const Record> rest = records.subspan(begin);
  if (rest.empty()) return true;
  const bool is_one = index < current_.size();
  // Keeps it alive, because remove() may take it out.
  const auto consumer = is_one ? current_[index] : rest.front().source->consumer;
  if (!is_one) {
    auto is_of_other = [&](const Record& record) { return record.source->consumer != consumer; };
    const auto count = std::ranges::find_if(rest, is_of_other) - rest.begin();
    rest = rest.first(static_cast<std::size_t>(count));
  }
  const bool at_once = consumer == nullptr || (alone && is_one && !consumer->goes_one_by_one());
  if (!at_once) rest = rest.first(std::min(rest.size(), consumer->pace().turn()));
  const std::size_t end = turns_[index] = begin + rest.size();
  bool last = true;
  for (std::size_t i = 0; i < turns_.size(); ++i)
    last = last && (i == index || !has_turn(i, delivery) || turns_[i] >= end);
  if (consumer != nullptr) {
    const auto started = Clock::now();
    hand_over(*consumer, rest, last);
    const std::chrono::nanoseconds took = Clock::now() - started;
    consumer->pace().took(took.count(), rest.size());
  }
  return end == batch_.records().size();
}

// True if a delivery may get more records: not while a caller waits for its end.
bool Channel::may_grow() const noexcept {
  std::lock_guard lock(mutex_);
  return !hurried_ && !closing_ && line_.empty();
}

void Channel::hand_over(Consumer& consumer, std::span<const Record> records, bool last) noexcept {
  t_lender = last ? &batch_ : nullptr;
  const std::uint64_t lost = consumer.lost();
  tell(consumer, [&] {
    if (consumer.takes_device_arrays()) return consumer.consume(records);
    hand_over_host_arrays(consumer, records);
  });
  t_lender = nullptr;
  lost_.fetch_add(consumer.lost() - lost, std::memory_order_relaxed);  // this thread's gauge
}

// For a consumer that can't read a device: leaves out the records for device consumers. Throws
// Error after the others if there were any.
void Channel::hand_over_host_arrays(Consumer& consumer, std::span<const Record> records) {
  const Source* refused = nullptr;
  auto on_device = [](const Record& record) { return record.source->on_device; };
  each_run(records, on_device, [&](std::span<const Record> run) {
    if (!on_device(run.front())) return consumer.consume(run);
    if (refused == nullptr) refused = run.front().source;
  });
  if (refused == nullptr) return;
  throw Error(
      "channel '" + options_.name + "'",
      "Python consumers without batch=, since tap '" + refused->name + "' has on_device=True",
      consumer.description());
}

std::shared_ptr<void> Channel::lend(const Record& record) noexcept {
  return t_lender == nullptr ? nullptr : t_lender->lend(record);
}

// Reports an exception of the action; the channel and its other consumers continue.
template <typename Action>
void Channel::tell(Consumer& consumer, Action&& action) noexcept try {
  try {
    action();
  } catch (const std::exception& error) {
    on_error_(*this, consumer, error.what());
  } catch (...) {
    on_error_(*this, consumer, "an unknown C++ exception");
  }
} catch (...) {  // NOLINT(bugprone-empty-catch): no receiver is left
}

// Calls `what` of each consumer in `current_`, and empties `current_`.
void Channel::tell_current(void (Consumer::*what)()) noexcept {
  std::shared_ptr<Consumer> consumer;  // keeps it alive, because remove() may take it out meanwhile
  for (const auto& each : current_) {
    consumer = each;
    if (consumer != nullptr) tell(*consumer, [&] { ((*consumer).*what)(); });
  }
  current_.clear();
}

// Wakes callers that wait for the end of a delivery, or for room. The mutex is held.
void Channel::end_delivery() {
  in_delivery_ = false;
  ++deliveries_;
  done_.notify_all();
  // Relaxed: a sender counts itself and then checks for room under the mutex. Either it did so
  // before this thread got the mutex, so its count is visible, or it does so later and sees the
  // room.
  if (waiting_.load(std::memory_order_relaxed) != 0) room_.notify_all();
}

// The channel's consumers, then those of its sources, each once. The mutex is held.
std::vector<std::shared_ptr<Consumer>> Channel::all_consumers() const {
  std::vector<std::shared_ptr<Consumer>> all = consumers_;
  std::set<std::shared_ptr<Consumer>> of_sources;
  for (const auto& [key, source] : sources_)
    if (source->consumer != nullptr) of_sources.insert(source->consumer);
  all.insert(all.end(), of_sources.begin(), of_sources.end());
  return all;
}

// Releases sources whose records are delivered, and makes consumers flush.
void Channel::serve_waiting() {
  std::list<Waiting> due;
  {
    std::lock_guard lock(mutex_);
    auto waits = [&](const Waiting& one) { return !settled_.covers(one.moment); };
    due.splice(due.end(), line_, line_.begin(), std::ranges::find_if(line_, waits));
  }
  std::uint64_t served = 0;
  for (const Waiting& one : due) served = std::max(served, one.flush);
  due.clear();  // sources are destroyed without the mutex
  if (served == 0) return;
  insist([&] {
    std::lock_guard lock(mutex_);
    in_delivery_ = true;
    current_ = all_consumers();
  });
  report_no_memory();  // for earlier records
  tell_current(&Consumer::flush);
  std::lock_guard lock(mutex_);
  flush_served_ = served;
  end_delivery();
}

// Waits until there may be work. It naps first: senders need not end a nap, because a wake-up costs
// them microseconds. Later it sleeps until a sender wakes it. False if the channel has ended.
bool Channel::rest() {
  std::unique_lock lock(mutex_);
  // closing_ is set when all senders are gone, so every reserved entry has been published.
  if (closing_) return !store_.all_collected() || overflow_.some();
  if (no_memory_.load(std::memory_order_relaxed) > 1) return true;  // see report_no_memory()
  if (!line_.empty()) {
    // If it isn't due yet, a sender is about to publish.
    if (!settled_.covers(line_.front().moment))
      work_.wait_for(lock, std::chrono::microseconds(200));
    return true;
  }
  bool sleep = idle_naps_++ >= kNapsBeforeSleep;
  // Sequentially consistent: before the next check; see put().
  rest_.store(sleep ? kAsleep : kNapping, std::memory_order_seq_cst);
  if (!store_.has_waiting() && !overflow_.some()) {
    // Senders may wait for room again. Set before the rest, because they may cut each rest short.
    interrupted_.store(false, std::memory_order_relaxed);
    if (!sleep) work_.wait_for(lock, kNap);
    if (sleep) work_.wait(lock);
  }
  rest_.store(kAwake, std::memory_order_relaxed);  // a superfluous notification does no harm
  if (store_.has_waiting()) idle_naps_ = 0;
  return true;
}

void Channel::finish() {
  report_no_memory();
  std::list<Waiting> gone;
  decltype(sources_) sources;  // both are destroyed without the mutex
  std::unique_lock lock(mutex_);
  while (!consumers_.empty()) {  // others may join meanwhile
    current_.swap(consumers_);
    in_delivery_ = true;
    lock.unlock();
    tell_current(&Consumer::close);
    lock.lock();
    end_delivery();
  }
  gone.swap(line_);
  sources.swap(sources_);
  finished_ = true;
  done_.notify_all();
}

// Reports, once in the channel's life, that a record was dropped because of missing memory.
void Channel::report_no_memory() noexcept {
  // Relaxed: see note_no_memory().
  std::size_t bytes = no_memory_.load(std::memory_order_relaxed);
  if (bytes <= 1) return;
  no_memory_.store(1, std::memory_order_relaxed);
  Itself itself;
  tell(itself, [&] {
    throw Error(
        ErrorCode::kInternal, "channel '" + options_.name + "'",
        "memory for a record of " + std::to_string(bytes) + " bytes",
        "none: the record is dropped, as are later ones without memory; see stats() for the count");
  });
}

}  // namespace callgate

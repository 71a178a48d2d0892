// Set-up and waiting: what those do who own a channel, on their threads.
#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "channel/channel.h"

namespace callgate {

void Channel::add_all(std::vector<std::shared_ptr<Consumer>> consumers) {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  consumers_.reserve(consumers_.size() + consumers.size());
  start_locked();  // before they are added: it may throw
  for (auto& consumer : consumers) consumers_.push_back(std::move(consumer));
}

void Channel::remove(const std::shared_ptr<Consumer>& consumer) {
  const std::uint64_t delivery = request_removal(consumer);
  while (!removed(delivery, std::chrono::hours(1))) {
  }
}

std::uint64_t Channel::request_removal(const std::shared_ptr<Consumer>& consumer) {
  if (abandoned()) return 0;  // nobody delivers, and the mutex may be held for ever
  std::lock_guard lock(mutex_);
  std::erase(consumers_, consumer);
  // In a consumer's call: whoever leaves now does not get what is in delivery either.
  if (on_own_thread()) std::ranges::replace(current_, consumer, nullptr);
  return deliveries_;
}

bool Channel::removed(std::uint64_t delivery, Clock::duration timeout) {
  if (abandoned() || on_own_thread()) return true;
  std::unique_lock lock(mutex_);
  // The delivery that is under way: on a busy channel the next begins at once.
  return done_.wait_for(lock, timeout, [&] { return !in_delivery_ || deliveries_ != delivery; });
}

void Channel::start() {
  std::lock_guard lock(mutex_);
  start_locked();
}

// The mutex is held, for which the thread waits.
void Channel::start_locked() {
  if (running_ || closing_) return;
  batch_.reserve(kLeastPlaces);
  copies_.reserve(kLeastPlaces);
  taken_aside_.reserve(kLeastPlaces);
  try {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kInternal, "channel '" + options_.name + "'", "a thread of its own",
                error.code().message());
  }
  running_ = true;
}

void Channel::adopt(std::shared_ptr<Channel> other) {
  // Relaxed: nobody else counts, the other's senders are gone and ours not there yet.
  auto add = [](std::atomic<std::uint64_t>& ours, const std::atomic<std::uint64_t>& theirs) {
    ours.fetch_add(theirs.load(std::memory_order_relaxed), std::memory_order_relaxed);
  };
  sequence_.add(other->sequence_);
  add(dropped_, other->dropped_);
  add(bytes_, other->bytes_);
  // `other` keeps its sources until its records are delivered.
  inherited_ = std::move(other);
}

void Channel::retire(const Source& source) {
  if (abandoned()) return;             // the mutex may be held for ever
  std::shared_ptr<const Source> kept;  // may be the last reference: dropped after the lock
  std::lock_guard lock(mutex_);
  auto found = sources_.find(&source);
  if (found == sources_.end()) return;
  if (!settled_.covers(moment())) {  // a record of it may be left
    try {
      retired_.push_back({moment(), found->second});
    } catch (const std::bad_alloc&) {
      return;  // it stays until the channel ends
    }
    work_.notify_one();  // what is left may have been dropped behind its back
  }
  kept = std::move(found->second);
  sources_.erase(found);
}

std::uint64_t Channel::request_flush() {
  if (abandoned() || on_own_thread()) return 0;
  std::lock_guard lock(mutex_);
  if (!running_ || finished_) return 0;
  flushes_.push_back({++flush_wanted_, moment()});
  work_.notify_one();
  return flush_wanted_;
}

bool Channel::flushed(std::uint64_t request, std::optional<Clock::duration> timeout) {
  if (on_own_thread()) return true;
  if (abandoned()) return false;
  std::unique_lock lock(mutex_);
  auto served = [&] { return flush_served_ >= request || finished_; };
  if (timeout) return done_.wait_for(lock, *timeout, served);
  done_.wait(lock, served);
  return true;
}

void Channel::refuse() noexcept {
  closed_.store(true, std::memory_order_seq_cst);  // see send()
  std::lock_guard lock(mutex_);
  room_.notify_all();
}

bool Channel::close(std::optional<Clock::duration> timeout) {
  if (abandoned()) {
    if (thread_.joinable()) thread_.detach();  // it does not exist in this process
    return false;
  }
  refuse();
  while (senders_.load(std::memory_order_seq_cst) != 0) {  // see send()
    std::unique_lock lock(mutex_);
    room_.notify_all();
    room_.wait_for(lock, std::chrono::milliseconds(1));
  }
  std::thread ended;
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    work_.notify_one();
    if (running_ && on_own_thread()) return true;  // it ends when it gets back to its loop
    auto finished = [&] { return finished_ || !running_; };
    if (!timeout) {
      done_.wait(lock, finished);
    } else if (!done_.wait_for(lock, *timeout, finished)) {
      return false;
    }
    ended = std::move(thread_);  // two may close at once
  }
  if (ended.joinable()) ended.join();
  drop_the_rest();
  return true;
}

// Where nobody is left to deliver to.
void Channel::drop_the_rest() noexcept {
  if (abandoned()) return;  // the mutex may be held for ever
  std::lock_guard lock(head_mutex_);
  // Relaxed: the mutex orders it.
  std::uint64_t next = next_.load(std::memory_order_relaxed);
  std::uint64_t dropped = 0;
  while (Entry* entry = ring_.at(next)) {
    next = Ring::after(*entry);
    if (entry->kind != Entry::Kind::kFiller) {
      entry->record.let_go();
      ++dropped;
    }
    if (entry->kind == Entry::Kind::kAside) give_back_aside(entry->record);
  }
  next_.store(next, std::memory_order_relaxed);  // as above
  ring_.release(next);
  if (inherited_ != nullptr) {
    std::uint64_t before = inherited_->stats().dropped;
    inherited_->drop_the_rest();
    dropped += inherited_->stats().dropped - before;
  }
  dropped_.fetch_add(dropped, std::memory_order_release);  // see stats()
}

ChannelStats Channel::stats() const noexcept {
  ChannelStats stats;
  // What leaves is read before what comes, so that `pending` is never negative. Acquire keeps the
  // reads in this order.
  stats.delivered = delivered_.load(std::memory_order_acquire);
  stats.dropped = dropped_.load(std::memory_order_acquire);
  stats.sent = sequence_.sum();
  stats.pending = stats.sent - stats.delivered - stats.dropped;
  // Relaxed: gauges.
  stats.lost = lost_.load(std::memory_order_relaxed);
  stats.bytes = bytes_.load(std::memory_order_relaxed);
  stats.high_water = high_water_.load(std::memory_order_relaxed);
  if (abandoned()) return stats;  // the mutex may be held for ever
  std::lock_guard lock(head_mutex_);
  std::uint64_t waits = ring_.used();  // before the rest: while we hold the mutex, both only grow
  stats.high_water = std::max<std::uint64_t>(high_water_.load(std::memory_order_relaxed),
                                             waits + aside_->in_use());
  return stats;
}

}  // namespace callgate

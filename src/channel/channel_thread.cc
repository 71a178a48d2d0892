// What a channel's own thread does: take records, call the consumers, serve flushes, rest.
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "channel/channel.h"

namespace callgate {
namespace {

constexpr std::size_t kBatchRecords = 4096;
constexpr auto kNap = std::chrono::milliseconds(2);
constexpr int kNapsBeforeSleep = 50;

}  // namespace

void Channel::run() {
  thread_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);  // see on_own_thread()
  pthread_setname_np(pthread_self(), ("cg:" + options_.name).substr(0, 15).c_str());
  deliver_inherited();
  for (;;) {
    bool some = deliver_some();
    serve_flushes();
    if (some) continue;
    {
      std::lock_guard lock(mutex_);
      // Senders are gone when closing_ is set, so everything reserved has been published.
      if (closing_ && next() == ring_.tail() && overflow_.empty()) break;
    }
    rest();
  }
  finish();
}

bool Channel::deliver_some() {
  note_high_water();
  // Relaxed: others move it only for kDropOld, where a late value costs one more round.
  std::uint64_t before = next_.load(std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    in_delivery_ = true;
    current_ = consumers_;
  }
  std::uint64_t position = collect();
  if (batch_.empty() && position == before) collect_overflow();
  bool some = !batch_.empty() || position != before;
  if (!batch_.empty()) deliver();
  settle(position);
  return some;
}

// Takes what is there into the batch; returns the position after it.
std::uint64_t Channel::collect() {
  std::lock_guard lock(head_mutex_);
  std::uint64_t first = next_.load(std::memory_order_relaxed);  // the mutex orders it
  std::uint64_t next = first;
  while (batch_.size() < kBatchRecords && next - first <= ring_.capacity() / 4) {
    Entry* entry = ring_.at(next);
    if (entry == nullptr) break;
    next = Ring::after(*entry);
    if (entry->kind != Entry::Kind::kFiller) take(*entry);
  }
  // The oldest can only be dropped by others when we do not hold on to them.
  if (options_.on_full == OnFull::kDropOld) ring_.release(next);
  next_.store(next, std::memory_order_relaxed);  // as above
  return next;
}

void Channel::take(Entry& entry) {
  batch_.push_back(entry.record);
  Record& record = batch_.back();
  std::size_t bytes = record.source->payload_bytes;
  if (entry.kind == Entry::Kind::kAside) {
    taken_aside_.emplace_back(const_cast<char*>(record.payload), bytes);
  } else if (options_.on_full == OnFull::kDropOld) {
    copies_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    std::memcpy(copies_.back().get(), record.payload, bytes);
    record.payload = copies_.back().get();
  }
}

void Channel::collect_overflow() {
  std::lock_guard lock(mutex_);
  for (Overflow& one : overflow_) {
    batch_.push_back(one.record);
    copies_.push_back(std::move(one.payload));
  }
  overflow_.clear();
}

void Channel::deliver_inherited() {
  if (inherited_ == nullptr) return;
  Channel& other = *inherited_;
  {
    std::lock_guard lock(mutex_);
    current_ = consumers_;
  }
  std::uint64_t next = other.next_.load(std::memory_order_relaxed);  // nobody else moves it
  while (Entry* entry = other.ring_.at(next)) {
    next = Ring::after(*entry);
    if (entry->kind != Entry::Kind::kFiller) batch_.push_back(entry->record);
    if (entry->kind == Entry::Kind::kAside) {
      taken_aside_.emplace_back(const_cast<char*>(entry->record.payload),
                                entry->record.source->payload_bytes);
    }
  }
  deliver();
  for (auto& [block, bytes] : taken_aside_) other.aside_.give_back(block, bytes);
  taken_aside_.clear();
  delivered_.fetch_add(batch_.size(), std::memory_order_release);  // as in settle()
  batch_.clear();
  std::shared_ptr<Channel> done;
  std::lock_guard lock(mutex_);
  done.swap(inherited_);
}

void Channel::deliver() noexcept {
  for (const auto& consumer : current_) hand_over(*consumer, batch_);
  // Runs of records whose sources share a consumer of their own.
  std::span<const Record> rest(batch_);
  while (!rest.empty()) {
    Consumer* consumer = rest.front().source->consumer.get();
    auto end = std::ranges::find_if(
        rest, [&](const Record& record) { return record.source->consumer.get() != consumer; });
    auto count = static_cast<std::size_t>(end - rest.begin());
    if (consumer != nullptr) hand_over(*consumer, rest.first(count));
    rest = rest.subspan(count);
  }
}

void Channel::hand_over(Consumer& consumer, std::span<const Record> records) noexcept {
  try {
    consumer.consume(records);
  } catch (const std::exception& error) {
    on_error_(*this, consumer, error.what());
  } catch (...) {
    on_error_(*this, consumer, "an unknown C++ exception");
  }
}

// Everything before `position` is done with.
void Channel::settle(std::uint64_t position) {
  if (options_.on_full != OnFull::kDropOld) ring_.release(position);
  for (auto& [block, bytes] : taken_aside_) aside_.give_back(block, bytes);
  taken_aside_.clear();
  copies_.clear();
  // Release: the consumers' work is seen by who reads the counts; see stats().
  delivered_.fetch_add(batch_.size(), std::memory_order_release);
  batch_.clear();
  current_.clear();
  std::deque<Retired> gone;
  {
    std::lock_guard lock(mutex_);
    in_delivery_ = false;
    settled_.store(position, std::memory_order_release);  // see retire()
    while (!retired_.empty() && retired_.front().position <= position && overflow_.empty()) {
      gone.push_back(std::move(retired_.front()));
      retired_.pop_front();
    }
  }
  done_.notify_all();
  // Sequentially consistent: after the release of the room; see wait_for_room().
  if (waiting_.load(std::memory_order_seq_cst) != 0) {
    std::lock_guard lock(mutex_);
    room_.notify_all();
  }
}

void Channel::serve_flushes() {
  std::uint64_t wanted = 0;
  std::vector<std::shared_ptr<Consumer>> all;
  {
    std::lock_guard lock(mutex_);
    if (flush_wanted_ == flush_served_ || next() < flush_target_ || !overflow_.empty()) return;
    wanted = flush_wanted_;
    all = consumers_;
  }
  for (const auto& consumer : all) {
    try {
      consumer->flush();
    } catch (const std::exception& error) {
      on_error_(*this, *consumer, error.what());
    }
  }
  std::lock_guard lock(mutex_);
  flush_served_ = wanted;
  done_.notify_all();
}

// Until there may be something to do. Short naps first, from which senders need not wake us: a
// wake-up costs them microseconds. Then sleep, from which they do.
void Channel::rest() {
  std::unique_lock lock(mutex_);
  if (closing_ || flush_wanted_ != flush_served_) {
    if (closing_ || next() < flush_target_) work_.wait_for(lock, std::chrono::microseconds(200));
    return;
  }
  bool sleep = idle_naps_++ >= kNapsBeforeSleep;
  // Sequentially consistent: before we look once more; see wake_consumer().
  rest_.store(sleep ? kAsleep : kNapping, std::memory_order_seq_cst);
  if (ring_.at(next()) == nullptr && overflow_.empty()) {
    if (sleep) {
      work_.wait(lock);
    } else {
      work_.wait_for(lock, kNap);
    }
  }
  rest_.store(kAwake, std::memory_order_relaxed);  // a notice more does no harm
  if (ring_.at(next()) != nullptr) {
    idle_naps_ = 0;
  } else {
    interrupted_.store(false, std::memory_order_relaxed);  // there is room again
  }
}

void Channel::finish() {
  std::vector<std::shared_ptr<Consumer>> all;
  {
    std::lock_guard lock(mutex_);
    all = consumers_;
  }
  for (const auto& consumer : all) {
    try {
      consumer->close();
    } catch (const std::exception& error) {
      on_error_(*this, *consumer, error.what());
    }
  }
  std::deque<Retired> gone;
  std::unordered_map<const Source*, std::shared_ptr<const Source>> sources;
  std::vector<std::shared_ptr<Consumer>> left;
  std::lock_guard lock(mutex_);
  gone.swap(retired_);
  sources.swap(sources_);
  left.swap(consumers_);
  finished_ = true;
  done_.notify_all();
}

void Channel::note_high_water() noexcept {
  auto now = static_cast<std::uint64_t>(ring_.used() + aside_.in_use());
  // Relaxed: only this thread writes it.
  if (now > high_water_.load(std::memory_order_relaxed)) {
    high_water_.store(now, std::memory_order_relaxed);
  }
}

}  // namespace callgate

// What a channel's own thread does: take records, serve flushes, rest. channel_delivery.cc calls
// the consumers.
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "channel/channel.h"
#include "core/thread_end.h"

namespace callgate {
namespace {

constexpr std::size_t kBatchRecords = 4096;
constexpr auto kNap = std::chrono::milliseconds(5);
constexpr int kNapsBeforeSleep = 20;

// Does what the thread can't go on without, as soon as there is memory for it. What the step does
// before it finds none does no harm when it is done again.
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

}  // namespace

void Channel::run() {
  thread_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);  // see on_own_thread()
  insist(
      [&] { pthread_setname_np(pthread_self(), ("cg:" + options_.name).substr(0, 15).c_str()); });
  deliver_inherited();
  for (;;) {
    bool some = deliver_some();
    report_no_memory();
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
  thread_id_.store({}, std::memory_order_relaxed);  // another thread may get the same
  end_thread();
}

void Channel::begin_delivery() {
  insist([&] {
    std::lock_guard lock(mutex_);
    in_delivery_ = true;
    current_ = consumers_;
  });
}

bool Channel::deliver_some() {
  // Relaxed: others move it only for kDropOld, where a late value costs one more round.
  std::uint64_t before = next_.load(std::memory_order_relaxed);
  begin_delivery();
  std::uint64_t position = collect();
  if (overflows()) collect_overflow(position);
  bool some = !batch_.empty() || position != before;
  if (!batch_.empty()) deliver();
  settle(position);
  return some;
}

// Takes what is there into the batch; returns the position after it.
std::uint64_t Channel::collect() {
  bool copies = options_.on_full == OnFull::kDropOld;
  // A batch that is copied takes memory besides the ring's, so it is smaller.
  std::size_t limit = ring_.capacity() / (copies ? 16 : 4);
  std::lock_guard lock(head_mutex_);
  if (copies) note_high_water();
  std::uint64_t first = next_.load(std::memory_order_relaxed);  // the mutex orders it
  std::uint64_t next = first;
  while (batch_.size() < kBatchRecords && has_place()) {
    Entry* entry = ring_.at(next);
    if (entry == nullptr) break;
    std::uint64_t after = Ring::after(*entry);
    if (after - first > limit && !batch_.empty()) break;
    if (entry->kind != Entry::Kind::kFiller) take(*entry);
    next = after;
  }
  // The oldest can only be dropped by others when we do not hold on to them.
  if (copies) ring_.release(next);
  next_.store(next, std::memory_order_relaxed);  // as above
  return next;
}

// Whether the batch takes one more record. Without memory what is in it goes first.
bool Channel::has_place() noexcept {
  auto grown = [](auto& places) {
    if (places.size() == places.capacity()) places.reserve(2 * places.capacity());
  };
  try {
    grown(batch_);
    grown(copies_);
    grown(taken_aside_);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// There is a place for it.
void Channel::take(Entry& entry) {
  batch_.push_back(entry.record);
  Record& record = batch_.back();
  std::size_t bytes = record.source->payload_bytes;
  if (entry.kind == Entry::Kind::kAside) {
    try {
      taken_aside_.push_back(
          std::make_shared<SideBlock>(aside_, const_cast<char*>(record.payload), bytes));
    } catch (const std::bad_alloc&) {
      give_back_aside(record);
      return drop_newest();
    }
  } else if (options_.on_full == OnFull::kDropOld) {
    // Counted as the ring's memory is that it leaves.
    try {
      copies_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    } catch (const std::bad_alloc&) {
      return drop_newest();
    }
    std::size_t written = record.source->kept ? record.source->written_bytes : bytes;
    std::memcpy(copies_.back().get(), record.payload, written);
    record.payload = copies_.back().get();
    aside_->hold(bytes);
    copied_bytes_ += bytes;
  }
}

// Of the batch, for which there is no memory. The head's mutex is held.
void Channel::drop_newest() noexcept {
  const Record record = batch_.back();
  batch_.pop_back();
  record.let_go();
  dropped_.fetch_add(1, std::memory_order_release);  // see stats()
  std::size_t none = 0;
  no_memory_.compare_exchange_strong(none, std::max<std::size_t>(record.source->payload_bytes, 2),
                                     std::memory_order_relaxed);  // see report_no_memory()
}

// What this thread sent while the ring was full, as far as it is its turn.
void Channel::collect_overflow(std::uint64_t position) {
  std::lock_guard lock(mutex_);
  while (!overflow_.empty() && overflow_.front().position <= position && has_place()) {
    batch_.push_back(overflow_.front().record);
    copies_.push_back(std::move(overflow_.front().payload));
    overflow_bytes_taken_ += batch_.back().source->payload_bytes;
    overflow_.pop_front();
    ++overflow_taken_;
  }
  // Relaxed: this thread's own. From here on it sends to the ring again, where nothing of what it
  // sent before is left.
  if (overflow_.empty()) overflowing_.store(false, std::memory_order_relaxed);
}

void Channel::deliver_inherited() {
  if (inherited_ == nullptr) return;
  Channel& other = *inherited_;
  begin_delivery();
  std::uint64_t next = other.next_.load(std::memory_order_relaxed);  // nobody else moves it
  while (Entry* entry = other.ring_.at(next)) {
    next = Ring::after(*entry);
    if (entry->kind != Entry::Kind::kFiller) insist([&] { batch_.push_back(entry->record); });
  }
  if (!batch_.empty()) deliver();
  for (const Record& record : batch_) record.let_go();
  // Release: as in settle().
  delivered_.fetch_add(batch_.size(), std::memory_order_release);
  batch_.clear();
  current_.clear();
  std::shared_ptr<Channel> done;  // ends without the mutex, and gives its memory back then
  std::lock_guard lock(mutex_);
  end_delivery();
  done.swap(inherited_);
}

// Everything before `position`, and what was taken besides, is done with.
void Channel::settle(std::uint64_t position) {
  for (const Record& record : batch_) record.let_go();
  give_room(position);
  copies_.clear();
  // Release: the consumers' work is seen by who reads the counts; see stats().
  delivered_.fetch_add(batch_.size(), std::memory_order_release);
  batch_.clear();
  current_.clear();
  for (std::shared_ptr<const Source> gone;; gone.reset()) {  // ends without the mutex
    std::lock_guard lock(mutex_);
    settled_ = {position, overflow_taken_};
    if (retired_.empty() || !settled_.covers(retired_.front().moment)) return end_delivery();
    gone = std::move(retired_.front().source);
    retired_.pop_front();
  }
}

void Channel::give_room(std::uint64_t position) {
  {
    std::lock_guard lock(head_mutex_);
    note_high_water();
    if (options_.on_full != OnFull::kDropOld) ring_.release(position);
    for (auto& block : taken_aside_) {
      if (block.use_count() == 1) {
        aside_->give_back(std::exchange(block->data, nullptr), block->bytes);
      } else {
        aside_->let_go(block->bytes);  // lent: the consumer's memory now
      }
    }
    if (copied_bytes_ != 0) aside_->let_go(std::exchange(copied_bytes_, 0));
    overflow_bytes_ -= std::exchange(overflow_bytes_taken_, 0);
  }
  taken_aside_.clear();
}

// Wakes who waits for the end of a delivery, or for room. The mutex is held.
void Channel::end_delivery() {
  in_delivery_ = false;
  ++deliveries_;
  done_.notify_all();
  // Relaxed: a sender counts itself and then looks for room under the mutex. It did so before we
  // got the mutex, which shows us its count; or it does so now, and sees the room.
  if (waiting_.load(std::memory_order_relaxed) != 0) room_.notify_all();
}

// The channel's, and those of sources. The mutex is held.
std::vector<std::shared_ptr<Consumer>> Channel::all_consumers() const {
  std::vector<std::shared_ptr<Consumer>> all;
  for (const auto& [key, source] : sources_) {
    if (source->consumer != nullptr) all.push_back(source->consumer);
  }
  std::ranges::sort(all);
  auto twice = std::ranges::unique(all);
  all.erase(twice.begin(), twice.end());
  all.insert(all.begin(), consumers_.begin(), consumers_.end());
  return all;
}

void Channel::serve_flushes() {
  std::uint64_t served = 0;
  insist([&] {
    std::lock_guard lock(mutex_);
    if (flushes_.empty() || !settled_.covers(flushes_.front().moment)) return;
    in_delivery_ = true;
    current_ = all_consumers();
    while (!flushes_.empty() && settled_.covers(flushes_.front().moment)) {
      served = flushes_.front().request;
      flushes_.pop_front();
    }
  });
  if (served == 0) return;
  report_no_memory();  // of what was sent before
  tell_current(&Consumer::flush);
  std::lock_guard lock(mutex_);
  flush_served_ = served;
  end_delivery();
}

// Until there may be something to do. Short naps first, from which senders need not wake us: a
// wake-up costs them microseconds. Then sleep, from which they do.
void Channel::rest() {
  std::unique_lock lock(mutex_);
  if (closing_ || no_memory_.load(std::memory_order_relaxed) > 1) return;  // see report_no_memory()
  if (!flushes_.empty()) {
    // If it is not due yet, a sender is about to publish.
    if (!settled_.covers(flushes_.front().moment)) {
      work_.wait_for(lock, std::chrono::microseconds(200));
    }
    return;
  }
  bool sleep = idle_naps_++ >= kNapsBeforeSleep;
  // Sequentially consistent: before we look once more; see wake_consumer().
  rest_.store(sleep ? kAsleep : kNapping, std::memory_order_seq_cst);
  if (ring_.at(next()) == nullptr && overflow_.empty()) {
    // There is room again. Now, not after the rest: senders may never leave us one to its end.
    interrupted_.store(false, std::memory_order_relaxed);
    if (sleep) {
      work_.wait(lock);
    } else {
      work_.wait_for(lock, kNap);
    }
  }
  rest_.store(kAwake, std::memory_order_relaxed);  // a notice more does no harm
  if (ring_.at(next()) != nullptr) idle_naps_ = 0;
}

void Channel::finish() {
  report_no_memory();
  auto gone = insist([] { return std::deque<Retired>(); });
  std::unordered_map<const Source*, std::shared_ptr<const Source>> sources;
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (consumers_.empty()) {
        gone.swap(retired_);
        sources.swap(sources_);
        finished_ = true;
        done_.notify_all();
        return;
      }
      current_.swap(consumers_);  // others may come meanwhile
      in_delivery_ = true;
    }
    tell_current(&Consumer::close);
    std::lock_guard lock(mutex_);
    end_delivery();
  }
}

// While all that leaves does so by this thread's hand, or under the head's mutex, which is held.
void Channel::note_high_water() noexcept {
  std::uint64_t now = ring_.used();  // before the rest, which only grows meanwhile
  now += aside_->in_use() + overflow_bytes_;
  // Relaxed: written under the mutex alone.
  if (now > high_water_.load(std::memory_order_relaxed)) {
    high_water_.store(now, std::memory_order_relaxed);
  }
}

}  // namespace callgate

// What a channel's own thread does: take records, call the consumers, serve flushes, rest.
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "channel/channel.h"
#include "core/thread_end.h"

namespace callgate {
namespace {

constexpr std::size_t kBatchRecords = 4096;
constexpr auto kNap = std::chrono::milliseconds(5);
constexpr int kNapsBeforeSleep = 20;

// Who is named where a channel has failed by itself.
class Itself final : public Consumer {
 public:
  void consume(std::span<const Record> /*records*/) override {}
  std::string description() const override { return "the sending"; }
};

// The large payloads of the batch that this thread delivers, while they may be lent.
thread_local const std::vector<std::shared_ptr<SideBlock>>* t_lender = nullptr;

}  // namespace

void Channel::run() {
  thread_id_.store(std::this_thread::get_id(), std::memory_order_relaxed);  // see on_own_thread()
  pthread_setname_np(pthread_self(), ("cg:" + options_.name).substr(0, 15).c_str());
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
  std::lock_guard lock(mutex_);
  in_delivery_ = true;
  current_ = consumers_;
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
  while (batch_.size() < kBatchRecords) {
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

void Channel::take(Entry& entry) {
  batch_.push_back(entry.record);
  Record& record = batch_.back();
  std::size_t bytes = record.source->payload_bytes;
  if (entry.kind == Entry::Kind::kAside) {
    taken_aside_.push_back(
        std::make_shared<SideBlock>(aside_, const_cast<char*>(record.payload), bytes));
  } else if (options_.on_full == OnFull::kDropOld) {
    // Counted as the ring's memory is that it leaves.
    try {
      copies_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    } catch (const std::bad_alloc&) {
      return drop_uncopied();
    }
    std::size_t written = record.source->kept ? record.source->written_bytes : bytes;
    std::memcpy(copies_.back().get(), record.payload, written);
    record.payload = copies_.back().get();
    aside_->hold(bytes);
    copied_bytes_ += bytes;
  }
}

// The batch's newest, for whose copy there is no memory. The head's mutex is held.
void Channel::drop_uncopied() noexcept {
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
  while (!overflow_.empty() && overflow_.front().position <= position) {
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
    if (entry->kind != Entry::Kind::kFiller) batch_.push_back(entry->record);
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

void Channel::deliver() noexcept {
  bool shared = std::ranges::any_of(
      batch_, [](const Record& record) { return record.source->consumer != nullptr; });
  for (std::size_t i = 0; i < current_.size(); ++i) {
    std::shared_ptr<Consumer> consumer = current_[i];  // remove() may take it out meanwhile
    if (consumer != nullptr)
      hand_over(*consumer, batch_, /*last=*/!shared && i + 1 == current_.size());
  }
  // Runs of records whose sources share a consumer of their own.
  std::span<const Record> rest(batch_);
  while (!rest.empty()) {
    Consumer* consumer = rest.front().source->consumer.get();
    auto end = std::ranges::find_if(
        rest, [&](const Record& record) { return record.source->consumer.get() != consumer; });
    auto count = static_cast<std::size_t>(end - rest.begin());
    if (consumer != nullptr) hand_over(*consumer, rest.first(count), /*last=*/true);
    rest = rest.subspan(count);
  }
}

void Channel::hand_over(Consumer& consumer, std::span<const Record> records, bool last) noexcept {
  t_lender = last ? &taken_aside_ : nullptr;
  const std::uint64_t lost = consumer.lost();
  tell(consumer, [&] {
    if (consumer.takes_device_arrays()) return consumer.consume(records);
    hand_over_host_arrays(consumer, records);
  });
  t_lender = nullptr;
  lost_.fetch_add(consumer.lost() - lost, std::memory_order_relaxed);  // this thread's; a gauge
}

// To a consumer that can't read a device: without the records of sources that are for those who
// can. Throws Error when there were any, after the others.
void Channel::hand_over_host_arrays(Consumer& consumer, std::span<const Record> records) {
  auto refused = [](const Record& record) { return record.source->on_device; };
  auto first = std::ranges::find_if(records, refused);
  if (first == records.end()) return consumer.consume(records);
  const std::string& name = first->source->name;
  while (!records.empty()) {
    auto end = std::ranges::find_if(records, refused);
    auto count = static_cast<std::size_t>(end - records.begin());
    if (count != 0) consumer.consume(records.first(count));
    records = records.subspan(count);
    while (!records.empty() && refused(records.front())) records = records.subspan(1);
  }
  throw Error(ErrorCode::kInvalidArgument, "channel '" + options_.name + "'",
              "consumers in Python, called for each record, of tap '" + name +
                  "', which has on_device=True",
              consumer.description());
}

std::shared_ptr<void> Channel::lend(const Record& record) noexcept {
  if (t_lender == nullptr) return nullptr;
  for (const auto& block : *t_lender)
    if (block->data == record.payload) return block;
  return nullptr;
}

// What one consumer throws is nobody else's business.
template <typename Action>
void Channel::tell(Consumer& consumer, Action&& action) noexcept {
  auto report = [&](const char* what) {
    try {
      on_error_(*this, consumer, what);
    } catch (...) {  // NOLINT(bugprone-empty-catch): nobody is left to be told
    }
  };
  try {
    action();
  } catch (const std::exception& error) {
    report(error.what());
  } catch (...) {
    report("an unknown C++ exception");
  }
}

// All that take part in a delivery, which they leave.
void Channel::tell_current(void (Consumer::*what)()) noexcept {
  std::shared_ptr<Consumer> consumer;  // held: as in deliver()
  for (const auto& each : current_) {
    consumer = each;
    if (consumer != nullptr) tell(*consumer, [&] { ((*consumer).*what)(); });
  }
  current_.clear();
}

// Once, for all that senders and this thread have found no memory for.
void Channel::report_no_memory() noexcept {
  // Relaxed: see note_no_memory().
  std::size_t bytes = no_memory_.load(std::memory_order_relaxed);
  if (bytes <= 1) return;
  no_memory_.store(1, std::memory_order_relaxed);
  Itself itself;
  tell(itself, [&] {
    throw Error(ErrorCode::kInternal, "channel '" + options_.name + "'",
                "memory for a record of " + std::to_string(bytes) + " bytes",
                "none from the system: it is dropped, as all will be that find none; stats() "
                "counts them");
  });
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
  std::deque<Retired> gone;  // ends without the mutex
  std::lock_guard lock(mutex_);
  settled_ = {position, overflow_taken_};
  while (!retired_.empty() && settled_.covers(retired_.front().moment)) {
    gone.push_back(std::move(retired_.front()));
    retired_.pop_front();
  }
  end_delivery();
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
  {
    std::lock_guard lock(mutex_);
    while (!flushes_.empty() && settled_.covers(flushes_.front().moment)) {
      served = flushes_.front().request;
      flushes_.pop_front();
    }
    if (served == 0) return;
    in_delivery_ = true;
    current_ = all_consumers();
  }
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
  std::deque<Retired> gone;
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

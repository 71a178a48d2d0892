// SPDX-License-Identifier: Apache-2.0
// The functions of owners, then of senders, on their threads. channel_thread.cc has those of the
// channel's thread.
#include "channel/channel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>

#include "channel/copy.h"

namespace callgate {
namespace {
constexpr auto kRecheck = std::chrono::milliseconds(20);  // between checks for interrupts
// A sender that has waited this long is not overtaken any more. Strict turns would cost a thread
// switch each.
constexpr auto kPatience = std::chrono::milliseconds(100);

// Writes a record's payload: the leaves, or the handle and the control leaves for arrays on a
// device.
void copy_payload(const Parcel& parcel, char* payload) noexcept {
  const Source& source = *parcel.sender.source;
  const LeafType* leaf = source.leaves.data();
  if (source.kept != nullptr) {
    std::memcpy(payload, &parcel.handle, sizeof(parcel.handle));
    leaf += source.value_leaves;
  }
  for (const ArrayView& view : parcel.leaves) {
    copy_leaf(payload + leaf->offset, view.data, leaf->nbytes);
    ++leaf;
  }
}

Record make_record(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns,
                   const char* payload) noexcept {
  const CallContext& context = parcel.context;
  const auto device = context.device;
  const auto shard = static_cast<std::uint32_t>(context.shard + 1);
  const std::uint32_t flags = parcel.sender.flags | shard << kShardBit;
  return {parcel.sender.source.get(), seq, time_ns, context.run, device, flags, payload};
}

// Release: a thread that reads the counter (see stats()) also sees that the counted records were
// sent.
void count_up(std::atomic<std::uint64_t>& counter, std::uint64_t count) noexcept {
  counter.fetch_add(count, std::memory_order_release);
}

}  // namespace

Channel::Channel(ChannelOptions options, OnError on_error)
    : options_(std::move(options)),
      on_error_(std::move(on_error)),
      store_(options_.capacity, /*copies=*/options_.on_full == OnFull::kDropOld) {
  any_.store(true, std::memory_order_relaxed);
}

Channel::~Channel() {
  drop_the_rest();
  if (!thread_.joinable()) return;
  if (abandoned() || thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Channel::add_all(std::vector<std::shared_ptr<Consumer>> consumers) {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  consumers_.reserve(consumers_.size() + consumers.size());
  if (!running_ && !closing_) {  // before they are added, since it may throw
    batch_.reserve();
    try {
      thread_ = std::thread([self = shared_from_this()] { self->run(); });
    } catch (const std::system_error& error) {
      throw Error(ErrorCode::kInternal, "channel '" + options_.name + "'", "a thread of its own",
                  error.code().message());
    }
    running_ = true;  // the thread begins by taking the mutex, and sees it
  }
  for (auto& consumer : consumers) consumers_.push_back(std::move(consumer));
  hurried_ = true;  // they take part in the next delivery
}

std::uint64_t Channel::request_removal(const std::shared_ptr<Consumer>& consumer) {
  if (abandoned()) return 0;  // no delivery, and the mutex may never be released
  std::lock_guard lock(mutex_);
  std::erase(consumers_, consumer);
  // In a consumer's call: a consumer that leaves now doesn't get the rest of the delivery.
  if (on_own_thread()) std::ranges::replace(current_, consumer, nullptr);
  hurried_ = true;
  return deliveries_;
}

bool Channel::removed(std::uint64_t delivery, Timeout timeout) {
  if (abandoned() || on_own_thread()) return true;
  std::unique_lock lock(mutex_);
  // Waits for the current delivery; on a busy channel the next one begins at once.
  return wait_done(lock, timeout, [&] { return !in_delivery_ || deliveries_ != delivery; });
}

void Channel::adopt(std::shared_ptr<Channel> other) {
  // Relaxed: no other thread counts, because the other's senders are gone and this channel has none
  // yet.
  sequence_.add(other->sequence_);
  dropped_.fetch_add(other->dropped_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  bytes_.fetch_add(other->bytes_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  // `other` keeps its sources until its records are delivered.
  inherited_ = std::move(other);
}

void Channel::retire(const Source& source) {
  if (abandoned()) return;             // the mutex may never be released
  std::shared_ptr<const Source> kept;  // may be the last reference: destroyed without the mutex
  std::lock_guard lock(mutex_);
  auto found = sources_.find(&source);
  if (found == sources_.end()) return;
  try {  // a record of it may be left
    if (!settled_.covers(moment())) line_.push_back({moment(), /*flush=*/0, found->second});
  } catch (const std::bad_alloc&) {
    return;  // it stays until the channel ends
  }
  work_.notify_one();  // senders may already have dropped the remaining records, without the thread
  kept = std::move(found->second);
  sources_.erase(found);
}

std::uint64_t Channel::request_flush() {
  if (abandoned() || on_own_thread()) return 0;
  std::lock_guard lock(mutex_);
  if (!running_ || finished_) return 0;
  line_.push_back({moment(), ++flush_wanted_, nullptr});
  work_.notify_one();
  return flush_wanted_;
}

bool Channel::flushed(std::uint64_t request, Timeout timeout) {
  if (on_own_thread()) return true;
  if (abandoned()) return false;
  std::unique_lock lock(mutex_);
  return wait_done(lock, timeout, [&] { return flush_served_ >= request || finished_; });
}

void Channel::refuse() noexcept {
  closed_.store(true, std::memory_order_seq_cst);  // see send()
  std::lock_guard lock(mutex_);
  room_.notify_all();
}

bool Channel::close(Timeout timeout) {
  if (abandoned()) {
    if (thread_.joinable()) thread_.detach();  // it doesn't exist in this process
    return false;
  }
  refuse();
  std::unique_lock lock(mutex_);
  while (senders_.load(std::memory_order_seq_cst) != 0) {  // see send()
    room_.notify_all();
    room_.wait_for(lock, std::chrono::milliseconds(1));
  }
  closing_ = true;
  work_.notify_one();
  if (running_ && on_own_thread()) return true;  // it ends when it returns to its loop
  if (!wait_done(lock, timeout, [&] { return finished_ || !running_; })) return false;
  std::thread ended = std::move(thread_);  // two threads may close at once
  lock.unlock();
  if (ended.joinable()) ended.join();
  drop_the_rest();
  return true;
}

// Drops all waiting records. There is no thread, or it has ended.
void Channel::drop_the_rest() noexcept {
  if (abandoned()) return;  // the mutex may never be released
  auto drop = [&](Store& store) {
    while (const std::optional<std::uint64_t> dropped = store.drop_oldest())
      count_up(dropped_, *dropped);
  };
  drop(store_);
  if (inherited_ != nullptr) drop(inherited_->store_);
}

ChannelStats Channel::stats() const noexcept {
  ChannelStats stats;
  // Reads the delivered before the sent, so `pending` is never negative. Acquire keeps the order.
  stats.delivered = delivered_.load(std::memory_order_acquire);
  stats.dropped = dropped_.load(std::memory_order_acquire);
  stats.sent = sequence_.sum();
  stats.pending = stats.sent - stats.delivered - stats.dropped;
  // Relaxed: gauges.
  stats.lost = lost_.load(std::memory_order_relaxed);
  stats.bytes = bytes_.load(std::memory_order_relaxed);
  // In a fork's child a lock may never be released.
  stats.high_water = store_.high_water(/*exactly=*/!abandoned());
  return stats;
}

bool Channel::send(const Parcel& parcel) noexcept {
  // Sequentially consistent, both: close() sets `closed_` and then waits for the visible senders.
  senders_.fetch_add(1, std::memory_order_seq_cst);
  const std::uint64_t seq = sequence_.next(parcel.context.device);
  const std::int64_t time_ns = wall_time_ns();
  const bool sent = !closed_.load(std::memory_order_seq_cst) && !abandoned() &&
                    passes_sampling(parcel.sender) && !parcel.lost && put(parcel, seq, time_ns);
  if (sent) {
    count_up(bytes_, parcel.sender.source->payload_bytes);
  } else {
    count_up(dropped_, 1);
  }
  senders_.fetch_sub(1, std::memory_order_release);  // close() sees the published records
  return sent;
}

bool Channel::put(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns) noexcept {
  // Records of the channel's own thread follow its earlier ones.
  if (overflow_.some() && on_own_thread()) return put_besides(parcel, seq, time_ns);
  const std::size_t bytes = parcel.sender.source->payload_bytes;
  const Store::Place place = reserve(parcel);
  // Relaxed: only this source's senders write it, and enrolling twice does no harm.
  if (Entry* entry = place.entry; entry != nullptr) {
    if (parcel.sender.enrolled.load(std::memory_order_relaxed) == id_ || enrol(parcel.sender)) {
      const bool is_kept = entry->kind == Entry::Kind::kKept;
      const bool large = is_kept || entry->kind == Entry::Kind::kAside;  // ours until published
      const auto* payload =
          is_kept ? static_cast<const char*>(parcel.leaves[0].data) : entry->record.payload;
      if (!is_kept) copy_payload(parcel, entry->record.data());
      entry->record = make_record(parcel, seq, time_ns, payload);
      store_.publish(*entry);
      // Sequentially consistent: after publish(), see rest(). This thread sees the sleeper, or the
      // sleeper sees the record.
      const int rest = rest_.load(std::memory_order_seq_cst);
      if (rest == kAsleep || (rest == kNapping && (large || store_.half_full()))) wake_thread();
      return true;
    }
    store_.give_up(*entry, bytes);
  } else if (!place.no_memory) {
    return options_.on_full == OnFull::kBlock && on_own_thread() &&
           put_besides(parcel, seq, time_ns);
  }
  note_no_memory(bytes);
  return false;
}

bool Channel::put_besides(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns) noexcept
    try {
  auto payload = std::make_unique_for_overwrite<char[]>(parcel.sender.source->payload_bytes);
  copy_payload(parcel, payload.get());
  const Record record = make_record(parcel, seq, time_ns, payload.get());
  if (!enrol(parcel.sender)) return false;
  overflow_.add(store_.tail(), record, std::move(payload));
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

bool Channel::passes_sampling(Sender& sender) const noexcept {
  if (options_.on_full != OnFull::kSample) return true;
  const std::int64_t now = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
  // Relaxed: exactly one of several senders wins the exchange, and that is all it decides.
  std::int64_t last = sender.last_passed.load(std::memory_order_relaxed);
  if (last != 0 && static_cast<double>(now - last) * options_.rate < 1e9) return false;
  return sender.last_passed.compare_exchange_strong(last, now, std::memory_order_relaxed);
}

Store::Place Channel::reserve(const Parcel& parcel) noexcept {
  for (;;) {
    if (Store::Place place = reserve_now(parcel); place.decided()) return place;
    if (options_.on_full == OnFull::kBlock && !on_own_thread()) return wait_for_room(parcel);
    if (options_.on_full != OnFull::kDropOld) return {};
    // Drops the oldest records until there is room, or until all remaining records are in delivery.
    const std::optional<std::uint64_t> dropped = store_.drop_oldest();
    if (!dropped) return {};
    count_up(dropped_, *dropped);
  }
}

// Stores the size of the first record without memory, for the channel's thread to report.
void Channel::note_no_memory(std::size_t bytes) noexcept {
  std::size_t none = 0;
  bytes = std::max<std::size_t>(bytes, 2);
  // Relaxed: the number is complete in itself, and the channel's thread may see it late.
  if (no_memory_.compare_exchange_strong(none, bytes, std::memory_order_relaxed) &&
      !on_own_thread())
    wake_thread();
}

// Waits until there is room, an interrupt comes, or the channel is closed.
Store::Place Channel::wait_for_room(const Parcel& parcel) noexcept {
  Store::Place place;
  bool starves = false;
  auto patience = Clock::now() + kPatience;
  waiting_.fetch_add(1, std::memory_order_seq_cst);  // before the check, so that room is announced
  // Relaxed: a late answer costs one more round.
  while (!interrupted_.load(std::memory_order_relaxed) && !closed()) {
    {
      std::unique_lock lock(mutex_);
      place = reserve_now(parcel, starves);
      if (place.decided()) break;
      work_.notify_one();
      room_.wait_for(lock, kRecheck);
    }
    place = reserve_now(parcel, starves);
    if (place.decided()) break;
    Interrupted check = interrupted_check_.load(std::memory_order_acquire);  // see set_interrupted
    if (check != nullptr && check()) {
      // Senders don't wait until the channel's thread has been idle. Relaxed: see above.
      interrupted_.store(true, std::memory_order_relaxed);
      std::lock_guard lock(mutex_);
      room_.notify_all();
      work_.notify_one();
    }
    if (!starves && Clock::now() > patience) {
      starves = true;
      starving_.fetch_add(1, std::memory_order_relaxed);  // see reserve_now()
    }
  }
  if (starves) starving_.fetch_sub(1, std::memory_order_relaxed);  // see reserve_now()
  waiting_.fetch_sub(1, std::memory_order_relaxed);  // one superfluous notification does no harm
  return place;
}

// Keeps the source as long as the channel has records of it. False if there is no memory.
bool Channel::enrol(Sender& sender) noexcept try {
  std::lock_guard lock(mutex_);
  sources_[sender.source.get()] = sender.source;
  sender.enrolled.store(id_, std::memory_order_relaxed);  // see send()
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

void Channel::wake_thread() noexcept {
  std::lock_guard lock(mutex_);
  rest_.store(kAwake, std::memory_order_relaxed);  // other senders need not notify
  work_.notify_one();
}

}  // namespace callgate

// Senders, then set-up and waiting; the channel's own thread is in channel_thread.cc.
#include "channel/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace callgate {
namespace {

constexpr auto kRecheck = std::chrono::milliseconds(20);

std::atomic<Channel::Interrupted> g_interrupted{nullptr};
std::atomic<bool> g_abandoned{false};

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Relaxed: each is a sum that nobody orders anything by, but for what `stats` says.
void count_up(std::atomic<std::uint64_t>& counter, std::uint64_t count) noexcept {
  counter.fetch_add(count, std::memory_order_relaxed);
}

std::uint64_t next_id() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);  // a number, no order
}

}  // namespace

void Channel::set_interrupted(Interrupted check) noexcept {
  g_interrupted.store(check, std::memory_order_release);  // whoever reads it may call it
}
void Channel::abandon_all() noexcept { g_abandoned.store(true, std::memory_order_relaxed); }
bool Channel::abandoned() noexcept {
  return g_abandoned.load(std::memory_order_relaxed);  // set while no other thread is there
}

Channel::Channel(ChannelOptions options, OnError on_error)
    : id_(next_id()),
      options_(std::move(options)),
      on_error_(std::move(on_error)),
      ring_(options_.capacity),
      aside_(options_.capacity) {}

Channel::~Channel() {
  if (!thread_.joinable()) return;
  if (abandoned() || thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

// -- senders -------------------------------------------------------------------------------------

bool Channel::send(const Parcel& parcel) noexcept {
  // Sequentially consistent, both: close() sets `closed_` and then waits for the senders it sees.
  senders_.fetch_add(1, std::memory_order_seq_cst);
  std::int64_t device = parcel.context.device;
  auto slot = static_cast<std::size_t>(std::clamp<std::int64_t>(device, 0, kDevices - 1));
  const Source& source = *parcel.sender.source;
  Record record;
  record.source = &source;
  record.seq = sequence_[slot].fetch_add(1, std::memory_order_relaxed);  // a number, no order
  record.time_ns = now_ns();
  record.run = parcel.context.run;
  record.device = static_cast<std::int32_t>(device);
  record.flags = parcel.sender.flags;
  bool sent = false;
  if (!closed_.load(std::memory_order_seq_cst) && !abandoned() && passes_sampling(parcel.sender)) {
    // Relaxed: only this source's senders write it, and enrolling twice does no harm.
    if (parcel.sender.enrolled.load(std::memory_order_relaxed) != id_) enrol(parcel.sender);
    if (Entry* entry = reserve(parcel)) {
      record.payload = entry->record.payload;
      entry->record = record;
      host_staging().copy(source, parcel.leaves, const_cast<char*>(record.payload));
      ring_.publish(*entry);
      wake_consumer();
      sent = true;
    } else if (options_.on_full == OnFull::kBlock && on_own_thread()) {
      sent = send_aside_of_ring(parcel, record);
    }
  }
  if (sent) {
    count_up(bytes_, source.payload_bytes);
  } else {
    count_up(dropped_, 1);
  }
  senders_.fetch_sub(1, std::memory_order_release);  // what was published is seen by close()
  return sent;
}

bool Channel::passes_sampling(Sender& sender) const noexcept {
  if (options_.on_full != OnFull::kSample) return true;
  auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                 std::chrono::steady_clock::now().time_since_epoch())
                 .count();
  // Relaxed: one sender of several wins the exchange, and that is all it decides.
  std::int64_t last = sender.last_passed.load(std::memory_order_relaxed);
  if (last != 0 && static_cast<double>(now - last) * options_.rate < 1e9) return false;
  return sender.last_passed.compare_exchange_strong(last, now, std::memory_order_relaxed);
}

Entry* Channel::reserve(const Parcel& parcel) noexcept {
  std::size_t payload = parcel.sender.source->payload_bytes;
  if (Entry* entry = reserve_now(payload)) return entry;
  if (options_.on_full == OnFull::kBlock) return wait_for_room(payload);
  if (options_.on_full == OnFull::kDropOld) return make_room(payload);
  return nullptr;
}

Entry* Channel::reserve_now(std::size_t payload) noexcept {
  if (payload > ring_.max_payload()) return reserve_aside(payload);
  std::size_t aside = aside_.in_use();
  if (aside != 0 && aside + ring_.used() + payload > ring_.capacity()) return nullptr;
  Entry* entry = ring_.reserve(payload);
  if (entry == nullptr) return nullptr;
  entry->record.payload = entry->inline_payload();
  return entry;
}

Entry* Channel::reserve_aside(std::size_t payload) noexcept {
  char* block = aside_.take(payload, ring_.used());
  if (block == nullptr) return nullptr;
  Entry* entry = ring_.reserve(0);
  if (entry == nullptr) {
    aside_.give_back(block, payload);
    return nullptr;
  }
  entry->kind = Entry::Kind::kAside;
  entry->record.payload = block;
  return entry;
}

// Until there is room, or an interrupt, or the channel is closed.
Entry* Channel::wait_for_room(std::size_t payload) noexcept {
  if (on_own_thread()) return nullptr;
  Entry* entry = nullptr;
  waiting_.fetch_add(1, std::memory_order_seq_cst);  // before we look, so that room is announced
  for (;;) {
    // Relaxed: a late answer costs one more round.
    if (interrupted_.load(std::memory_order_relaxed) || closed()) break;
    {
      std::unique_lock lock(mutex_);
      entry = reserve_now(payload);
      if (entry != nullptr) break;
      work_.notify_one();
      room_.wait_for(lock, kRecheck);
    }
    entry = reserve_now(payload);
    if (entry != nullptr) break;
    Interrupted check = g_interrupted.load(std::memory_order_acquire);  // see set_interrupted
    if (check != nullptr && check()) interrupted_.store(true, std::memory_order_relaxed);
  }
  waiting_.fetch_sub(1, std::memory_order_relaxed);  // an early notice more does no harm
  return entry;
}

// Drops the oldest records until there is room.
Entry* Channel::make_room(std::size_t payload) noexcept {
  for (;;) {
    if (Entry* entry = reserve_now(payload)) return entry;
    std::unique_lock lock(head_mutex_);
    // Relaxed: the mutex orders it.
    std::uint64_t next = next_.load(std::memory_order_relaxed);
    Entry* oldest = ring_.at(next);
    if (oldest == nullptr) {
      if (next == ring_.tail()) return nullptr;  // what fills the channel is in delivery
      lock.unlock();
      std::this_thread::yield();  // another sender is writing it
      continue;
    }
    if (oldest->kind != Entry::Kind::kFiller) count_up(dropped_, 1);
    if (oldest->kind == Entry::Kind::kAside) {
      aside_.give_back(const_cast<char*>(oldest->record.payload),
                       oldest->record.source->payload_bytes);
    }
    next = Ring::after(*oldest);
    next_.store(next, std::memory_order_relaxed);  // as above
    ring_.release(next);
  }
}

bool Channel::send_aside_of_ring(const Parcel& parcel, Record record) noexcept {
  try {
    const Source& source = *parcel.sender.source;
    Overflow one{record, std::make_unique<char[]>(source.payload_bytes)};
    one.record.payload = one.payload.get();
    host_staging().copy(source, parcel.leaves, one.payload.get());
    std::lock_guard lock(mutex_);
    overflow_.push_back(std::move(one));
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool Channel::on_own_thread() const noexcept {
  // Relaxed: only the thread itself ever finds itself there.
  return thread_id_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

void Channel::wake_consumer() noexcept {
  // Sequentially consistent: after publish(), see rest(). Either we see the sleeper, or it sees us.
  int rest = rest_.load(std::memory_order_seq_cst);
  if (rest == kAwake || (rest == kNapping && ring_.used() < ring_.capacity() / 2)) return;
  std::lock_guard lock(mutex_);
  rest_.store(kAwake, std::memory_order_relaxed);  // others need not notify, too
  work_.notify_one();
}

// -- set-up --------------------------------------------------------------------------------------

void Channel::add(std::shared_ptr<Consumer> consumer) {
  {
    std::lock_guard lock(mutex_);
    consumers_.push_back(std::move(consumer));
  }
  start();
}

void Channel::remove(const std::shared_ptr<Consumer>& consumer) {
  std::unique_lock lock(mutex_);
  std::erase(consumers_, consumer);
  if (!on_own_thread()) done_.wait(lock, [&] { return !in_delivery_; });
}

void Channel::start() {
  std::lock_guard lock(mutex_);
  if (running_ || closing_) return;
  running_ = true;
  thread_ = std::thread([self = shared_from_this()] { self->run(); });
}

void Channel::adopt(std::shared_ptr<Channel> other) {
  for (std::size_t i = 0; i < kDevices; ++i) {
    // Nobody else counts: the other's senders are gone, ours not there yet.
    count_up(sequence_[i], other->sequence_[i].load(std::memory_order_relaxed));
  }
  count_up(dropped_, other->dropped_.load(std::memory_order_relaxed));
  count_up(bytes_, other->bytes_.load(std::memory_order_relaxed));
  // `other` keeps its sources until its records are delivered.
  inherited_ = std::move(other);
}

void Channel::enrol(Sender& sender) {
  std::lock_guard lock(mutex_);
  sources_[sender.source.get()] = sender.source;
  sender.enrolled.store(id_, std::memory_order_relaxed);  // see send()
}

void Channel::retire(const Source& source) {
  std::shared_ptr<const Source> kept;  // may be the last reference: dropped after the lock
  std::lock_guard lock(mutex_);
  auto found = sources_.find(&source);
  if (found == sources_.end()) return;
  kept = std::move(found->second);
  sources_.erase(found);
  std::uint64_t tail = ring_.tail();
  // Acquire: pairs with settle(). Settled that far, no record of the source is left.
  bool settled = settled_.load(std::memory_order_acquire) >= tail && overflow_.empty();
  if (!settled || inherited_ != nullptr) retired_.push_back({tail, std::move(kept)});
}

bool Channel::flush(std::optional<Clock::duration> timeout) {
  if (on_own_thread()) return true;
  if (abandoned()) return false;
  std::unique_lock lock(mutex_);
  if (!running_ || finished_) return true;
  std::uint64_t ticket = ++flush_wanted_;
  flush_target_ = ring_.tail();
  work_.notify_one();
  auto served = [&] { return flush_served_ >= ticket || finished_; };
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
  while (senders_.load(std::memory_order_acquire) != 0) {
    std::unique_lock lock(mutex_);
    room_.notify_all();
    room_.wait_for(lock, std::chrono::milliseconds(1));
  }
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    work_.notify_one();
    if (!running_) return true;
    if (on_own_thread()) return true;  // it ends when it gets back to its loop
    auto ended = [&] { return finished_; };
    if (!timeout) {
      done_.wait(lock, ended);
    } else if (!done_.wait_for(lock, *timeout, ended)) {
      if (thread_.joinable()) thread_.detach();
      return false;
    }
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

ChannelStats Channel::stats() const noexcept {
  ChannelStats stats;
  // What leaves is read before what comes, so that `pending` is never negative. Acquire keeps the
  // reads in this order.
  stats.delivered = delivered_.load(std::memory_order_acquire);
  stats.dropped = dropped_.load(std::memory_order_acquire);
  for (const auto& count : sequence_) stats.sent += count.load(std::memory_order_acquire);
  stats.pending = stats.sent - stats.delivered - stats.dropped;
  stats.bytes = bytes_.load(std::memory_order_relaxed);  // gauges
  stats.high_water = high_water_.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace callgate

// What senders do, on their threads. Set-up and waiting are in channel_control.cc, the channel's
// own thread in channel_thread.cc.
#include "channel/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace callgate {
namespace {

constexpr auto kRecheck = std::chrono::milliseconds(20);
// After so long a sender that waits is not overtaken any more. Before, it may be: taking turns
// would cost a switch of threads a record.
constexpr auto kPatience = std::chrono::milliseconds(100);

// Above it a payload gets a block of its own, which can be lent to its consumer: copies of such a
// size often go to fresh memory, which costs more than the copy.
constexpr std::size_t kLargestInline = std::size_t{1} << 20;

std::atomic<Channel::Interrupted> g_interrupted{nullptr};
std::atomic<bool> g_abandoned{false};

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// The handle, at the start, and the control leaves.
void write_handle(const Parcel& parcel, char* payload) noexcept {
  const Source& source = *parcel.sender.source;
  std::memcpy(payload, &parcel.handle, sizeof(parcel.handle));
  for (std::size_t i = 0; i < parcel.leaves.size(); ++i) {
    const LeafType& leaf = source.leaves[source.value_leaves + i];
    if (leaf.nbytes != 0) std::memcpy(payload + leaf.offset, parcel.leaves[i].data, leaf.nbytes);
  }
}

void write(const Parcel& parcel, char* payload) noexcept {
  const Source& source = *parcel.sender.source;
  if (source.kept != nullptr) return write_handle(parcel, payload);
  host_staging().copy(source, parcel.leaves, payload);
}

// Release: who reads it (see stats()) also sees that what it counts was sent.
void count_up(std::atomic<std::uint64_t>& counter, std::uint64_t count) noexcept {
  counter.fetch_add(count, std::memory_order_release);
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
      aside_(std::make_shared<SideMemory>(options_.capacity)) {}

Channel::~Channel() {
  drop_the_rest();
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
  const Source& source = *parcel.sender.source;
  Record record;
  record.source = &source;
  record.seq = sequence_.next(device);
  record.time_ns = now_ns();
  record.run = parcel.context.run;
  record.device = static_cast<std::int32_t>(device);
  auto shard = static_cast<std::uint32_t>(parcel.context.shard + 1);
  record.flags = parcel.sender.flags | shard << kShardBit;
  bool sent = false;
  if (!closed_.load(std::memory_order_seq_cst) && !abandoned() && passes_sampling(parcel.sender)) {
    Place place = reserve(parcel);
    // Relaxed: only this source's senders write it, and enrolling twice does no harm.
    if (place.entry != nullptr && parcel.sender.enrolled.load(std::memory_order_relaxed) != id_ &&
        !enrol(parcel.sender)) {
      give_up(*place.entry, source);
      place = {nullptr, /*no_memory=*/true};
    }
    if (Entry* entry = place.entry) {
      record.payload = entry->record.payload;
      entry->record = record;
      write(parcel, const_cast<char*>(record.payload));
      ring_.publish(*entry);
      wake_consumer();
      sent = true;
    } else if (place.no_memory) {
      note_no_memory(source);
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

Channel::Place Channel::reserve(const Parcel& parcel) noexcept {
  std::size_t payload = parcel.sender.source->payload_bytes;
  if (overflows()) return {};
  if (Place place = reserve_now(payload); place.decided()) return place;
  if (options_.on_full == OnFull::kBlock) return wait_for_room(payload);
  if (options_.on_full == OnFull::kDropOld) return make_room(payload);
  return {};
}

Channel::Place Channel::reserve_now(std::size_t payload, bool starves) noexcept {
  // Relaxed: who is late to see it overtakes once more.
  if (starving_.load(std::memory_order_relaxed) != 0 && !starves) return {};
  if (payload > std::min(ring_.max_payload(), kLargestInline)) return reserve_aside(payload);
  std::size_t aside = aside_->claimed();
  if (aside != 0 && aside + ring_.used() + sizeof(Entry) + payload > ring_.capacity()) return {};
  Entry* entry = ring_.reserve(payload);
  if (entry == nullptr) return {};
  entry->record.payload = entry->inline_payload();
  return {entry};
}

Channel::Place Channel::reserve_aside(std::size_t payload) noexcept {
  SideMemory::Block block = aside_->take(payload, ring_);
  if (block.data == nullptr) return {nullptr, block.no_memory};
  Entry* entry = ring_.reserve(0);
  if (entry == nullptr) {
    aside_->give_back(block.data, payload);
    return {};
  }
  entry->kind = Entry::Kind::kAside;
  entry->record.payload = block.data;
  return {entry};
}

// A place that no record fills after all.
void Channel::give_up(Entry& entry, const Source& source) noexcept {
  if (entry.kind == Entry::Kind::kAside)
    aside_->give_back(const_cast<char*>(entry.record.payload), source.payload_bytes);
  entry.kind = Entry::Kind::kFiller;
  ring_.publish(entry);
}

// Others need not tell, too.
void Channel::note_no_memory(const Source& source) noexcept {
  std::size_t none = 0;
  // Relaxed: a number that says all; the channel's thread may be late to see it.
  if (!no_memory_.compare_exchange_strong(none, std::max<std::size_t>(source.payload_bytes, 2),
                                          std::memory_order_relaxed))
    return;
  std::lock_guard lock(mutex_);
  rest_.store(kAwake, std::memory_order_relaxed);  // as wake_consumer()
  work_.notify_one();
}

// Until there is room, or an interrupt, or the channel is closed.
Channel::Place Channel::wait_for_room(std::size_t payload) noexcept {
  if (on_own_thread()) return {};
  Place place;
  bool starves = false;
  auto patience = Clock::now() + kPatience;
  waiting_.fetch_add(1, std::memory_order_seq_cst);  // before we look, so that room is announced
  for (;;) {
    // Relaxed: a late answer costs one more round.
    if (interrupted_.load(std::memory_order_relaxed) || closed()) break;
    {
      std::unique_lock lock(mutex_);
      place = reserve_now(payload, starves);
      if (place.decided()) break;
      work_.notify_one();
      room_.wait_for(lock, kRecheck);
    }
    place = reserve_now(payload, starves);
    if (place.decided()) break;
    Interrupted check = g_interrupted.load(std::memory_order_acquire);  // see set_interrupted
    if (check != nullptr && check()) interrupt();
    if (!starves && Clock::now() > patience) {
      starves = true;
      starving_.fetch_add(1, std::memory_order_relaxed);  // see reserve_now()
    }
  }
  if (starves) starving_.fetch_sub(1, std::memory_order_relaxed);  // see reserve_now()
  waiting_.fetch_sub(1, std::memory_order_relaxed);  // an early notice more does no harm
  return place;
}

// Nobody waits for room any more until the channel's thread has found nothing to do.
void Channel::interrupt() noexcept {
  interrupted_.store(true, std::memory_order_relaxed);  // a late look costs a round more
  std::lock_guard lock(mutex_);
  room_.notify_all();
  work_.notify_one();
}

// Drops the oldest records until there is room.
Channel::Place Channel::make_room(std::size_t payload) noexcept {
  for (;;) {
    if (Place place = reserve_now(payload); place.decided()) return place;
    std::unique_lock lock(head_mutex_);
    // Relaxed: the mutex orders it.
    std::uint64_t next = next_.load(std::memory_order_relaxed);
    Entry* oldest = ring_.at(next);
    if (oldest == nullptr) {
      if (next == ring_.tail()) return {};  // what fills the channel is in delivery
      lock.unlock();
      std::this_thread::yield();  // another sender is writing it
      continue;
    }
    note_high_water();
    if (oldest->kind != Entry::Kind::kFiller) {
      oldest->record.let_go();
      count_up(dropped_, 1);
    }
    if (oldest->kind == Entry::Kind::kAside) give_back_aside(oldest->record);
    next = Ring::after(*oldest);
    next_.store(next, std::memory_order_relaxed);  // as above
    ring_.release(next);
  }
}

bool Channel::send_aside_of_ring(const Parcel& parcel, Record record) noexcept {
  try {
    const Source& source = *parcel.sender.source;
    Overflow one{0, record, std::make_unique_for_overwrite<char[]>(source.payload_bytes)};
    one.record.payload = one.payload.get();
    write(parcel, one.payload.get());
    if (!enrol(parcel.sender)) return false;
    std::lock_guard lock(mutex_);
    one.position = ring_.tail();
    overflow_.push_back(std::move(one));
    ++overflowed_;
    overflow_bytes_ += source.payload_bytes;
    overflowing_.store(true, std::memory_order_relaxed);  // for this thread alone
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool Channel::on_own_thread() const noexcept {
  // Relaxed: only the thread itself ever finds itself there.
  return thread_id_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

// Is this the channel's thread, and do records that it sent before still wait beside the ring?
bool Channel::overflows() const noexcept {
  return overflowing_.load(std::memory_order_relaxed) && on_own_thread();  // its own flag
}

// The source stays for as long as its records. False where there is no memory to note it.
bool Channel::enrol(Sender& sender) noexcept try {
  std::lock_guard lock(mutex_);
  sources_[sender.source.get()] = sender.source;
  sender.enrolled.store(id_, std::memory_order_relaxed);  // see send()
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

void Channel::give_back_aside(const Record& record) noexcept {
  aside_->give_back(const_cast<char*>(record.payload), record.source->payload_bytes);
}

void Channel::wake_consumer() noexcept {
  // Sequentially consistent: after publish(), see rest(). Either we see the sleeper, or it sees us.
  int rest = rest_.load(std::memory_order_seq_cst);
  if (rest == kAwake || (rest == kNapping && ring_.used() < ring_.capacity() / 2)) return;
  std::lock_guard lock(mutex_);
  rest_.store(kAwake, std::memory_order_relaxed);  // others need not notify, too
  work_.notify_one();
}

}  // namespace callgate

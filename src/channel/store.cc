// See the header.
#include "channel/store.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace callgate {
namespace {

constexpr std::size_t kLeastPlaces = 64;
constexpr std::size_t kBatchRecords = 4096;

#ifdef __SSE2__
// From this size on, stores pass by the caches: the memory they go to was used long ago, and to
// fetch it first would cost more than the copy.
constexpr std::size_t kLeastStreamed = 4096;

// `to` is aligned to 16 bytes.
void stream(char* to, const char* from, std::size_t bytes) noexcept {
  std::size_t whole = bytes / 64 * 64;
  for (std::size_t i = 0; i < whole; i += 64) {
    auto* target = reinterpret_cast<__m128i*>(to + i);
    auto* source = reinterpret_cast<const __m128i*>(from + i);
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + whole, from + whole, bytes - whole);
  _mm_sfence();  // such stores are not ordered by the atomics that publish them
}
#endif

char* payload_of(const Record& record) noexcept { return const_cast<char*>(record.payload); }

}  // namespace

// -- memory -------------------------------------------------------------------------------------

void copy_leaf(char* to, const void* from, std::size_t bytes) noexcept {
#ifdef __SSE2__
  if (bytes >= kLeastStreamed) return stream(to, static_cast<const char*>(from), bytes);
#endif
  if (bytes != 0) std::memcpy(to, from, bytes);
}

SideMemory::~SideMemory() {
  for (char* block : kept_) std::free(block);
}

bool SideMemory::claim(std::size_t bytes, const Ring& ring) noexcept {
  auto fits = [&](std::size_t before) {
    std::size_t in_use = before + ring.used();
    return in_use == 0 || in_use + bytes <= budget_;
  };
  if (!fits(claimed())) return false;
  // Claimed first, then looked at once more: a sender that comes to the ring from here on sees the
  // claim. One that is past its look may still take the room for its record besides.
  std::size_t before = claimed_.fetch_add(bytes, std::memory_order_seq_cst);  // see claimed()
  if (fits(before)) return true;
  claimed_.fetch_sub(bytes, std::memory_order_seq_cst);
  return false;
}

SideMemory::Block SideMemory::take(std::size_t bytes, const Ring& ring) noexcept {
  if (!claim(bytes, ring)) return {};
  std::vector<char*> useless;
  {
    std::lock_guard lock(mutex_);
    if (kept_bytes_ == bytes && !kept_.empty()) {
      char* block = kept_.back();
      kept_.pop_back();
      in_use_.fetch_add(bytes, std::memory_order_relaxed);  // a gauge
      return {block};
    }
    useless.swap(kept_);
  }
  for (char* other : useless) std::free(other);  // before more is taken: the budget is kept
  auto* block = static_cast<char*>(std::aligned_alloc(kRecordAlignment, align_record(bytes)));
  if (block != nullptr) {
    in_use_.fetch_add(bytes, std::memory_order_relaxed);  // a gauge
  } else {
    claimed_.fetch_sub(bytes, std::memory_order_seq_cst);  // see claimed()
  }
  return {block, /*no_memory=*/block == nullptr};
}

void SideMemory::give_back(char* block, std::size_t bytes) noexcept {
  keep(block, bytes, claimed() - bytes);
  let_go(bytes);
}

void SideMemory::recycle(char* block, std::size_t bytes) noexcept { keep(block, bytes, claimed()); }

// `claimed`: by others.
void SideMemory::keep(char* block, std::size_t bytes, std::size_t claimed) noexcept try {
  std::lock_guard lock(mutex_);
  if (kept_bytes_ != bytes) {
    for (char* other : kept_) std::free(other);
    kept_.clear();
    kept_bytes_ = bytes;
  }
  if (claimed + (kept_.size() + 1) * bytes <= budget_) {
    kept_.push_back(block);
  } else {
    std::free(block);
  }
} catch (const std::bad_alloc&) {
  std::free(block);
}

void SideMemory::hold(std::size_t bytes) noexcept {
  claimed_.fetch_add(bytes, std::memory_order_seq_cst);  // see claimed()
  in_use_.fetch_add(bytes, std::memory_order_relaxed);   // a gauge
}

void SideMemory::let_go(std::size_t bytes) noexcept {
  in_use_.fetch_sub(bytes, std::memory_order_relaxed);   // a gauge
  claimed_.fetch_sub(bytes, std::memory_order_seq_cst);  // see claimed()
}

// -- the batch -----------------------------------------------------------------------------------

void Batch::reserve() {
  records_.reserve(kLeastPlaces);
  copies_.reserve(kLeastPlaces);
  blocks_.reserve(kLeastPlaces);
}

bool Batch::has_place() noexcept {
  if (records_.size() >= kBatchRecords) return false;
  auto grown = [](auto& places) {
    if (places.size() == places.capacity()) places.reserve(2 * places.capacity());
  };
  try {
    grown(records_);
    grown(copies_);
    grown(blocks_);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool Batch::take(const Entry& entry, const std::shared_ptr<SideMemory>& aside, bool copies) noexcept
    try {
  Record record = entry.record;
  const Source& source = *record.source;
  if (entry.kind == Entry::Kind::kAside) {
    blocks_.push_back(std::make_shared<SideBlock>(aside, payload_of(record), source.payload_bytes));
  } else if (copies) {
    copies_.push_back(std::make_unique_for_overwrite<char[]>(source.payload_bytes));
    std::memcpy(copies_.back().get(), record.payload,
                source.kept ? source.written_bytes : source.payload_bytes);
    record.payload = copies_.back().get();
    aside->hold(source.payload_bytes);  // as the ring's memory that it leaves
    copied_bytes_ += source.payload_bytes;
  }
  records_.push_back(record);
  return true;
} catch (const std::bad_alloc&) {
  return false;
}

void Batch::take(Record record, std::unique_ptr<char[]> payload) {
  record.payload = payload.get();
  records_.push_back(record);
  copies_.push_back(std::move(payload));
  bytes_besides_ += record.source->payload_bytes;
}

std::shared_ptr<void> Batch::lend(const Record& record) const noexcept {
  auto found = std::ranges::find(blocks_, record.payload, [](auto& block) { return block->data; });
  return found == blocks_.end() ? nullptr : *found;
}

void Batch::give_back(SideMemory& aside) noexcept {
  for (auto& block : blocks_) {
    if (block.use_count() == 1) {
      aside.give_back(std::exchange(block->data, nullptr), block->bytes);
    } else {
      aside.let_go(block->bytes);  // lent: the consumer's memory now
    }
  }
  if (copied_bytes_ != 0) aside.let_go(std::exchange(copied_bytes_, 0));
}

void Batch::clear() noexcept {
  records_.clear();
  copies_.clear();
  blocks_.clear();
  bytes_besides_ = 0;
}

// -- besides the store ---------------------------------------------------------------------------

void Overflow::add(std::uint64_t position, Record record, std::unique_ptr<char[]> payload) {
  const std::size_t bytes = record.source->payload_bytes;
  waiting_.push_back({position, record, std::move(payload)});
  bytes_ += bytes;
  added_.fetch_add(1, std::memory_order_relaxed);
  some_.store(true, std::memory_order_relaxed);
}

void Overflow::collect(Batch& batch, std::uint64_t position) {
  while (!waiting_.empty() && waiting_.front().position <= position && batch.has_place()) {
    bytes_ -= waiting_.front().record.source->payload_bytes;
    batch.take(waiting_.front().record, std::move(waiting_.front().payload));
    waiting_.pop_front();
    ++taken_;
  }
  some_.store(!waiting_.empty(), std::memory_order_relaxed);
}

// -- senders -------------------------------------------------------------------------------------

Store::Place Store::reserve_aside(std::size_t payload) noexcept {
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

void Store::give_up(Entry& entry, std::size_t payload) noexcept {
  if (entry.kind == Entry::Kind::kAside) aside_->give_back(payload_of(entry.record), payload);
  entry.kind = Entry::Kind::kFiller;
  ring_.publish(entry);
}

// -- the head ------------------------------------------------------------------------------------

// Whether the entry held a record. The mutex is held.
bool Store::drop(Entry& entry) noexcept {
  if (entry.kind == Entry::Kind::kFiller) return false;
  const Record& record = entry.record;
  record.let_go();
  if (entry.kind == Entry::Kind::kAside)
    aside_->give_back(payload_of(record), record.source->payload_bytes);
  return true;
}

std::optional<std::uint64_t> Store::drop_oldest() noexcept {
  std::unique_lock lock(head_mutex_);
  Entry* oldest = ring_.at(next());
  if (oldest == nullptr) {
    if (all_collected()) return std::nullopt;
    lock.unlock();
    std::this_thread::yield();  // another sender is writing it
    return 0;
  }
  note_high_water(/*bytes_besides=*/0);
  const std::uint64_t after = Ring::after(*oldest);
  const bool dropped = drop(*oldest);
  next_.store(after, std::memory_order_relaxed);
  ring_.release(after);
  return dropped ? 1 : 0;
}

std::uint64_t Store::drop_all() noexcept {
  std::lock_guard lock(head_mutex_);
  std::uint64_t next = this->next(), dropped = 0;
  while (Entry* entry = ring_.at(next)) {
    next = Ring::after(*entry);
    dropped += drop(*entry) ? 1 : 0;
  }
  next_.store(next, std::memory_order_relaxed);
  ring_.release(next);
  return dropped;
}

Store::Collected Store::collect(Batch& batch) noexcept {
  // A batch that is copied takes memory besides the ring's, so it is smaller.
  const std::size_t limit = ring_.capacity() / (copies_ ? 16 : 4);
  std::lock_guard lock(head_mutex_);
  if (copies_) note_high_water(/*bytes_besides=*/0);
  const std::uint64_t first = next();
  Collected collected{.position = first};
  while (batch.has_place()) {
    Entry* entry = ring_.at(collected.position);
    if (entry == nullptr) break;
    const std::uint64_t after = Ring::after(*entry);
    if (after - first > limit && !batch.records().empty()) break;
    if (entry->kind != Entry::Kind::kFiller && !batch.take(*entry, aside_, copies_)) {
      if (collected.dropped++ == 0) collected.no_memory = entry->record.source->payload_bytes;
      drop(*entry);
    }
    collected.position = after;
  }
  collected.some = collected.position != first;
  if (copies_) ring_.release(collected.position);
  next_.store(collected.position, std::memory_order_relaxed);
  return collected;
}

void Store::settle(Batch& batch, std::uint64_t position, std::size_t bytes_besides) noexcept {
  std::lock_guard lock(head_mutex_);
  note_high_water(bytes_besides);
  if (!copies_) ring_.release(position);
  batch.give_back(*aside_);
}

std::uint64_t Store::high_water() const noexcept {
  std::lock_guard lock(head_mutex_);
  std::uint64_t waits = ring_.used();  // before the rest: while we hold the mutex, both only grow
  return std::max<std::uint64_t>(noted_high_water(), waits + aside_->in_use());
}

// While all that leaves does so by this thread's hand, or under the mutex, which is held.
void Store::note_high_water(std::size_t bytes_besides) noexcept {
  std::uint64_t now = ring_.used();  // before the rest, which only grows meanwhile
  now += aside_->in_use() + bytes_besides;
  if (now > noted_high_water()) high_water_.store(now, std::memory_order_relaxed);
}

}  // namespace callgate

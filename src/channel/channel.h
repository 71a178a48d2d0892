// SPDX-License-Identifier: Apache-2.0
// A channel: a bounded stream of records from programs to consumers.
//
// Programs send from any thread: they copy into the store and go on. One thread of the channel's
// own takes what is there and calls the consumers. A full store is a case for the channel's policy.
// At any time sent = delivered + dropped + pending.
//
// States, and who moves the channel on:
//
//           an owner:              an owner: close(),         the channel's thread, when all is
//           start(), add()         when no sender is inside   delivered and the consumers closed
//   made ------------------> running --------------> closing ---------------> finished
//     |
//     +-- an owner: close(), which drops what waits, for there is no thread to deliver it
//
// Senders' records are accepted until an owner calls refuse(), with which close() begins: from then
// on they are dropped at once, and senders that wait for room are woken.
//
// The channel's thread, while it is running:
//
//   awake ---> napping ---> asleep   by itself: nothing to do; nothing in several naps
//     ^           |           |      back: the nap is over; a flush or a close; a sender, which
//     +-----------+-----------+      lets it nap until the store is half full or a record is large
//
// A delivery hands a batch of records to the consumers in turns, so that a slow one holds nobody up
// for longer than a turn. While some are behind, the batch gets what has come meanwhile, for the
// others. A record is delivered when all have had it; the batch's places are free when all are
// through, so the slowest still bounds the channel.
//
// Lifetime of a source: a channel keeps every source that sent to it until `retire`, and then until
// the last record that was sent before; or until it ends.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel/consumer.h"
#include "channel/record.h"
#include "channel/store.h"
#include "core/call.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

enum class OnFull : std::uint8_t {
  kBlock,    // the sender waits
  kDropNew,  // the record that finds no room is dropped
  kDropOld,  // the oldest records make room
  kSample,   // at most `rate` records a second of each source pass; full: as kDropNew
};

struct ChannelOptions {
  std::string name;
  std::size_t capacity = std::size_t{64} << 20;
  OnFull on_full = OnFull::kBlock;
  double rate = 100.0;  // records a second, for kSample
};

struct ChannelStats {
  std::uint64_t sent = 0, delivered = 0, dropped = 0, pending = 0;
  std::uint64_t lost = 0;        // of the delivered, what consumers could not take (Consumer::lost)
  std::uint64_t bytes = 0;       // of payloads sent
  std::uint64_t high_water = 0;  // most bytes that waited at once
};

// State of a sender from one record to the next.
struct Sender {
  std::shared_ptr<const Source> source;
  std::uint32_t flags = 0;                   // RecordFlags
  std::atomic<std::int64_t> last_passed{0};  // when, in ns, for kSample
  std::atomic<std::uint64_t> enrolled{0};    // the id of the channel that keeps the source
};

// A record to send: a source's leaves, in memory that is valid during the call.
struct Parcel {
  Sender& sender;
  std::span<const ArrayView> leaves;
  CallContext context;
  std::uint64_t handle = 0;  // of KeptArrays; then `leaves` are the control leaves alone
  bool lost = false;         // there was no memory to bring the arrays here: it counts as dropped
  // Holds the leaves, which lie there as in a record: a large record keeps it and is not copied.
  const std::shared_ptr<void>* memory = nullptr;
};

class Channel : Immovable, public std::enable_shared_from_this<Channel> {
 public:
  using Clock = std::chrono::steady_clock;
  using Timeout = std::optional<Clock::duration>;  // none: waits for as long as it takes
  // Told of a consumer that threw: the consumer and what it said. On the channel's thread.
  using OnError = std::function<void(const Channel&, const Consumer&, const std::string&)>;
  // Asked now and then by a sender that waits: should it stop waiting?
  using Interrupted = bool (*)();

  Channel(ChannelOptions options, OnError on_error);
  ~Channel();

  const ChannelOptions& options() const noexcept { return options_; }

  // Sends a record; false when the policy dropped it. Never throws. Any thread.
  bool send(const Parcel& parcel) noexcept;

  // Consumers come and go at any time; the thread starts with the first, so those that are to get
  // the same records are added at once. `remove` returns when the consumer is not in use any more;
  // on the channel's own thread it takes effect at once, also for the caller.
  void add(std::shared_ptr<Consumer> consumer) { add_all({std::move(consumer)}); }
  void add_all(std::vector<std::shared_ptr<Consumer>> consumers);
  void remove(const std::shared_ptr<Consumer>& consumer) {
    removed(request_removal(consumer), std::nullopt);
  }

  // The same in two steps, for who waits in slices: false when the time ran out.
  std::uint64_t request_removal(const std::shared_ptr<Consumer>& consumer);
  bool removed(std::uint64_t delivery, Timeout timeout);

  // Starts the thread without a consumer of the channel's: sources have their own.
  void start() { add_all({}); }

  // Waits until all that was sent before has been taken and flushed by the consumers, also those of
  // sources that are not retired. False when the time ran out. On the channel's own thread: true.
  bool flush(Timeout timeout) { return flushed(request_flush(), timeout); }

  // The same in two steps, for who waits in slices; what is sent after the request does not count.
  std::uint64_t request_flush();
  bool flushed(std::uint64_t request, Timeout timeout);

  // No record is taken any more; delivers what is there, closes the consumers, joins the thread.
  // False when the time ran out: the thread then goes on, and ends with the consumer that holds it
  // up; close() again waits again. Without a thread, what is there is dropped.
  bool close(Timeout timeout);
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // Takes over the records that wait in `other`, which nobody sends to any more and which never had
  // a consumer, and counts them as its own. Before start().
  void adopt(std::shared_ptr<Channel> other);

  // The source sends no more.
  void retire(const Source& source);

  // First step of close(), for those who must go on in between: senders are refused and woken.
  void refuse() noexcept;

  ChannelStats stats() const noexcept;

  // For a consumer, in consume(): a large record's payload, to keep and to write to for as long as
  // it likes. Null for a record in the ring, or when others are still to read it.
  static std::shared_ptr<void> lend(const Record& record) noexcept;

  // The check that senders who wait for room make; for the whole process.
  static void set_interrupted(Interrupted check) noexcept {
    interrupted_check_.store(check, std::memory_order_release);  // whoever reads it may call it
  }

  // In a fork's child, which has no thread: every channel drops what is sent, and does not flush.
  // The child of a process without channels opens channels of its own.
  static void abandon_all() noexcept {
    if (any_.load(std::memory_order_relaxed)) abandoned_.store(true, std::memory_order_relaxed);
  }
  // True if this is some channel's thread: consumers run here.
  static bool on_thread_of_any() noexcept { return delivers_here_; }
  static bool abandoned() noexcept {
    return abandoned_.load(std::memory_order_relaxed);  // set while no other thread is there
  }

 private:
  // A moment in the stream: what was sent before it.
  struct Moment {
    std::uint64_t position = 0;    // of the store's tail
    std::uint64_t overflowed = 0;  // records that had not found room there
    bool covers(const Moment& other) const noexcept {
      return position >= other.position && overflowed >= other.overflowed;
    }
  };
  // A flush, or a retired source: it waits until all is delivered that was sent before.
  struct Waiting {
    Moment moment;
    std::uint64_t flush;  // 0 for a source
    std::shared_ptr<const Source> source;
  };

  // The records of a delivery.
  struct Delivery {
    std::optional<std::uint64_t> first;  // where it began in its store; none before
    std::uint64_t position = 0;          // of what follows
    bool some = false;
    bool has_own = false;     // consumers of its sources
    std::size_t counted = 0;  // as delivered, before its end
  };

  // Senders.
  bool put(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns) noexcept;
  bool put_besides(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns) noexcept;
  Store::Place reserve(const Parcel& parcel) noexcept;
  Store::Place reserve_now(const Parcel& parcel, bool starves = false) noexcept {
    // Relaxed: who is late to see it overtakes once more.
    if (starving_.load(std::memory_order_relaxed) != 0 && !starves) return {};
    return store_.reserve(parcel.sender.source->payload_bytes, parcel.memory);
  }
  Store::Place wait_for_room(const Parcel& parcel) noexcept;
  bool passes_sampling(Sender& sender) const noexcept;
  bool enrol(Sender& sender) noexcept;
  void note_no_memory(std::size_t bytes) noexcept;
  void wake_thread() noexcept;

  // Any thread.
  bool on_own_thread() const noexcept {
    // Relaxed: only the thread itself ever finds itself there.
    return thread_id_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  Moment moment() const noexcept { return {store_.tail(), overflow_.added()}; }
  // True if `done` says true before the time runs out. The lock is of the mutex.
  template <typename Done>
  bool wait_done(std::unique_lock<std::mutex>& lock, Timeout timeout, Done&& done) {
    if (timeout) return done_.wait_for(lock, *timeout, done);
    done_.wait(lock, done);
    return true;
  }
  void drop_the_rest() noexcept;

  // The channel's thread.
  void run();
  bool deliver_from(Store& store);
  void collect(Store& store, Delivery& delivery) noexcept;
  void deliver(Store& store, Delivery& delivery) noexcept;
  void count_delivered(Delivery& delivery) noexcept;
  bool take_turn(std::size_t index, const Delivery& delivery, bool alone) noexcept;
  bool has_turn(std::size_t index, const Delivery& delivery) const noexcept;
  bool may_grow() const noexcept;
  void hand_over(Consumer& consumer, std::span<const Record> records, bool last) noexcept;
  void hand_over_host_arrays(Consumer& consumer, std::span<const Record> records);
  template <typename Action>
  void tell(Consumer& consumer, Action&& action) noexcept;
  void tell_current(void (Consumer::*what)()) noexcept;
  std::vector<std::shared_ptr<Consumer>> all_consumers() const;
  void end_delivery();
  void serve_waiting();
  void report_no_memory() noexcept;
  bool rest();
  void finish();

  static inline std::atomic<Interrupted> interrupted_check_{nullptr};
  static inline std::atomic<bool> any_{false};  // there is a channel, or was
  static inline std::atomic<bool> abandoned_{false};

  const std::uint64_t id_ = next_id<Channel>();
  const ChannelOptions options_;
  const OnError on_error_;
  Store store_;
  std::shared_ptr<Channel> inherited_;  // until its records are delivered

  // The fields that senders write are on cache lines of their own.
  alignas(64) DeviceCounters sequence_;  // in sum: what was sent
  std::atomic<std::uint64_t> dropped_{0}, bytes_{0};
  std::atomic<int> senders_{0};  // that are inside send()
  alignas(64) std::atomic<std::uint64_t> delivered_{0}, lost_{0};

  // The channel's thread only.
  Batch batch_;
  std::vector<std::shared_ptr<Consumer>> current_;  // take part in the delivery; null: removed
  // How many records of the batch each of these has had; at the end, the sources' own consumers.
  std::vector<std::size_t> turns_;
  int idle_naps_ = 0;
  static inline thread_local bool delivers_here_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable work_, room_, done_;
  std::vector<std::shared_ptr<Consumer>> consumers_;
  std::unordered_map<const Source*, std::shared_ptr<const Source>> sources_;
  std::list<Waiting> line_;  // in order
  std::uint64_t flush_wanted_ = 0, flush_served_ = 0;
  Moment settled_;                // everything before it has been delivered or dropped
  std::uint64_t deliveries_ = 0;  // that ended
  bool in_delivery_ = false, running_ = false, closing_ = false, finished_ = false;
  bool hurried_ = false;  // somebody waits for the end of the delivery: it gets no more records
  std::thread thread_;

  std::atomic<std::thread::id> thread_id_;
  Overflow overflow_;  // the channel's thread only; senders see that it is empty
  // Bytes of the first record that found no memory; 0 before, and 1 once it has been reported.
  std::atomic<std::size_t> no_memory_{0};
  std::atomic<int> starving_{0};  // senders that others may not overtake
  std::atomic<int> waiting_{0};   // senders that wait for room
  std::atomic<bool> closed_{false};
  std::atomic<bool> interrupted_{false};  // no sender waits for room
  enum Rest : int { kAwake, kNapping, kAsleep };
  std::atomic<int> rest_{kAwake};
};

// One name's place: never destroyed, so that call sites may point to it. Channels come and go: a
// program that was compiled long ago sends to whatever channel is open under the name now. While
// none is, a small holding channel keeps the records for the next that opens.
class ChannelSlot {
 public:
  explicit ChannelSlot(std::string name)
      : name_(std::move(name)), channel_(holding_channel()), sending_to_(channel_.get()) {}

  bool send(const Parcel& parcel) noexcept {
    for (;;) {
      // Sequentially consistent, both: take_out() stores null and then looks who is inside.
      inside_.fetch_add(1, std::memory_order_seq_cst);
      Channel* channel = sending_to_.load(std::memory_order_seq_cst);
      bool sent = channel != nullptr && channel->send(parcel);
      inside_.fetch_sub(1, std::memory_order_release);  // our use of the channel is over
      if (channel != nullptr) return sent;
      // Not inside meanwhile, or take_out() might never end. Relaxed: the pointer is not used.
      while (sending_to_.load(std::memory_order_relaxed) == nullptr) {
        if (Channel::abandoned()) return false;  // who was to put one in is not in this process
        std::this_thread::yield();
      }
    }
  }

  void retire(const Source& source) {
    if (!Channel::abandoned()) current()->retire(source);  // else the mutex may be held for ever
  }

  // The channel that is open, else null.
  std::shared_ptr<Channel> open_channel() const;
  // The one that takes records now: the open one, or the one that holds them.
  std::shared_ptr<Channel> current() const {
    std::lock_guard lock(mutex_);
    return channel_;
  }

  // Puts `channel` in place; it takes over what was held, and goes on with its sequence numbers.
  // Not started yet. Throws Error when one is open.
  void open(std::shared_ptr<Channel> channel);

  // From now on records are held, and `channel` refuses them. It is still to be closed.
  void vacate(const Channel& channel);

 private:
  std::shared_ptr<Channel> holding_channel() const;

  // The mutex is held, in both. Returns the channel when nobody sends to it any more; senders wait
  // until the next is put in, which is not long: those who waited for room are sent away.
  std::shared_ptr<Channel> take_out();
  void put_in(std::shared_ptr<Channel> channel);

  std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Channel> channel_;
  bool is_open_ = false;
  // The channel that senders use; null for the moment between two. `inside_` counts its users.
  std::atomic<Channel*> sending_to_{nullptr};
  std::atomic<int> inside_{0};
};

class Channels {
 public:
  static Channels& instance() { return immortal<Channels>(); }

  ChannelSlot& slot(const std::string& name);

  // All channels that take records now, holding ones included.
  std::vector<std::shared_ptr<Channel>> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, ChannelSlot> slots_;  // their places stay
};

}  // namespace callgate

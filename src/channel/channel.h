// SPDX-License-Identifier: Apache-2.0
// A channel: a bounded stream of records from programs to consumers.
//
// Programs send from any thread: they copy into the store and continue. The channel's own thread
// takes the available records and calls the consumers. The channel's policy decides about a full
// store. At any time sent = delivered + dropped + pending.
//
// States, and the caller that moves the channel on:
//
//           an owner:              an owner: close(),         the channel's thread, when all is
//           start(), add()         when no sender is inside   delivered and the consumers closed
//   made ------------------> running --------------> closing ---------------> finished
//     |
//     +-- an owner: close(), which drops waiting records, since there is no thread to deliver them
//
// Senders' records are accepted until an owner calls refuse(), with which close() begins. Later
// records are dropped at once, and senders that wait for room are woken.
//
// The channel's thread, while it is running:
//
//   awake ---> napping ---> asleep   by itself: nothing to do; nothing in several naps
//     ^           |           |      back: the nap is over; a flush or a close; a sender, which
//     +-----------+-----------+      lets it nap until the store is half full or a record is large
//
// A delivery passes a batch of records to the consumers in turns, so a slow consumer delays the
// others by at most one turn. While some consumers are behind, new records join the batch for the
// others. A record is delivered when all consumers have had it. The batch's places are freed when
// all are done, so the slowest consumer still bounds the channel.
//
// Lifetime of a source: a channel keeps every source that sent to it until `retire`, and then until
// the last earlier record is delivered; or until the channel ends.
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
  kDropNew,  // a record without room is dropped
  kDropOld,  // the oldest records make room
  kSample,   // at most `rate` records per second of each source pass; a full store acts as kDropNew
};

struct ChannelOptions {
  std::string name;
  std::size_t capacity = std::size_t{64} << 20;
  OnFull on_full = OnFull::kBlock;
  double rate = 100.0;  // records per second, for kSample
};

struct ChannelStats {
  std::uint64_t sent = 0, delivered = 0, dropped = 0, pending = 0;
  std::uint64_t lost = 0;        // delivered records that consumers could not take (Consumer::lost)
  std::uint64_t bytes = 0;       // of all payloads sent
  std::uint64_t high_water = 0;  // the maximum number of bytes that waited at once
};

// A sender's state between records.
struct Sender {
  std::shared_ptr<const Source> source;
  std::uint32_t flags = 0;                   // RecordFlags
  std::atomic<std::int64_t> last_passed{0};  // the time in ns, for kSample
  std::atomic<std::uint64_t> enrolled{0};    // the id of the channel that keeps the source
};

// A record to send: a source's leaves, in memory that is valid during the call.
struct Parcel {
  Sender& sender;
  std::span<const ArrayView> leaves;
  CallContext context;
  std::uint64_t handle = 0;  // of KeptArrays; then `leaves` are only the control leaves
  bool lost = false;         // no memory to bring the arrays to the host: counts as dropped
  // The owner of the leaves if they are laid out as in a record: a large record keeps it, uncopied.
  const std::shared_ptr<void>* memory = nullptr;
};

class Channel : Immovable, public std::enable_shared_from_this<Channel> {
 public:
  using Clock = std::chrono::steady_clock;
  using Timeout = std::optional<Clock::duration>;  // empty: waits without a limit
  // Called on the channel's thread for a consumer that threw, with its message.
  using OnError = std::function<void(const Channel&, const Consumer&, const std::string&)>;
  // Called now and then by a waiting sender: true if it should stop waiting.
  using Interrupted = bool (*)();

  Channel(ChannelOptions options, OnError on_error);
  ~Channel();

  const ChannelOptions& options() const noexcept { return options_; }

  // Sends a record; false if the policy dropped it. Never throws. Thread-safe.
  bool send(const Parcel& parcel) noexcept;

  // Consumers may join and leave at any time. The thread starts with the first, so consumers that
  // must get the same records are added at once. `remove` returns when the consumer is no longer in
  // use; on the channel's own thread it takes effect at once, also for the caller.
  void add(std::shared_ptr<Consumer> consumer) { add_all({std::move(consumer)}); }
  void add_all(std::vector<std::shared_ptr<Consumer>> consumers);
  void remove(const std::shared_ptr<Consumer>& consumer) {
    removed(request_removal(consumer), std::nullopt);
  }

  // The same in two steps, for callers that wait in slices: false if the time ran out.
  std::uint64_t request_removal(const std::shared_ptr<Consumer>& consumer);
  bool removed(std::uint64_t delivery, Timeout timeout);

  // Starts the thread without a consumer of the channel, because sources have their own.
  void start() { add_all({}); }

  // Waits until the consumers, including those of sources that are not retired, have taken and
  // flushed all earlier records. False if the time ran out. True on the channel's own thread.
  bool flush(Timeout timeout) { return flushed(request_flush(), timeout); }

  // The same in two steps, for callers that wait in slices; records after the request don't count.
  std::uint64_t request_flush();
  bool flushed(std::uint64_t request, Timeout timeout);

  // Accepts no more records, delivers the waiting ones, closes the consumers and joins the thread.
  // False if the time ran out: the thread then continues, and ends when the blocking consumer
  // returns; calling close() again waits again. Without a thread, waiting records are dropped.
  bool close(Timeout timeout);
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // Takes over the records that wait in `other` and counts them as its own. `other` has no senders
  // any more, and never had a consumer. Called before start().
  void adopt(std::shared_ptr<Channel> other);

  // The source sends no more.
  void retire(const Source& source);

  // The first step of close(), for callers with work in between: senders are refused and woken.
  void refuse() noexcept;

  ChannelStats stats() const noexcept;

  // For a consumer, in consume(): a large record's payload, to keep and write to for any time. Null
  // for a record in the ring, or if other consumers must still read it.
  static std::shared_ptr<void> lend(const Record& record) noexcept;

  // The check of senders that wait for room, for the whole process.
  static void set_interrupted(Interrupted check) noexcept {
    interrupted_check_.store(check, std::memory_order_release);  // readers may call the function
  }

  // In a fork's child, which has no thread: every channel drops its records and doesn't flush. The
  // child of a process without channels can open its own.
  static void abandon_all() noexcept {
    if (any_.load(std::memory_order_relaxed)) abandoned_.store(true, std::memory_order_relaxed);
  }
  // True if this is a channel's thread, which runs consumers.
  static bool on_thread_of_any() noexcept { return delivers_here_; }
  static bool abandoned() noexcept {
    return abandoned_.load(std::memory_order_relaxed);  // set while no other thread exists
  }

 private:
  // A moment in the stream, given by the records sent before it.
  struct Moment {
    std::uint64_t position = 0;    // of the store's tail
    std::uint64_t overflowed = 0;  // records for which the store had no room
    bool covers(const Moment& other) const noexcept {
      return position >= other.position && overflowed >= other.overflowed;
    }
  };
  // A flush, or a retired source: it waits for the delivery of all earlier records.
  struct Waiting {
    Moment moment;
    std::uint64_t flush;  // 0 for a source
    std::shared_ptr<const Source> source;
  };

  // The records of a delivery.
  struct Delivery {
    std::optional<std::uint64_t> first;  // the first position in its store; empty if none
    std::uint64_t position = 0;          // the position behind it
    bool some = false;
    bool has_own = false;     // sources have consumers of their own
    std::size_t counted = 0;  // counted as delivered before its end
  };

  // The senders' functions.
  bool put(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns) noexcept;
  bool put_besides(const Parcel& parcel, std::uint64_t seq, std::int64_t time_ns) noexcept;
  Store::Place reserve(const Parcel& parcel) noexcept;
  Store::Place reserve_now(const Parcel& parcel, bool starves = false) noexcept {
    // Relaxed: a sender that sees it late overtakes once more.
    if (starving_.load(std::memory_order_relaxed) != 0 && !starves) return {};
    return store_.reserve(parcel.sender.source->payload_bytes, parcel.memory);
  }
  Store::Place wait_for_room(const Parcel& parcel) noexcept;
  bool passes_sampling(Sender& sender) const noexcept;
  bool enrol(Sender& sender) noexcept;
  void note_no_memory(std::size_t bytes) noexcept;
  void wake_thread() noexcept;

  // Any thread's functions.
  bool on_own_thread() const noexcept {
    // Relaxed: only the thread itself can find its own id here.
    return thread_id_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  Moment moment() const noexcept { return {store_.tail(), overflow_.added()}; }
  // True if `done` returns true before the time runs out. `lock` holds the mutex.
  template <typename Done>
  bool wait_done(std::unique_lock<std::mutex>& lock, Timeout timeout, Done&& done) {
    if (timeout) return done_.wait_for(lock, *timeout, done);
    done_.wait(lock, done);
    return true;
  }
  void drop_the_rest() noexcept;

  // The channel's thread's functions.
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
  static inline std::atomic<bool> any_{false};  // a channel exists or existed
  static inline std::atomic<bool> abandoned_{false};

  const std::uint64_t id_ = next_id<Channel>();
  const ChannelOptions options_;
  const OnError on_error_;
  Store store_;
  std::shared_ptr<Channel> inherited_;  // until its records are delivered

  // The fields that senders write are on cache lines of their own.
  alignas(64) DeviceCounters sequence_;  // the sum is the number of records sent
  std::atomic<std::uint64_t> dropped_{0}, bytes_{0};
  std::atomic<int> senders_{0};  // senders inside send()
  alignas(64) std::atomic<std::uint64_t> delivered_{0}, lost_{0};

  // Only the channel's thread uses these.
  Batch batch_;
  std::vector<std::shared_ptr<Consumer>> current_;  // in the current delivery; null if removed
  // The number of records of the batch that each consumer has had; the last is for the sources' own
  // consumers.
  std::vector<std::size_t> turns_;
  int idle_naps_ = 0;
  static inline thread_local bool delivers_here_ = false;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable work_, room_, done_;
  std::vector<std::shared_ptr<Consumer>> consumers_;
  std::unordered_map<const Source*, std::shared_ptr<const Source>> sources_;
  std::list<Waiting> line_;  // in order
  std::uint64_t flush_wanted_ = 0, flush_served_ = 0;
  Moment settled_;                // all earlier records have been delivered or dropped
  std::uint64_t deliveries_ = 0;  // completed deliveries
  bool in_delivery_ = false, running_ = false, closing_ = false, finished_ = false;
  bool hurried_ = false;  // a caller waits for the end of the delivery, which gets no more records
  std::thread thread_;

  std::atomic<std::thread::id> thread_id_;
  Overflow overflow_;  // used by the channel's thread; senders see that it is empty
  // The size of the first record without memory; 0 before, and 1 after its report.
  std::atomic<std::size_t> no_memory_{0};
  std::atomic<int> starving_{0};  // senders that others may not overtake
  std::atomic<int> waiting_{0};   // senders that wait for room
  std::atomic<bool> closed_{false};
  std::atomic<bool> interrupted_{false};  // no sender waits for room
  enum Rest : int { kAwake, kNapping, kAsleep };
  std::atomic<int> rest_{kAwake};
};

// The place of a name: never destroyed, so call sites may point to it. Channels come and go: an old
// compiled program sends to the channel that is currently open under the name. While none is open,
// a small holding channel keeps records for the next one.
class ChannelSlot {
 public:
  explicit ChannelSlot(std::string name)
      : name_(std::move(name)), channel_(holding_channel()), sending_to_(channel_.get()) {}

  bool send(const Parcel& parcel) noexcept {
    for (;;) {
      // Sequentially consistent, both: take_out() stores null and then checks for senders inside.
      inside_.fetch_add(1, std::memory_order_seq_cst);
      Channel* channel = sending_to_.load(std::memory_order_seq_cst);
      bool sent = channel != nullptr && channel->send(parcel);
      inside_.fetch_sub(1, std::memory_order_release);  // this use of the channel is over
      if (channel != nullptr) return sent;
      // Not inside meanwhile, or take_out() might never end. Relaxed: the pointer is not used.
      while (sending_to_.load(std::memory_order_relaxed) == nullptr) {
        if (Channel::abandoned()) return false;  // this process has no thread to insert one
        std::this_thread::yield();
      }
    }
  }

  void retire(const Source& source) {
    if (!Channel::abandoned()) current()->retire(source);  // the mutex may never be released
  }

  // The open channel, or null.
  std::shared_ptr<Channel> open_channel() const;
  // The channel that accepts records now: the open one or the holding one.
  std::shared_ptr<Channel> current() const {
    std::lock_guard lock(mutex_);
    return channel_;
  }

  // Inserts `channel`, which takes over the held records and their sequence numbers. It is not
  // started yet. Throws Error if another channel is open.
  void open(std::shared_ptr<Channel> channel);

  // From now on records are held, and `channel` refuses them. The caller still closes it.
  void vacate(const Channel& channel);

 private:
  std::shared_ptr<Channel> holding_channel() const;

  // The mutex is held in both. Returns the channel when it has no more senders. New senders wait
  // briefly until the next channel is inserted; senders that waited for room are turned away.
  std::shared_ptr<Channel> take_out();
  void put_in(std::shared_ptr<Channel> channel);

  std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Channel> channel_;
  bool is_open_ = false;
  // The channel that senders use; null between two channels. `inside_` counts its users.
  std::atomic<Channel*> sending_to_{nullptr};
  std::atomic<int> inside_{0};
};

class Channels {
 public:
  static Channels& instance() { return immortal<Channels>(); }

  ChannelSlot& slot(const std::string& name);

  // All channels that accept records now, including holding ones.
  std::vector<std::shared_ptr<Channel>> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, ChannelSlot> slots_;  // slots are never removed
};

}  // namespace callgate

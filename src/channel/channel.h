// A channel: a bounded stream of records from programs to consumers.
//
// Programs send from any thread: they copy into the ring and go on. One thread of the channel's own
// takes what is there and calls the consumers. What happens when the ring is full is the channel's
// policy. At any time sent = delivered + dropped + pending.
//
// Lifetime of a source: a channel keeps every source that sent to it until `retire`, and then until
// the last record that was sent before; or until it ends.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "channel/consumer.h"
#include "channel/device_counters.h"
#include "channel/record.h"
#include "channel/ring.h"
#include "channel/staging.h"
#include "core/call.h"

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

// What a sender keeps from one record to the next.
struct Sender {
  std::shared_ptr<const Source> source;
  std::uint32_t flags = 0;                   // RecordFlags
  std::atomic<std::int64_t> last_passed{0};  // when, in ns, for kSample
  std::atomic<std::uint64_t> enrolled{0};    // the id of the channel that keeps the source
};

// What is sent: a source's leaves, in memory that is valid during the call.
struct Parcel {
  Sender& sender;
  std::span<const ArrayView> leaves;
  CallContext context;
  std::uint64_t handle = 0;  // of KeptArrays; then `leaves` are the control leaves alone
};

class Channel : public std::enable_shared_from_this<Channel> {
 public:
  using Clock = std::chrono::steady_clock;
  // Told of a consumer that threw: the consumer and what it said. On the channel's thread.
  using OnError = std::function<void(const Channel&, const Consumer&, const std::string&)>;
  // Asked now and then by a sender that waits: should it stop waiting?
  using Interrupted = bool (*)();

  Channel(ChannelOptions options, OnError on_error);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  const ChannelOptions& options() const noexcept { return options_; }

  // Sends a record; false when the policy dropped it. Never throws. Any thread.
  bool send(const Parcel& parcel) noexcept;

  // Consumers come and go at any time; the channel's thread starts with the first, so those that
  // are to get the same records are added at once. `remove` returns when the consumer is not in use
  // any more; called by a consumer, on the channel's thread, it takes effect at once, also for
  // the caller.
  void add(std::shared_ptr<Consumer> consumer) { add_all({std::move(consumer)}); }
  void add_all(std::vector<std::shared_ptr<Consumer>> consumers);
  void remove(const std::shared_ptr<Consumer>& consumer);

  // The same in two steps, for who waits in slices: false when the time ran out.
  std::uint64_t request_removal(const std::shared_ptr<Consumer>& consumer);
  bool removed(std::uint64_t delivery, Clock::duration timeout);

  // Starts the thread without a consumer of the channel's: sources have their own.
  void start();

  // Waits until all that was sent before is with the consumers, and has been flushed by them:
  // the channel's, and those of sources that are not retired. False when the time ran out. On the
  // channel's own thread: true at once.
  bool flush(std::optional<Clock::duration> timeout) { return flushed(request_flush(), timeout); }

  // The same in two steps, for who waits in slices: what is sent after the request is not waited
  // for, however long the wait.
  std::uint64_t request_flush();
  bool flushed(std::uint64_t request, std::optional<Clock::duration> timeout);

  // No record is taken any more (senders' are counted as dropped); delivers what is there, closes
  // the consumers, joins the thread. False when the time ran out: the thread then goes on, and ends
  // with the consumer that holds it up; close() again waits again. Without a thread, what is there
  // is dropped.
  bool close(std::optional<Clock::duration> timeout);
  bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // Takes over the records that wait in `other`, which nobody sends to any more and which never had
  // a consumer, and counts them as its own. Before start().
  void adopt(std::shared_ptr<Channel> other);

  // The source sends no more.
  void retire(const Source& source);

  // First step of close(), for those who must go on in between: senders are refused and woken.
  void refuse() noexcept;

  ChannelStats stats() const noexcept;

  // For a consumer, in consume(): shares the memory of a large record's payload with it, to keep
  // and to write to for as long as it likes. Null for a record in the ring, or when others are
  // still to read it.
  static std::shared_ptr<void> lend(const Record& record) noexcept;

  // The check that senders who wait for room make; for the whole process.
  static void set_interrupted(Interrupted check) noexcept;

  // In a fork's child, which has no thread to deliver: from now on every channel of the process
  // drops what is sent and refuses to flush.
  static void abandon_all() noexcept;
  static bool abandoned() noexcept;

 private:
  // A moment in the stream: what was sent before it.
  struct Moment {
    std::uint64_t position = 0;    // of the ring's tail
    std::uint64_t overflowed = 0;  // records that had not found room there
    bool covers(const Moment& other) const noexcept {
      return position >= other.position && overflowed >= other.overflowed;
    }
  };
  struct Retired {
    Moment moment;
    std::shared_ptr<const Source> source;
  };
  struct Flush {
    std::uint64_t request;
    Moment moment;
  };
  // A record that the channel's own thread sent into a full ring: waiting would be for itself. It
  // follows what was in the ring then, and everything that the thread sends goes here until this
  // has been taken. Counted in high_water, but not bounded.
  struct Overflow {
    std::uint64_t position;
    Record record;
    std::unique_ptr<char[]> payload;
  };

  // Of a batch, that the channel's thread has from its start: with less it could not go on where
  // there is no memory.
  static constexpr std::size_t kLeastPlaces = 64;

  // Senders.
  struct Place {
    Entry* entry = nullptr;
    bool no_memory = false;  // none for the payload: there never will be, for all we know
    bool decided() const noexcept { return entry != nullptr || no_memory; }
  };
  Place reserve(const Parcel& parcel) noexcept;
  Place reserve_now(std::size_t payload, bool starves = false) noexcept;
  Place reserve_aside(std::size_t payload) noexcept;
  Place wait_for_room(std::size_t payload) noexcept;
  Place make_room(std::size_t payload) noexcept;
  void give_up(Entry& entry, const Source& source) noexcept;
  void note_no_memory(const Source& source) noexcept;
  void interrupt() noexcept;
  bool send_aside_of_ring(const Parcel& parcel, Record record) noexcept;
  bool passes_sampling(Sender& sender) const noexcept;
  bool enrol(Sender& sender) noexcept;
  bool overflows() const noexcept;
  void wake_consumer() noexcept;
  bool on_own_thread() const noexcept;
  void start_locked();
  Moment moment() const noexcept { return {ring_.tail(), overflowed_}; }  // under the mutex

  // Both.
  void give_back_aside(const Record& record) noexcept;
  void note_high_water() noexcept;
  void drop_the_rest() noexcept;

  // The channel's thread.
  void run();
  void begin_delivery();
  bool deliver_some();
  std::uint64_t next() const noexcept {
    return next_.load(std::memory_order_relaxed);  // late for kDropOld alone: one more round
  }
  std::uint64_t collect();
  bool has_place() noexcept;
  void take(Entry& entry);
  void drop_newest() noexcept;
  void collect_overflow(std::uint64_t position);
  void deliver_inherited();
  void deliver() noexcept;
  void hand_over(Consumer& consumer, std::span<const Record> records, bool last) noexcept;
  void hand_over_host_arrays(Consumer& consumer, std::span<const Record> records);
  void settle(std::uint64_t position);
  void give_room(std::uint64_t position);
  void end_delivery();
  template <typename Action>
  void tell(Consumer& consumer, Action&& action) noexcept;
  void tell_current(void (Consumer::*what)()) noexcept;
  std::vector<std::shared_ptr<Consumer>> all_consumers() const;
  void serve_flushes();
  void report_no_memory() noexcept;
  void rest();
  void finish();

  std::uint64_t id_;  // unique in the process, from 1
  ChannelOptions options_;
  OnError on_error_;
  Ring ring_;
  std::shared_ptr<SideMemory> aside_;
  std::shared_ptr<Channel> inherited_;

  // What senders write is on cache lines of their own.
  alignas(64) DeviceCounters sequence_;  // in sum: what was sent
  std::atomic<std::uint64_t> dropped_{0}, bytes_{0};
  std::atomic<int> senders_{0};
  alignas(64) std::atomic<std::uint64_t> delivered_{0}, high_water_{0}, lost_{0};

  // Held while entries are taken from the head and while room is given back: by the consumer, and
  // by senders that drop the oldest. Never while user code runs.
  mutable std::mutex head_mutex_;
  // The entry to collect next; before it, entries are taken or dropped. Written under the mutex.
  std::atomic<std::uint64_t> next_{0};

  // The batch in delivery; the channel's thread only.
  std::vector<Record> batch_;
  std::vector<std::unique_ptr<char[]>> copies_;
  std::size_t copied_bytes_ = 0;  // of them, those that count against the capacity
  std::vector<std::shared_ptr<SideBlock>> taken_aside_;
  std::vector<std::shared_ptr<Consumer>> current_;
  std::uint64_t overflow_taken_ = 0;
  std::size_t overflow_bytes_ = 0, overflow_bytes_taken_ = 0;
  int idle_naps_ = 0;

  mutable std::mutex mutex_;  // of all below
  std::condition_variable work_, room_, done_;
  std::vector<std::shared_ptr<Consumer>> consumers_;
  std::unordered_map<const Source*, std::shared_ptr<const Source>> sources_;
  std::deque<Retired> retired_;
  std::deque<Overflow> overflow_;
  std::deque<Flush> flushes_;
  std::uint64_t flush_wanted_ = 0, flush_served_ = 0;
  Moment settled_;                // everything before it has been delivered or dropped
  std::uint64_t overflowed_ = 0;  // records, in all
  std::uint64_t deliveries_ = 0;  // that ended
  bool in_delivery_ = false, running_ = false, closing_ = false, finished_ = false;
  std::thread thread_;

  std::atomic<std::thread::id> thread_id_;
  std::atomic<bool> overflowing_{false};  // records of the thread itself wait in `overflow_`
  // Bytes of the first record that found no memory; 0 before, and 1 once it has been reported.
  std::atomic<std::size_t> no_memory_{0};
  std::atomic<int> starving_{0};  // senders that others may not overtake
  std::atomic<bool> closed_{false};
  enum Rest : int { kAwake, kNapping, kAsleep };
  std::atomic<int> rest_{kAwake};
  std::atomic<int> waiting_{0};
  std::atomic<bool> interrupted_{false};
};

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// Senders and consumers for tests of channels: records whose content says which they are, and a
// consumer that keeps what it saw and does as the test tells it.
//
// A `Feed` is one source and its sender; any number of threads may send from it. A `Collector` is
// shared with the channel; its hook runs on the channel's thread.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "channel/channel.h"
#include "channel/tap.h"

namespace callgate::fake {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A generous limit for what must happen: reached only by a test that fails.
inline constexpr auto kLimit = seconds(60);

inline std::vector<std::uint64_t> count_to(std::uint64_t end) {
  std::vector<std::uint64_t> ids(end);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// Word `i` of the payload of record `id`.
inline std::uint64_t word(std::uint64_t id, std::size_t i) {
  return i == 0 ? id : (id + i) * 0x9e3779b97f4a7c15U;
}

inline void fill(std::uint64_t id, char* payload, std::size_t bytes) {
  for (std::size_t i = 0; i * 8 < bytes; ++i) {
    std::uint64_t value = word(id, i);
    std::memcpy(payload + i * 8, &value, 8);
  }
}

// Is it as `fill` made it? Its first word says for which record.
inline bool intact(const char* payload, std::size_t bytes) {
  std::uint64_t id = 0, value = 0;
  std::memcpy(&id, payload, 8);
  for (std::size_t i = 1; i * 8 < bytes; ++i) {
    std::memcpy(&value, payload + i * 8, 8);
    if (value != word(id, i)) return false;
  }
  return true;
}

// A source of one uint8 vector; `bytes` is a multiple of 8, at least 8.
inline std::shared_ptr<Source> make_source(std::size_t bytes,
                                           std::shared_ptr<Consumer> consumer = nullptr) {
  static std::atomic<std::uint64_t> next{1};
  EXPECT_TRUE(bytes >= 8 && bytes % 8 == 0);
  auto source = std::make_shared<Source>();
  source->id = next.fetch_add(1);
  source->name = "source" + std::to_string(source->id);
  source->leaves.push_back({"", DType::kU8, {static_cast<std::int64_t>(bytes)}, 0, bytes});
  source->value_leaves = 1;
  source->payload_bytes = align_record(bytes);
  source->consumer = std::move(consumer);
  return source;
}

class Feed {
 public:
  explicit Feed(std::size_t bytes = 8, std::shared_ptr<Consumer> consumer = nullptr)
      : bytes_(bytes) {
    sender_.source = make_source(bytes, std::move(consumer));
  }

  // `channel`: a Channel or a ChannelSlot.
  template <typename Target>
  bool send(Target& channel, std::uint64_t id, std::int64_t device = 0) {
    std::vector<char> payload(bytes_);
    fill(id, payload.data(), bytes_);
    std::array<std::int64_t, 1> dims{static_cast<std::int64_t>(bytes_)};
    ArrayView view{payload.data(), dims.data(), 1, DType::kU8};
    return channel.send(
        Parcel{sender_, {&view, 1}, {.device = static_cast<std::int32_t>(device), .run = 7}});
  }

  // The same of a payload that the channel may keep.
  bool send_kept(Channel& channel, std::uint64_t id, const std::shared_ptr<std::vector<char>>& in) {
    in->resize(bytes_);
    fill(id, in->data(), bytes_);
    std::array<std::int64_t, 1> dims{static_cast<std::int64_t>(bytes_)};
    ArrayView view{in->data(), dims.data(), 1, DType::kU8};
    const std::shared_ptr<void> memory = in;
    return channel.send(Parcel{.sender = sender_,
                               .leaves = {&view, 1},
                               .context = {.device = 0, .run = 7},
                               .memory = &memory});
  }

  const Source& source() const { return *sender_.source; }
  Sender& sender() { return sender_; }
  std::weak_ptr<const Source> watch() const { return sender_.source; }
  // Gives up our reference, as a call site's destructor does after `retire`.
  void forget() { sender_.source.reset(); }

 private:
  std::size_t bytes_;
  Sender sender_;
};

struct Item {
  std::uint64_t id = 0, seq = 0, source = 0;
  std::int32_t device = 0;
  bool intact = false;
};

class Collector final : public Consumer {
 public:
  using Hook = std::function<void(std::span<const Record>)>;

  // The hook runs first, without a lock; what it throws leaves the batch unseen.
  explicit Collector(Hook hook = nullptr) : hook_(std::move(hook)) {}

  void consume(std::span<const Record> records) override {
    if (hook_) hook_(records);
    std::lock_guard lock(mutex_);
    for (const Record& record : records) {
      Item item{0, record.seq, record.source->id, record.device, true};
      std::memcpy(&item.id, record.payload, 8);
      item.intact = intact(record.payload, record.source->leaves[0].nbytes);
      all_intact_ = all_intact_ && item.intact;
      items_.push_back(item);
    }
    changed_.notify_all();
  }
  void flush() override { flushes.fetch_add(1); }
  void close() override { closes.fetch_add(1); }
  std::string description() const override { return "a collector"; }

  // False when there are not so many in time.
  bool wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLimit, [&] { return items_.size() >= count; });
  }
  std::vector<Item> items() const {
    std::lock_guard lock(mutex_);
    return items_;
  }
  std::vector<std::uint64_t> ids() const {
    std::vector<std::uint64_t> ids;
    for (const Item& item : items()) ids.push_back(item.id);
    return ids;
  }
  bool all_intact() const {
    std::lock_guard lock(mutex_);
    return all_intact_;
  }

  std::atomic<int> flushes{0}, closes{0};

 private:
  Hook hook_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Item> items_;
  bool all_intact_ = true;
};

// A door for threads: shut until it is opened, for good.
class Door {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // Waits until it is open; tells who waits for that.
  void pass() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  bool wait_for_arrivals(int count = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kLimit, [&] { return arrived_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

// The errors of consumers, as the channel tells them.
struct Errors {
  std::mutex mutex;
  std::vector<std::string> messages;

  Channel::OnError handler() {
    return [this](const Channel&, const Consumer& consumer, const std::string& message) {
      std::lock_guard lock(mutex);
      messages.push_back(consumer.description() + ": " + message);
    };
  }
  std::vector<std::string> all() {
    std::lock_guard lock(mutex);
    return messages;
  }
};

inline std::shared_ptr<Channel> make_channel(OnFull on_full = OnFull::kBlock,
                                             std::size_t capacity = 4096, double rate = 100,
                                             Channel::OnError on_error = nullptr) {
  if (!on_error) {
    on_error = [](const Channel&, const Consumer& consumer, const std::string& message) {
      ADD_FAILURE() << consumer.description() << " threw: " << message;
    };
  }
  return std::make_shared<Channel>(ChannelOptions{"test", capacity, on_full, rate},
                                   std::move(on_error));
}

// sent = delivered + dropped + pending, and none is less than none.
inline ::testing::AssertionResult exact(const ChannelStats& stats) {
  bool sum = stats.sent == stats.delivered + stats.dropped + stats.pending;
  if (sum && stats.pending <= stats.sent) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "sent " << stats.sent << ", delivered " << stats.delivered << ", dropped "
         << stats.dropped << ", pending " << stats.pending;
}

template <typename Condition>
bool eventually(Condition condition) {
  auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

}  // namespace callgate::fake

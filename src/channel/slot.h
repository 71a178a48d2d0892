// Channels by name. They come and go: a program that was compiled long ago sends to whatever
// channel is open under the name now. While none is, a small holding channel keeps the records for
// the next that opens.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channel/channel.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// One name's place: never destroyed, so that call sites may point to it.
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
  std::shared_ptr<Channel> open_channel() const {
    std::lock_guard lock(mutex_);
    return is_open_ ? channel_ : nullptr;
  }
  // The one that takes records now: the open one, or the one that holds them.
  std::shared_ptr<Channel> current() const {
    std::lock_guard lock(mutex_);
    return channel_;
  }

  // Puts `channel` in place; it takes over what was held, and goes on with its sequence numbers.
  // Not started yet. Throws Error when one is open.
  void open(std::shared_ptr<Channel> channel) {
    std::lock_guard lock(mutex_);
    if (is_open_)
      throw Error(ErrorCode::kAlreadyExists,
                  "a channel named '" + name_ +
                      "' is open already; close it first, or give this one another name");
    channel->adopt(take_out());
    put_in(std::move(channel));
    is_open_ = true;
  }

  // From now on records are held, and `channel` refuses them. It is still to be closed.
  void vacate(const Channel& channel) {
    std::lock_guard lock(mutex_);
    if (!is_open_ || channel_.get() != &channel) return;
    is_open_ = false;
    std::shared_ptr<Channel> holding = holding_channel();  // may throw: before we begin
    take_out()->refuse();
    put_in(std::move(holding));
  }

 private:
  std::shared_ptr<Channel> holding_channel() const {
    constexpr std::size_t kBytes = std::size_t{1} << 20;
    return std::make_shared<Channel>(
        ChannelOptions{.name = name_, .capacity = kBytes, .on_full = OnFull::kDropNew},
        [](const Channel&, const Consumer&, const std::string&) {});
  }

  // The mutex is held, in both. Returns the channel when nobody sends to it any more; senders wait
  // until the next is put in, which is not long: those who waited for room are sent away.
  std::shared_ptr<Channel> take_out() {
    sending_to_.store(nullptr, std::memory_order_seq_cst);                  // see send()
    if (channel_->options().on_full == OnFull::kBlock) channel_->refuse();  // wakes those who wait
    while (inside_.load(std::memory_order_seq_cst) != 0) {                  // see send()
      if (Channel::abandoned()) break;  // who is inside is not in this process
      std::this_thread::yield();
    }
    return std::move(channel_);
  }
  void put_in(std::shared_ptr<Channel> channel) {
    channel_ = std::move(channel);
    sending_to_.store(channel_.get(), std::memory_order_seq_cst);  // see send()
  }

  std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Channel> channel_;
  bool is_open_ = false;
  // What senders use; null for the moment between two. `inside_` counts those who may be using the
  // pointer.
  std::atomic<Channel*> sending_to_{nullptr};
  std::atomic<int> inside_{0};
};

class Channels {
 public:
  static Channels& instance() { return immortal<Channels>(); }

  ChannelSlot& slot(const std::string& name) {
    std::lock_guard lock(mutex_);
    return slots_.try_emplace(name, name).first->second;
  }

  // All channels that take records now, holding ones included.
  std::vector<std::shared_ptr<Channel>> all() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Channel>> all;
    all.reserve(slots_.size());
    for (const auto& [name, slot] : slots_) all.push_back(slot.current());
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, ChannelSlot> slots_;  // their places stay
};

}  // namespace callgate

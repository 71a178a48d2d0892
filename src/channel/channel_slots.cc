// SPDX-License-Identifier: Apache-2.0
// Slots of channels by name: a channel enters and leaves one.
#include "channel/channel.h"

namespace callgate {

std::shared_ptr<Channel> ChannelSlot::open_channel() const {
  std::lock_guard lock(mutex_);
  return is_open_ ? channel_ : nullptr;
}

void ChannelSlot::open(std::shared_ptr<Channel> channel) {
  std::lock_guard lock(mutex_);
  if (is_open_)
    throw Error(
        ErrorCode::kAlreadyExists,
        "a channel named '" + name_ + "' is open already; close it first, or choose another name");
  channel->adopt(take_out());
  put_in(std::move(channel));
  is_open_ = true;
}

void ChannelSlot::vacate(const Channel& channel) {
  std::lock_guard lock(mutex_);
  if (!is_open_ || channel_.get() != &channel) return;
  is_open_ = false;
  std::shared_ptr<Channel> holding = holding_channel();  // may throw: before any change
  take_out()->refuse();
  put_in(std::move(holding));
}

std::shared_ptr<Channel> ChannelSlot::holding_channel() const {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  return std::make_shared<Channel>(
      ChannelOptions{.name = name_, .capacity = kBytes, .on_full = OnFull::kDropNew},
      [](const Channel&, const Consumer&, const std::string&) {});
}

std::shared_ptr<Channel> ChannelSlot::take_out() {
  sending_to_.store(nullptr, std::memory_order_seq_cst);                  // see send()
  if (channel_->options().on_full == OnFull::kBlock) channel_->refuse();  // wakes waiting senders
  while (inside_.load(std::memory_order_seq_cst) != 0) {                  // see send()
    if (Channel::abandoned()) break;  // the senders inside aren't in this process
    std::this_thread::yield();
  }
  return std::move(channel_);
}

void ChannelSlot::put_in(std::shared_ptr<Channel> channel) {
  channel_ = std::move(channel);
  sending_to_.store(channel_.get(), std::memory_order_seq_cst);  // see send()
}

ChannelSlot& Channels::slot(const std::string& name) {
  std::lock_guard lock(mutex_);
  return slots_.try_emplace(name, name).first->second;
}

std::vector<std::shared_ptr<Channel>> Channels::all() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Channel>> all;
  all.reserve(slots_.size());
  for (const auto& [name, slot] : slots_) all.push_back(slot.current());
  return all;
}

}  // namespace callgate

// Taps: callees that send their operands to a channel, and channels by name.
//
// A program's tap names its callee as every call does. The callee knows the channel's name and, for
// a tap to a function, the consumer; a call site (`TapSite`) knows what its records look like.
//
// Channels come and go under their names: a program that was compiled long ago sends to whatever
// channel is open under the name now. While none is, a small holding channel keeps the records for
// the next that opens.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel/channel.h"
#include "core/call.h"

namespace callgate {

// One name's place: never destroyed, so that call sites may point to it.
class ChannelSlot {
 public:
  explicit ChannelSlot(std::string name);

  bool send(const Parcel& parcel) noexcept;
  void retire(const Source& source);

  // The channel that is open, else null.
  std::shared_ptr<Channel> open_channel() const;
  // The one that takes records now: the open one, or the one that holds them.
  std::shared_ptr<Channel> current() const;

  // Puts `channel` in place; it takes over what was held, and goes on with its sequence numbers.
  // Not started yet. Throws Error when one is open.
  void open(std::shared_ptr<Channel> channel);
  // From now on records are held, and `channel` refuses them. It is still to be closed.
  void vacate(const Channel& channel);

 private:
  std::shared_ptr<Channel> take_out();
  void put_in(std::shared_ptr<Channel> channel);

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
  static Channels& instance();

  ChannelSlot& slot(const std::string& name);

  // All channels that take records now, holding ones included.
  std::vector<std::shared_ptr<Channel>> all() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<ChannelSlot>> slots_;
};

class TapCallee final : public Callee {
 public:
  TapCallee(std::string name, const std::string& channel, std::shared_ptr<Consumer> consumer);

  // What it holds is that of `TapSpec::of`.
  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  bool quiet_at_exit() const noexcept override { return true; }
  OnDevice on_device() const noexcept override { return OnDevice::kDeferred; }

 private:
  std::string name_;
  ChannelSlot& slot_;
  std::shared_ptr<Consumer> consumer_;
};

// The static description of a tap's call site. Operands are the values, then the predicate if
// `where`, then others that are not sent. A tap in the flow of data has as results its first
// `returned` operands and those that are not sent.
//
// As attributes: a dictionary `tap` of name, role ("primal"), ordered, repeated, every, returned,
// where, on_device and, in order of the values, `paths`; a dictionary `padded` with one dictionary
// for each of the sizes, which are the last values: leaf, and of an array on several devices
// `whole`, its extents, and `starts`, where each shard begins.
struct TapSpec {
  std::string name;
  Role role = Role::kPrimal;
  bool ordered = false;
  bool repeated = false;
  std::int64_t every = 1;
  std::size_t values = 0;
  std::size_t returned = 0;
  bool where = false;
  bool on_device = false;
  std::vector<std::string> paths;
  std::vector<Padded> padded;
  std::string description;

  // `description`: for Python. Throws Error for attributes of another form.
  static TapSpec of(const Attributes& held, std::string description);
};

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// Taps: callees that send their operands to a channel.
//
// A program's tap names its callee as every call does. The callee knows the channel's slot and, for
// a tap to a function, the consumer. A call site (`TapSite`) knows the form of its records.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "channel/channel.h"
#include "channel/record.h"
#include "core/call.h"
#include "core/error.h"

namespace callgate {

// The static description of a tap's call site. Operands are the values, then the predicate if
// `has_where`, then the call's number if its lanes are numbered, then operands that are not sent. A
// tap in the flow of data has as results its first `returned` operands and those that are not sent.
//
// As attributes: a dictionary `tap` of name, role ("primal"), ordered, repeated, every, returned,
// where, on_device and `paths` of the values; a dictionary `padded` with an entry for each of the
// sizes, which are the last values: leaf, and for an array on several devices its extents `whole`
// and the start of each shard, `starts`; and on several devices a dictionary `parts` with `whole`
// and `starts` for each other value.
struct TapSpec : SourceInfo {
  bool repeated = false;
  std::int64_t every = 1;
  std::size_t returned = 0;
  std::vector<std::string> paths;

  // `description` is for Python. Throws Error for attributes of another form.
  static TapSpec of(const Attributes& held, std::string description);
};

// One call site of one executable.
class TapSite final : public Site {
 public:
  TapSite(ChannelSlot& slot, std::shared_ptr<Consumer> consumer, TapSpec spec, Lanes lanes);

  ~TapSite() override {
    if (sender_.source != nullptr) slot_.retire(*sender_.source);
  }

  void run(const Call& call) override;

  // A call that is not due copies nothing from the device. A predicate is known with the values.
  std::optional<std::size_t> reads(const Call& call) override;

  void run_deferred(const Call& call) override {
    if (!spec_.has_where || is_sent(call)) send(call);
  }

  std::size_t reads_replayed(const Call& call) override;

  bool run_replayed(const Call& call) override;

  bool drop(const Call& call) noexcept override;

  std::size_t kept_on_device() const noexcept override {
    return spec_.on_device ? spec_.value_leaves : 0;
  }

  void run_kept(const Call& call, const std::shared_ptr<DeviceMemory>& memory) override;

  std::size_t copied_to(std::size_t result) const noexcept override {
    return result < spec_.returned ? result : sent() + result - spec_.returned;
  }

  // Another device has sent the same data.
  void skip(const Call& call) noexcept override;

 private:
  // The number of operands in a record.
  std::size_t sent() const noexcept {
    return spec_.value_leaves + (spec_.has_where ? 1 : 0) + (lanes_.has_numbered() ? 1 : 0);
  }

  void send(const Call& call) noexcept;

  // True if they are laid out as in a record.
  bool is_payload(std::span<const ArrayView> leaves) const noexcept;

  bool is_sent(const Call& call) noexcept;

  // Each device counts its own executions, so all send at the same steps.
  bool is_due(const Call& call) noexcept;

  [[noreturn]] void fail(const std::string& expected, const std::string& got) const {
    throw Error("tap '" + spec_.name + "'", expected, got);
  }

  void check(const Call& call) const;

  // Checks the padded leaf `i`: a size for each of its axes, and the description of the whole.
  void check_sizes(const Call& call, std::size_t i) const;

  // Shapes are known from the first call on.
  void describe(const Call& call, bool on_device = false);

  ChannelSlot& slot_;
  std::shared_ptr<Consumer> consumer_;
  TapSpec spec_;
  Lanes lanes_;
  std::mutex mutex_;
  Sender sender_;
  std::atomic<bool> described_{false};
  std::unique_ptr<DeviceCounters> executions_;  // if not every execution is sent
};

class TapCallee final : public Callee {
 public:
  TapCallee(std::string name, const std::string& channel, std::shared_ptr<Consumer> consumer);

  // The attributes are those of `TapSpec::of`.
  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }
  std::string_view kind() const noexcept override { return "tap"; }
  bool quiet_at_exit() const noexcept override { return true; }
  OnDevice on_device() const noexcept override { return OnDevice::kDeferred; }

  // The consumer of a tap to a function; null for a tap to a channel.
  Consumer* consumer() const noexcept { return consumer_.get(); }

 private:
  std::string name_;
  ChannelSlot& slot_;
  std::shared_ptr<Consumer> consumer_;
};

}  // namespace callgate

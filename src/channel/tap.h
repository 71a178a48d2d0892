// SPDX-License-Identifier: Apache-2.0
// Taps: callees that send their operands to a channel.
//
// A program's tap names its callee as every call does. The callee knows the channel's slot and, for
// a tap to a function, the consumer; a call site (`TapSite`) knows what its records look like.
#pragma once

#include <algorithm>
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
#include <utility>
#include <vector>

#include "channel/channel.h"
#include "channel/record.h"
#include "core/call.h"
#include "core/error.h"

namespace callgate {

// The static description of a tap's call site. Operands are the values, then the predicate if
// `has_where`, then the call's number if its lanes are numbered, then others that are not sent. A
// tap in the flow of data has as results its first `returned` operands and those that are not sent.
//
// As attributes: a dictionary `tap` of name, role ("primal"), ordered, repeated, every, returned,
// where, on_device and `paths` of the values; a dictionary `padded` with one for each of the sizes,
// which are the last values: leaf, and of an array on several devices `whole`, its extents, and
// `starts`, where each shard begins; and on several devices a dictionary `parts` with one for each
// other value: `whole` and `starts`.
struct TapSpec : SourceInfo {
  bool repeated = false;
  std::int64_t every = 1;
  std::size_t returned = 0;
  std::vector<std::string> paths;

  // `description`: for Python. Throws Error for attributes of another form.
  static TapSpec of(const Attributes& held, std::string description) {
    const Attributes& tap = held.dictionary("tap");
    TapSpec spec;
    spec.name = tap.text("name");
    if (tap.find("role") != nullptr) spec.role = role_of(tap.text("role"));
    spec.ordered = tap.flag("ordered");
    spec.repeated = tap.flag("repeated");
    spec.has_where = tap.flag("where");
    spec.on_device = tap.flag("on_device");
    spec.every = count(tap, "every", 1);
    spec.returned = static_cast<std::size_t>(count(tap, "returned"));
    const Attributes& paths = tap.dictionary("paths");
    for (const std::string& place : paths.places()) spec.paths.emplace_back(paths.text(place));
    spec.value_leaves = spec.paths.size();
    const Attributes& padded = held.dictionary("padded");
    for (const std::string& place : padded.places())
      spec.padded.push_back(padded_of(padded.dictionary(place)));
    for (const Padded& one : spec.padded)
      if (one.leaf + spec.padded.size() >= spec.value_leaves)
        throw Error("a tap's 'padded'", "a leaf of its values, which sizes follow",
                    std::to_string(one.leaf));
    const Attributes& parts = held.dictionary("parts");
    for (const std::string& place : parts.places()) {
      Padded part = padded_of(parts.dictionary(place));
      spec.parts.push_back({std::move(part.whole), std::move(part.starts)});
    }
    spec.description = std::move(description);
    return spec;
  }

 private:
  static std::int64_t count(const Attributes& held, std::string_view name,
                            std::int64_t missing = 0) {
    const std::int64_t value = held.integer(name, missing);
    if (value >= 0) return value;
    throw Error("a tap's '" + std::string(name) + "'", "a count", std::to_string(value));
  }

  static Role role_of(std::string_view text) {
    for (Role role : {Role::kPrimal, Role::kTangent, Role::kCotangent})
      if (role_name(role) == text) return role;
    throw Error("a tap's 'role'", "primal, tangent or cotangent", "'" + std::string(text) + "'");
  }

  // `starts` has the numbers of one shard after another.
  static Padded padded_of(const Attributes& held) {
    Padded padded;
    padded.leaf = static_cast<std::size_t>(count(held, "leaf"));
    const auto whole = held.integers("whole"), starts = held.integers("starts");
    padded.whole.assign(whole.begin(), whole.end());
    if (whole.empty() ? !starts.empty() : starts.size() % whole.size() != 0)
      throw Error("a tap's 'padded'", "starts of as many numbers as there are extents",
                  std::to_string(starts.size()));
    for (auto rest = starts; !rest.empty(); rest = rest.subspan(whole.size()))
      padded.starts.emplace_back(rest.begin(), rest.begin() + std::ssize(whole));
    for (auto numbers : {starts, whole})
      for (std::int64_t number : numbers)
        if (number < 0) throw Error("a tap's 'padded'", "counts", std::to_string(number));
    return padded;
  }
};

// One call site of one executable.
class TapSite final : public Site {
 public:
  TapSite(ChannelSlot& slot, std::shared_ptr<Consumer> consumer, TapSpec spec, Lanes lanes)
      : slot_(slot),
        consumer_(std::move(consumer)),
        spec_(std::move(spec)),
        lanes_(std::move(lanes)),
        executions_(spec_.every > 1 ? std::make_unique<DeviceCounters>() : nullptr) {}

  ~TapSite() override {
    if (sender_.source != nullptr) slot_.retire(*sender_.source);
  }

  void run(const Call& call) override {
    if (Channel::abandoned()) [[unlikely]]
      throw Error::verbatim(
          ErrorCode::kAborted,
          "tap '" + spec_.name +
              "': this process was forked from one that had channels, whose threads are not here; "
              "expected a process of its own (multiprocessing's 'spawn' or 'forkserver')");
    describe(call);
    if (is_sent(call)) send(call);
    skip(call);
  }

  // What is not due is not copied from the device. A predicate is known with the values.
  std::optional<std::size_t> reads(const Call& call) override {
    describe(call, /*on_device=*/spec_.on_device);
    return spec_.has_where || is_due(call) ? std::optional(sent()) : std::nullopt;
  }

  void run_deferred(const Call& call) override {
    if (!spec_.has_where || is_sent(call)) send(call);
  }

  std::size_t reads_replayed(const Call& call) override {
    describe(call);
    return sent();
  }

  bool run_replayed(const Call& call) override {
    if (is_sent(call)) send(call);
    return true;
  }

  bool drop(const Call& call) noexcept override {
    slot_.send(Parcel{sender_, {}, call.context, /*handle=*/0, /*lost=*/true});
    return true;
  }

  std::size_t kept_on_device() const noexcept override {
    return spec_.on_device ? spec_.value_leaves : 0;
  }

  void run_kept(const Call& call, const std::shared_ptr<DeviceMemory>& memory) override {
    const std::size_t values = spec_.value_leaves;
    if (spec_.has_where && !is_sent(call)) return;
    KeptArrays::One one{memory, {}};
    for (const ArrayView& value : call.operands.first(values)) one.data.push_back(value.data);
    const std::span<const ArrayView> control = call.operands.subspan(values, sent() - values);
    KeptArrays& kept = *sender_.source->kept;
    const std::uint64_t handle = kept.keep(std::move(one));
    if (!slot_.send(Parcel{sender_, control, call.context, handle})) kept.drop(handle);
  }

  std::size_t copied_to(std::size_t result) const noexcept override {
    return result < spec_.returned ? result : sent() + result - spec_.returned;
  }

  // Another device has sent the same data.
  void skip(const Call& call) noexcept override {
    for (std::size_t i = 0; i < call.results.size(); ++i)  // it may be the same memory already
      copy_to(call.results[i], call.operands[copied_to(i)].data);
  }

 private:
  // Operands that a record holds.
  std::size_t sent() const noexcept {
    return spec_.value_leaves + (spec_.has_where ? 1 : 0) + (lanes_.has_numbered() ? 1 : 0);
  }

  void send(const Call& call) noexcept {
    const std::span<const ArrayView> leaves = call.operands.first(sent());
    const bool kept = call.memory != nullptr && is_payload(leaves);
    slot_.send(Parcel{.sender = sender_,
                      .leaves = leaves,
                      .context = call.context,
                      .memory = kept ? call.memory : nullptr});
  }

  // True if they lie as in a record.
  bool is_payload(std::span<const ArrayView> leaves) const noexcept {
    const char* first = nullptr;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const char* start =
          static_cast<const char*>(leaves[i].data) - sender_.source->leaves[i].offset;
      if (i != 0 && start != first) return false;
      first = start;
    }
    return first != nullptr;
  }

  bool is_sent(const Call& call) noexcept {
    if (!spec_.has_where) return is_due(call);
    const ArrayView& mask = call.operands[spec_.value_leaves];
    return mask.size() != 0 && std::memchr(mask.data, 1, mask.size()) != nullptr && is_due(call);
  }

  // Each device counts its own executions, so that all send at the same steps.
  bool is_due(const Call& call) noexcept {
    if (executions_ == nullptr) return true;
    return executions_->next(call.context.device) % static_cast<std::uint64_t>(spec_.every) == 0;
  }

  [[noreturn]] void fail(const std::string& expected, const std::string& got) const {
    throw Error("tap '" + spec_.name + "'", expected, got);
  }

  void check(const Call& call) const {
    const std::size_t results = call.results.size();
    auto need = [&](std::size_t least, std::size_t got, const char* what) {
      if (got < least) fail("at least " + std::to_string(least) + what, std::to_string(got));
    };
    need(spec_.returned, results, " results");
    need(std::max(sent() + results - spec_.returned, spec_.returned), call.operands.size(),
         " operands");
    for (std::size_t i = 0; i < spec_.padded.size(); ++i) check_sizes(call, i);
    if (spec_.has_where && call.operands[spec_.value_leaves].dtype != DType::kPred)
      fail("bool as its predicate", to_string(call.operands[spec_.value_leaves]));
    if (lanes_.has_numbered())
      if (const ArrayView& number = call.operands[sent() - 1];
          number.dtype != DType::kS32 || number.rank != 0)
        fail("an int32 as the number of its lane", to_string(number));
    for (std::size_t i = 0; i < results; ++i) {
      const ArrayView& from = call.operands[copied_to(i)];
      if (call.results[i].nbytes() != from.nbytes())
        fail("result " + std::to_string(i) + " as its operand, " + to_string(from),
             to_string(call.results[i]));
    }
  }

  // Of the padded leaf `i`: as many sizes as the array has axes, and what is said of the whole.
  void check_sizes(const Call& call, std::size_t i) const {
    const Padded& padded = spec_.padded[i];
    const ArrayView& sizes = call.operands[spec_.value_leaves - spec_.padded.size() + i];
    const auto count = sizes.rank == 0 ? -1 : sizes.dims[sizes.rank - 1];
    auto fits = [&](const auto& numbers) { return std::ssize(numbers) == count; };
    const bool whole =
        padded.starts.empty() || (fits(padded.whole) && std::ranges::all_of(padded.starts, fits));
    if (sizes.dtype != DType::kS32 || count < 0 || !whole)
      fail("int32 sizes of its padded leaf " + std::to_string(padded.leaf), to_string(sizes));
  }

  // Shapes are known from the first call on.
  void describe(const Call& call, bool on_device = false) {
    if (described_.load(std::memory_order_acquire)) return;  // pairs with the release below
    std::lock_guard lock(mutex_);
    if (sender_.source != nullptr) return;
    const LanesOfCall lanes(lanes_, call.operands, {});
    check(call);
    auto source = std::make_shared<Source>();
    static_cast<SourceInfo&>(*source) = spec_;
    source->id = next_id<Source>();
    source->lanes = *lanes;
    source->consumer = consumer_;
    if (on_device) source->kept = std::make_shared<KeptArrays>();
    std::size_t host_bytes = kRecordAlignment;  // the handle's
    for (std::size_t i = 0; i < sent(); ++i) {
      const bool is_value = i < spec_.value_leaves;
      LeafType& leaf = source->add(is_value ? spec_.paths[i] : "", call.operands[i]);
      if (!on_device || is_value) continue;
      leaf.offset = host_bytes;
      host_bytes += align_record(leaf.nbytes);
    }
    source->written_bytes = on_device ? host_bytes : source->payload_bytes;
    source->payload_bytes = std::max(source->payload_bytes, source->written_bytes);
    sender_.flags = spec_.repeated ? std::uint32_t{kRepeated} : 0;
    sender_.source = std::move(source);
    described_.store(true, std::memory_order_release);  // the sender is complete
  }

  ChannelSlot& slot_;
  std::shared_ptr<Consumer> consumer_;
  TapSpec spec_;
  Lanes lanes_;
  std::mutex mutex_;
  Sender sender_;
  std::atomic<bool> described_{false};
  std::unique_ptr<DeviceCounters> executions_;  // where not each of them is sent
};

class TapCallee final : public Callee {
 public:
  TapCallee(std::string name, const std::string& channel, std::shared_ptr<Consumer> consumer)
      : name_(std::move(name)),
        slot_(Channels::instance().slot(channel)),
        consumer_(std::move(consumer)) {}

  // What it holds is that of `TapSpec::of`.
  std::shared_ptr<Site> specialise(SiteSpec spec) override {
    return std::make_shared<TapSite>(slot_, consumer_, TapSpec::of(spec.held, std::move(spec.spec)),
                                     std::move(spec.lanes));
  }
  const std::string& name() const noexcept override { return name_; }
  std::string_view kind() const noexcept override { return "tap"; }
  bool quiet_at_exit() const noexcept override { return true; }
  OnDevice on_device() const noexcept override { return OnDevice::kDeferred; }

  // Of a tap to a function; null for one to a channel.
  Consumer* consumer() const noexcept { return consumer_.get(); }

 private:
  std::string name_;
  ChannelSlot& slot_;
  std::shared_ptr<Consumer> consumer_;
};

}  // namespace callgate

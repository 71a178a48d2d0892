// See the header.
#include "channel/tap.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "channel/device_counters.h"

namespace callgate {
namespace {

constexpr const char* kForked =
    "': this process was forked from one that had channels, whose threads are not here; expected a "
    "process of its own (multiprocessing's 'spawn' or 'forkserver')";
constexpr std::size_t kHolding = std::size_t{1} << 20;

std::shared_ptr<Channel> holding_channel(const std::string& name) {
  ChannelOptions options;
  options.name = name;
  options.capacity = kHolding;
  options.on_full = OnFull::kDropNew;
  return std::make_shared<Channel>(std::move(options),
                                   [](const Channel&, const Consumer&, const std::string&) {});
}

}  // namespace

// -- channels by name ----------------------------------------------------------------------------

ChannelSlot::ChannelSlot(std::string name)
    : name_(std::move(name)), channel_(holding_channel(name_)), sending_to_(channel_.get()) {}

bool ChannelSlot::send(const Parcel& parcel) noexcept {
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

void ChannelSlot::retire(const Source& source) {
  if (Channel::abandoned()) return;  // the mutex may be held for ever
  current()->retire(source);
}

std::shared_ptr<Channel> ChannelSlot::open_channel() const {
  std::lock_guard lock(mutex_);
  return is_open_ ? channel_ : nullptr;
}

std::shared_ptr<Channel> ChannelSlot::current() const {
  std::lock_guard lock(mutex_);
  return channel_;
}

void ChannelSlot::open(std::shared_ptr<Channel> channel) {
  std::lock_guard lock(mutex_);
  if (is_open_) {
    throw Error(ErrorCode::kAlreadyExists, "a channel named '" + name_ +
                                               "' is open already; close "
                                               "it first, or give this one another name");
  }
  channel->adopt(take_out());
  put_in(std::move(channel));
  is_open_ = true;
}

void ChannelSlot::vacate(const Channel& channel) {
  std::lock_guard lock(mutex_);
  if (!is_open_ || channel_.get() != &channel) return;
  is_open_ = false;
  std::shared_ptr<Channel> holding = holding_channel(name_);  // may throw: before we begin
  take_out()->refuse();
  put_in(std::move(holding));
}

// The mutex is held, in both. Returns the channel when nobody sends to it any more; senders wait
// until the next is put in, which is not long: those who waited for room are sent away.
std::shared_ptr<Channel> ChannelSlot::take_out() {
  sending_to_.store(nullptr, std::memory_order_seq_cst);                  // see send()
  if (channel_->options().on_full == OnFull::kBlock) channel_->refuse();  // wakes those who wait
  while (inside_.load(std::memory_order_seq_cst) != 0) {                  // see send()
    if (Channel::abandoned()) break;  // who is inside is not in this process
    std::this_thread::yield();
  }
  return std::move(channel_);
}

void ChannelSlot::put_in(std::shared_ptr<Channel> channel) {
  channel_ = std::move(channel);
  sending_to_.store(channel_.get(), std::memory_order_seq_cst);  // see send()
}

Channels& Channels::instance() {
  static auto* channels = new Channels();  // never destroyed: programs may send at exit
  return *channels;
}

ChannelSlot& Channels::slot(const std::string& name) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<ChannelSlot>& slot = slots_[name];
  if (slot == nullptr) slot = std::make_unique<ChannelSlot>(name);
  return *slot;
}

std::vector<std::shared_ptr<Channel>> Channels::all() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Channel>> all;
  all.reserve(slots_.size());
  for (const auto& [name, slot] : slots_) all.push_back(slot->current());
  return all;
}

// -- the call ------------------------------------------------------------------------------------
namespace {

std::uint64_t next_source_id() noexcept {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);  // a number, no order
}

bool any_true(const ArrayView& mask) noexcept {
  return mask.size() != 0 && std::memchr(mask.data, 1, mask.size()) != nullptr;
}

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
      throw Error::verbatim(ErrorCode::kAborted, "tap '" + spec_.name + kForked);
    describe(call);
    if (is_sent(call)) send(call);
    pass_on(call);
  }

  // What is not due is not copied from the device. A predicate is known with the values.
  std::optional<std::size_t> reads(const Call& call) override {
    describe(call, /*on_device=*/spec_.on_device);
    if (spec_.where || is_due(call)) return sent();
    return std::nullopt;
  }

  void run_deferred(const Call& call) override {
    if (!spec_.where || is_sent(call)) send(call);
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
    return spec_.on_device ? spec_.values : 0;
  }

  void run_kept(const Call& call, const std::shared_ptr<DeviceMemory>& memory) override {
    if (spec_.where && !is_sent(call)) return;
    KeptArrays::One one{memory, {}};
    for (std::size_t i = 0; i < spec_.values; ++i) one.data.push_back(call.operands[i].data);
    std::span<const ArrayView> control = call.operands.subspan(spec_.values, sent() - spec_.values);
    KeptArrays& kept = *sender_.source->kept;
    std::uint64_t handle = kept.keep(std::move(one));
    if (!slot_.send(Parcel{sender_, control, call.context, handle})) kept.drop(handle);
  }

  std::size_t copied_to(std::size_t result) const noexcept override {
    return result < spec_.returned ? result : sent() + result - spec_.returned;
  }

  // Another device has sent the same data.
  void skip(const Call& call) noexcept override { pass_on(call); }

 private:
  void pass_on(const Call& call) const noexcept {
    for (std::size_t i = 0; i < call.results.size(); ++i) {
      const ArrayView& from = operand_of(call, i);
      const ArrayView& to = call.results[i];  // the same memory already where XLA kept the alias
      if (to.data != from.data && to.nbytes() != 0) std::memcpy(to.data, from.data, to.nbytes());
    }
  }

  // Operands that a record holds.
  std::size_t sent() const noexcept { return spec_.values + (spec_.where ? 1 : 0); }

  void send(const Call& call) noexcept {
    slot_.send(Parcel{sender_, call.operands.first(sent()), call.context});
  }

  bool is_sent(const Call& call) noexcept {
    return (!spec_.where || any_true(call.operands[spec_.values])) && is_due(call);
  }

  // Each device counts its own executions, so that all send at the same steps.
  bool is_due(const Call& call) noexcept {
    if (executions_ == nullptr) return true;
    return executions_->next(call.context.device) % static_cast<std::uint64_t>(spec_.every) == 0;
  }

  void check(const Call& call) const {
    lanes_.check(call.operands, {});
    std::string tap = "tap '" + spec_.name + "'";
    auto fail = [&](const std::string& expected, const std::string& got) {
      throw Error(ErrorCode::kInvalidArgument, tap, expected, got);
    };
    std::size_t results = call.results.size();
    if (results < spec_.returned)
      fail("at least " + std::to_string(spec_.returned) + " results", std::to_string(results));
    std::size_t operands = std::max(sent() + results - spec_.returned, spec_.returned);
    if (call.operands.size() < operands)
      fail("at least " + std::to_string(operands) + " operands",
           std::to_string(call.operands.size()));
    for (std::size_t i = 0; i < spec_.padded.size(); ++i) check_sizes(call, i);
    if (spec_.where && call.operands[spec_.values].dtype != DType::kPred)
      fail("bool as its predicate", to_string(call.operands[spec_.values]));
    for (std::size_t i = 0; i < results; ++i) {
      const ArrayView& from = operand_of(call, i);
      if (call.results[i].nbytes() != from.nbytes())
        fail("result " + std::to_string(i) + " as its operand, " + to_string(from),
             to_string(call.results[i]));
    }
  }

  // Of the padded leaf `i`: as many sizes as the array has axes, and what is said of the whole.
  void check_sizes(const Call& call, std::size_t i) const {
    const Padded& padded = spec_.padded[i];
    const ArrayView& sizes = call.operands[spec_.values - spec_.padded.size() + i];
    const auto count = sizes.rank == 0 ? -1 : sizes.dims[sizes.rank - 1];
    auto fits = [&](const std::vector<std::int64_t>& numbers) {
      return static_cast<std::int64_t>(numbers.size()) == count;
    };
    const bool whole =
        padded.starts.empty() || (fits(padded.whole) && std::ranges::all_of(padded.starts, fits));
    if (sizes.dtype == DType::kS32 && count >= 0 && whole) return;
    throw Error(ErrorCode::kInvalidArgument, "tap '" + spec_.name + "'",
                "int32 sizes of its padded leaf " + std::to_string(padded.leaf), to_string(sizes));
  }

  // What result `i` is.
  const ArrayView& operand_of(const Call& call, std::size_t i) const noexcept {
    return call.operands[copied_to(i)];
  }

  // Shapes are known from the first call on.
  void describe(const Call& call, bool on_device = false) {
    if (described_.load(std::memory_order_acquire)) return;  // pairs with the release below
    std::lock_guard lock(mutex_);
    if (sender_.source != nullptr) return;
    check(call);
    auto source = std::make_shared<Source>();
    source->id = next_source_id();
    source->name = spec_.name;
    source->description = spec_.description;
    source->role = spec_.role;
    source->ordered = spec_.ordered;
    source->lanes = lanes_;
    source->value_leaves = spec_.values;
    source->padded = spec_.padded;
    source->has_where = spec_.where;
    source->consumer = consumer_;
    source->on_device = spec_.on_device;
    if (on_device) source->kept = std::make_shared<KeptArrays>();
    std::size_t host_bytes = kRecordAlignment;  // the handle's
    for (std::size_t i = 0; i < sent(); ++i) {
      const ArrayView& view = call.operands[i];
      std::vector<std::int64_t> dims(view.shape().begin(), view.shape().end());
      LeafType leaf{i < spec_.values ? spec_.paths[i] : "", view.dtype, std::move(dims),
                    source->payload_bytes, view.nbytes()};
      source->payload_bytes += align_record(leaf.nbytes);
      if (on_device && i >= spec_.values) {
        leaf.offset = host_bytes;
        host_bytes += align_record(leaf.nbytes);
      }
      source->leaves.push_back(std::move(leaf));
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

}  // namespace

TapCallee::TapCallee(std::string name, const std::string& channel,
                     std::shared_ptr<Consumer> consumer)
    : name_(std::move(name)),
      slot_(Channels::instance().slot(channel)),
      consumer_(std::move(consumer)) {}

std::shared_ptr<Site> TapCallee::specialise(SiteSpec spec) {
  return std::make_shared<TapSite>(slot_, consumer_, TapSpec::of(spec.held, std::move(spec.spec)),
                                   std::move(spec.lanes));
}

}  // namespace callgate

// See the header.
#include "channel/tap.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>
#include <thread>
#include <utility>

namespace callgate {
namespace {

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
  // Sequentially consistent, both: replace() stores the pointer and then looks who is inside.
  inside_.fetch_add(1, std::memory_order_seq_cst);
  bool sent = sending_to_.load(std::memory_order_seq_cst)->send(parcel);
  inside_.fetch_sub(1, std::memory_order_release);  // our use of the channel is over
  return sent;
}

void ChannelSlot::retire(const Source& source) { current()->retire(source); }

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
  std::shared_ptr<Channel> held = channel_;
  replace(channel);
  channel->adopt(std::move(held));
  is_open_ = true;
}

void ChannelSlot::vacate(const Channel& channel) {
  std::lock_guard lock(mutex_);
  if (!is_open_ || channel_.get() != &channel) return;
  is_open_ = false;
  std::shared_ptr<Channel> before = channel_;
  replace(holding_channel(name_));
}

// The mutex is held. Returns when nobody uses the channel before any more. A sender that waits for
// room in the new one, which is not started yet, may look as if it did: hence the limit.
void ChannelSlot::replace(std::shared_ptr<Channel> channel) {
  sending_to_.store(channel.get(), std::memory_order_seq_cst);  // see send()
  std::shared_ptr<Channel> before = std::exchange(channel_, std::move(channel));
  if (before->options().on_full == OnFull::kBlock) before->refuse();  // wakes those who wait
  auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (inside_.load(std::memory_order_acquire) != 0) {
    if (std::chrono::steady_clock::now() > limit) {
      still_used_.push_back(std::move(before));
      return;
    }
    std::this_thread::yield();
  }
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
  return std::memchr(mask.data, 1, mask.size()) != nullptr;
}

// One call site of one executable.
class TapSite final : public Site {
 public:
  TapSite(ChannelSlot& slot, std::shared_ptr<Consumer> consumer, TapSpec spec, Lanes lanes)
      : slot_(slot),
        consumer_(std::move(consumer)),
        spec_(std::move(spec)),
        lanes_(std::move(lanes)) {}

  ~TapSite() override {
    if (sender_.source != nullptr) slot_.retire(*sender_.source);
  }

  Outcome run(const Call& call) override {
    if (!described_.load(std::memory_order_acquire)) describe(call);  // pairs with its release
    std::size_t sent = spec_.values + (spec_.where ? 1 : 0);
    if (wanted(call)) slot_.send(Parcel{sender_, call.operands.first(sent), call.context});
    for (std::size_t i = 0; i < call.results.size(); ++i) {
      const ArrayView& from = call.operands[i < spec_.returned ? i : sent + i - spec_.returned];
      const ArrayView& to = call.results[i];  // the same memory already where XLA kept the alias
      if (to.data != from.data && to.nbytes() != 0) std::memcpy(to.data, from.data, to.nbytes());
    }
    return Outcome::success();
  }

 private:
  bool wanted(const Call& call) noexcept {
    if (spec_.where && !any_true(call.operands[spec_.values])) return false;
    if (spec_.every <= 1) return true;
    // Relaxed: a count; which of two simultaneous calls is the tenth is nobody's business.
    return executions_.fetch_add(1, std::memory_order_relaxed) % spec_.every == 0;
  }

  void check(const Call& call) const {
    lanes_.check(call.operands, {});  // sent from the host, a record comes without results
    std::size_t sent = spec_.values + (spec_.where ? 1 : 0);
    std::size_t passing = call.results.size() - std::min(spec_.returned, call.results.size());
    bool short_of_results = !call.results.empty() && spec_.returned > call.results.size();
    if (call.operands.size() < sent + passing || short_of_results) {
      throw Error(ErrorCode::kInvalidArgument, "tap '" + spec_.name + "'",
                  std::to_string(sent + passing) + " operands",
                  std::to_string(call.operands.size()));
    }
  }

  // Shapes are known from the first call on.
  void describe(const Call& call) {
    std::lock_guard lock(mutex_);
    if (sender_.source != nullptr) return;
    auto source = std::make_shared<Source>();
    source->id = next_source_id();
    source->name = spec_.name;
    source->description = spec_.description;
    source->role = spec_.role;
    source->lanes = lanes_;
    source->value_leaves = spec_.values;
    source->has_where = spec_.where;
    source->consumer = consumer_;
    check(call);
    for (std::size_t i = 0; i < spec_.values + (spec_.where ? 1 : 0); ++i) {
      const ArrayView& view = call.operands[i];
      LeafType leaf{i < spec_.paths.size() ? spec_.paths[i] : "",
                    view.dtype,
                    {view.shape().begin(), view.shape().end()},
                    source->payload_bytes,
                    view.nbytes()};
      source->payload_bytes += align_record(leaf.nbytes);
      source->leaves.push_back(std::move(leaf));
    }
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
  std::atomic<std::int64_t> executions_{0};
};

std::int64_t number(std::string_view key, std::string_view text) {
  std::int64_t value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw Error(ErrorCode::kInvalidArgument, "a tap's '" + std::string(key) + "'", "a count",
                "'" + std::string(text) + "'");
  }
  return value;
}

Role role_of(std::string_view text) {
  if (text == "primal") return Role::kPrimal;
  if (text == "tangent") return Role::kTangent;
  if (text == "cotangent") return Role::kCotangent;
  throw Error(ErrorCode::kInvalidArgument, "a tap's 'role'", "primal, tangent or cotangent",
              "'" + std::string(text) + "'");
}

void set_field(TapSpec& spec, std::string_view key, std::string_view value) {
  if (key == "name") {
    spec.name = value;
  } else if (key == "role") {
    spec.role = role_of(value);
  } else if (key == "repeated") {
    spec.repeated = number(key, value) != 0;
  } else if (key == "every") {
    spec.every = number(key, value);
  } else if (key == "values") {
    spec.values = static_cast<std::size_t>(number(key, value));
  } else if (key == "returned") {
    spec.returned = static_cast<std::size_t>(number(key, value));
  } else if (key == "where") {
    spec.where = number(key, value) != 0;
  } else if (key == "path") {
    spec.paths.emplace_back(value);
  } else {
    throw Error(ErrorCode::kInvalidArgument, "a tap's description", "a known key",
                "'" + std::string(key) + "'");
  }
}

}  // namespace

TapSpec parse_tap_spec(const std::string& text) {
  TapSpec spec;
  std::string_view rest = text;
  while (!rest.empty()) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.empty()) break;
    std::size_t equals = line.find('=');
    if (equals == std::string_view::npos) {
      throw Error(ErrorCode::kInvalidArgument, "a tap's description", "lines of key=value",
                  "'" + std::string(line) + "'");
    }
    set_field(spec, line.substr(0, equals), line.substr(equals + 1));
  }
  spec.description = rest;
  return spec;
}

TapCallee::TapCallee(std::string name, const std::string& channel,
                     std::shared_ptr<Consumer> consumer)
    : name_(std::move(name)),
      slot_(Channels::instance().slot(channel)),
      consumer_(std::move(consumer)) {}

std::shared_ptr<Site> TapCallee::specialise(SiteSpec spec) {
  return std::make_shared<TapSite>(slot_, consumer_, parse_tap_spec(spec.spec),
                                   std::move(spec.lanes));
}

}  // namespace callgate

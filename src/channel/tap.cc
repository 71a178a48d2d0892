// SPDX-License-Identifier: Apache-2.0
// A tap's call: the records that it sends, and the checks of its call site.
#include "channel/tap.h"

#include <algorithm>
#include <utility>

namespace callgate {
namespace {

std::int64_t count_of(const Attributes& held, std::string_view name, std::int64_t missing = 0) {
  const std::int64_t value = held.integer(name, missing);
  if (value >= 0) return value;
  throw Error("a tap's '" + std::string(name) + "'", "a count", std::to_string(value));
}

Role role_of(std::string_view text) {
  for (Role role : {Role::kPrimal, Role::kTangent, Role::kCotangent})
    if (role_name(role) == text) return role;
  throw Error("a tap's 'role'", "primal, tangent or cotangent", "'" + std::string(text) + "'");
}

// `starts` has the numbers of one shard after another.
Padded padded_of(const Attributes& held) {
  Padded padded;
  padded.leaf = static_cast<std::size_t>(count_of(held, "leaf"));
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

}  // namespace

TapSpec TapSpec::of(const Attributes& held, std::string description) {
  const Attributes& tap = held.dictionary("tap");
  TapSpec spec;
  spec.name = tap.text("name");
  if (tap.find("role") != nullptr) spec.role = role_of(tap.text("role"));
  spec.ordered = tap.flag("ordered");
  spec.repeated = tap.flag("repeated");
  spec.has_where = tap.flag("where");
  spec.on_device = tap.flag("on_device");
  spec.every = count_of(tap, "every", 1);
  spec.returned = static_cast<std::size_t>(count_of(tap, "returned"));
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

TapSite::TapSite(ChannelSlot& slot, std::shared_ptr<Consumer> consumer, TapSpec spec, Lanes lanes)
    : slot_(slot),
      consumer_(std::move(consumer)),
      spec_(std::move(spec)),
      lanes_(std::move(lanes)),
      executions_(spec_.every > 1 ? std::make_unique<DeviceCounters>() : nullptr) {}

void TapSite::run(const Call& call) {
  if (Channel::abandoned()) [[unlikely]]
    throw Error::verbatim(
        ErrorCode::kAborted,
        "tap '" + spec_.name +
            "': this process was forked from one that had channels, whose threads are not here; "
            "start processes with multiprocessing's 'spawn' or 'forkserver'");
  describe(call);
  if (is_sent(call)) send(call);
  skip(call);
}

std::optional<std::size_t> TapSite::reads(const Call& call) {
  describe(call, /*on_device=*/spec_.on_device);
  return spec_.has_where || is_due(call) ? std::optional(sent()) : std::nullopt;
}

std::size_t TapSite::reads_replayed(const Call& call) {
  describe(call);
  return sent();
}

bool TapSite::run_replayed(const Call& call) {
  if (is_sent(call)) send(call);
  return true;
}

bool TapSite::drop(const Call& call) noexcept {
  slot_.send(Parcel{sender_, {}, call.context, /*handle=*/0, /*lost=*/true});
  return true;
}

void TapSite::run_kept(const Call& call, const std::shared_ptr<DeviceMemory>& memory) {
  const std::size_t values = spec_.value_leaves;
  if (spec_.has_where && !is_sent(call)) return;
  KeptArrays::One one{memory, {}};
  for (const ArrayView& value : call.operands.first(values)) one.data.push_back(value.data);
  const std::span<const ArrayView> control = call.operands.subspan(values, sent() - values);
  KeptArrays& kept = *sender_.source->kept;
  const std::uint64_t handle = kept.keep(std::move(one));
  if (!slot_.send(Parcel{sender_, control, call.context, handle})) kept.drop(handle);
}

void TapSite::skip(const Call& call) noexcept {
  for (std::size_t i = 0; i < call.results.size(); ++i)  // the memory may already be the same
    copy_to(call.results[i], call.operands[copied_to(i)].data);
}

void TapSite::send(const Call& call) noexcept {
  const std::span<const ArrayView> leaves = call.operands.first(sent());
  const bool kept = call.memory != nullptr && is_payload(leaves);
  slot_.send(Parcel{.sender = sender_,
                    .leaves = leaves,
                    .context = call.context,
                    .memory = kept ? call.memory : nullptr});
}

bool TapSite::is_payload(std::span<const ArrayView> leaves) const noexcept {
  const char* first = nullptr;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const char* start = static_cast<const char*>(leaves[i].data) - sender_.source->leaves[i].offset;
    if (i != 0 && start != first) return false;
    first = start;
  }
  return first != nullptr;
}

bool TapSite::is_sent(const Call& call) noexcept {
  if (!spec_.has_where) return is_due(call);
  const ArrayView& mask = call.operands[spec_.value_leaves];
  return mask.size() != 0 && std::memchr(mask.data, 1, mask.size()) != nullptr && is_due(call);
}

bool TapSite::is_due(const Call& call) noexcept {
  if (executions_ == nullptr) return true;
  return executions_->next(call.context.device) % static_cast<std::uint64_t>(spec_.every) == 0;
}

void TapSite::check(const Call& call) const {
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

void TapSite::check_sizes(const Call& call, std::size_t i) const {
  const Padded& padded = spec_.padded[i];
  const ArrayView& sizes = call.operands[spec_.value_leaves - spec_.padded.size() + i];
  const auto count = sizes.rank == 0 ? -1 : sizes.dims[sizes.rank - 1];
  auto fits = [&](const auto& numbers) { return std::ssize(numbers) == count; };
  const bool whole =
      padded.starts.empty() || (fits(padded.whole) && std::ranges::all_of(padded.starts, fits));
  if (sizes.dtype != DType::kS32 || count < 0 || !whole)
    fail("int32 sizes of its padded leaf " + std::to_string(padded.leaf), to_string(sizes));
}

void TapSite::describe(const Call& call, bool on_device) {
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
  std::size_t host_bytes = kRecordAlignment;  // for the handle
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

// See the header. The lock is held for a scan of the slots at most, and never while waking.
#include "core/progress.h"

#include <algorithm>

#include "core/error.h"

namespace callgate {
namespace {

using Phase = ProgressState::Phase;

// Time between two updates of a bar that chooses by time: far above what an update costs.
constexpr std::int64_t kUpdateNs = 5'000'000;
constexpr std::int64_t kGrowth = 8;  // a first, slow step must not decide for long
constexpr std::int64_t kMostSteps = std::int64_t{1} << 30;
constexpr std::int64_t kNoRun = -1;     // any other number may be a run's, a negative one, too
constexpr std::int32_t kIndexBits = 8;  // of a handle; the rest is its generation
constexpr std::int32_t kGenerations = std::int32_t{1} << (31 - kIndexBits);

std::int64_t next_chunk(std::int64_t steps, std::int64_t elapsed_ns) noexcept {
  steps = std::clamp<std::int64_t>(steps, 1, kMostSteps);
  double wanted = static_cast<double>(steps) * kUpdateNs /
                  static_cast<double>(std::max<std::int64_t>(elapsed_ns, 1));
  double most = static_cast<double>(std::min(steps * kGrowth, kMostSteps));
  return static_cast<std::int64_t>(std::clamp(wanted, 1.0, most));
}

}  // namespace

std::int64_t ProgressBoard::now() const {
  using std::chrono::nanoseconds, std::chrono::steady_clock;
  return (clock_ ? clock_() : nanoseconds(steady_clock::now().time_since_epoch())).count();
}

ProgressBoard::Slot* ProgressBoard::find(std::int32_t handle) noexcept {
  if (handle <= 0) return nullptr;
  Slot& slot = slots_[static_cast<std::size_t>(handle) % kSlots];
  // Acquire: pairs with the store in begin(), behind the slot's other fields.
  return slot.handle.load(std::memory_order_acquire) == handle ? &slot : nullptr;
}

// One device of a run draws; a run without an id, or with one device, always does.
bool ProgressBoard::owns(const CallContext& context) {
  if (context.run == kNoRun) return true;
  for (const Owner& owner : owners_)
    if (owner.run == context.run) return owner.device == context.device;
  owners_[next_owner_] = {context.run, context.device};
  next_owner_ = (next_owner_ + 1) % kOwners;
  return true;
}

// The slot of the same bar, which has ended; else a free one; else the one that ended first.
ProgressBoard::Slot* ProgressBoard::take(const ProgressStart& start, const CallContext& context) {
  Slot* found = nullptr;
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    // Relaxed: phases change to live or free under the lock alone.
    Phase phase = slot.phase.load(std::memory_order_relaxed);
    if (phase == Phase::kEnded && slot.run == context.run && slot.site == start.site) return &slot;
    if (phase == Phase::kFree && found == nullptr) found = &slot;
    if (phase == Phase::kLive || phase == Phase::kFree) continue;
    if (oldest == nullptr || slot.bar < oldest->bar) oldest = &slot;
  }
  if (found == nullptr) found = oldest;
  if (found != nullptr) found->bar = next_bar_++;
  return found;
}

std::int32_t ProgressBoard::begin(const std::string& spec, const ProgressStart& start,
                                  const CallContext& context) {
  std::int32_t handle = 0;
  std::function<void()> wake;
  {
    std::lock_guard lock(mutex_);
    if (!owns(context)) return 0;
    Slot* slot = take(start, context);
    if (slot == nullptr) return 0;
    generation_ = generation_ % (kGenerations - 1) + 1;
    handle = (generation_ << kIndexBits) | static_cast<std::int32_t>(slot - slots_.data());
    slot->spec = spec;
    slot->site = start.site;
    slot->run = context.run;
    slot->device = context.device;
    slot->total = start.total;
    slot->began_ns = now();
    // Relaxed: all of it is published by the handle's release below.
    slot->every.store(start.every, std::memory_order_relaxed);
    slot->count.store(0, std::memory_order_relaxed);
    slot->updated_ns.store(slot->began_ns, std::memory_order_relaxed);
    slot->phase.store(Phase::kLive, std::memory_order_relaxed);
    slot->handle.store(handle, std::memory_order_release);
    if (!std::exchange(drawn_, true)) wake = wake_;
  }
  if (wake) wake();
  return handle;
}

void ProgressBoard::store_count(Slot& slot, std::uint32_t count) noexcept {
  // Relaxed: one program's loop is the only writer, and whoever draws takes any recent value.
  std::int64_t before = slot.count.load(std::memory_order_relaxed);
  auto more = static_cast<std::int32_t>(count - static_cast<std::uint32_t>(before));
  if (more > 0) slot.count.store(before + more, std::memory_order_relaxed);
}

std::int32_t ProgressBoard::update(std::int32_t handle, std::uint32_t count) noexcept {
  Slot* slot = find(handle);
  // Relaxed: see store_count().
  if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) != Phase::kLive)
    return static_cast<std::int32_t>(kMostSteps);
  std::int64_t before = slot->count.load(std::memory_order_relaxed);
  store_count(*slot, count);
  std::int64_t every = slot->every.load(std::memory_order_relaxed);
  if (every > 0) return static_cast<std::int32_t>(std::min(every, kMostSteps));
  std::int64_t time = now();
  std::int64_t elapsed = time - slot->updated_ns.exchange(time, std::memory_order_relaxed);
  std::int64_t steps = slot->count.load(std::memory_order_relaxed) - before;
  return static_cast<std::int32_t>(next_chunk(steps, elapsed));
}

void ProgressBoard::end(std::int32_t handle, std::uint32_t count) noexcept {
  Slot* slot = find(handle);
  if (slot == nullptr) return;
  store_count(*slot, count);
  slot->updated_ns.store(now(), std::memory_order_relaxed);  // published by the phase below
  Phase live = Phase::kLive;
  // Release: who reads the end reads the last count, too. A failed bar stays failed.
  slot->phase.compare_exchange_strong(live, Phase::kEnded, std::memory_order_release,
                                      std::memory_order_relaxed);
}

void ProgressBoard::step(const std::string& spec, const ProgressStart& start,
                         const CallContext& context) {
  if (start.total <= 0) return;  // its end could not be told
  std::int32_t handle = 0;
  {
    std::lock_guard lock(mutex_);
    for (const Slot& slot : slots_) {
      // Relaxed: see take().
      bool live = slot.phase.load(std::memory_order_relaxed) == Phase::kLive;
      if (live && slot.run == context.run && slot.site == start.site &&
          slot.device == context.device)
        handle = slot.handle.load(std::memory_order_relaxed);
    }
  }
  if (handle == 0) handle = begin(spec, start, context);
  Slot* slot = find(handle);
  if (slot == nullptr) return;
  // Relaxed: see store_count().
  auto count = static_cast<std::uint32_t>(slot->count.load(std::memory_order_relaxed)) + 1;
  store_count(*slot, count);
  if (slot->count.load(std::memory_order_relaxed) >= start.total) end(handle, count);
}

void ProgressBoard::fail(std::int64_t run) noexcept {
  if (run == kNoRun) return;
  std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    Phase live = Phase::kLive;
    // Relaxed: the count stands since its last update, whoever reads it.
    if (slot.run == run)
      slot.phase.compare_exchange_strong(live, Phase::kFailed, std::memory_order_relaxed);
  }
}

std::vector<ProgressState> ProgressBoard::poll() const {
  std::lock_guard lock(mutex_);
  std::vector<ProgressState> states;
  for (const Slot& slot : slots_) {
    // Acquire: pairs with end(), so that an ended bar has its last count.
    Phase phase = slot.phase.load(std::memory_order_acquire);
    if (phase == Phase::kFree) continue;
    std::int64_t time = now(), until = time;
    if (phase != Phase::kLive) until = slot.updated_ns.load(std::memory_order_relaxed);
    states.push_back({slot.handle.load(std::memory_order_relaxed), slot.bar, slot.spec, slot.run,
                      slot.total, slot.count.load(std::memory_order_relaxed), time - slot.began_ns,
                      until - slot.began_ns, phase});
  }
  return states;
}

void ProgressBoard::release(std::int32_t handle) noexcept {
  std::lock_guard lock(mutex_);
  Slot* slot = find(handle);
  // Relaxed: under the lock.
  if (slot == nullptr || slot->phase.load(std::memory_order_relaxed) == Phase::kLive) return;
  slot->handle.store(0, std::memory_order_relaxed);
  slot->phase.store(Phase::kFree, std::memory_order_relaxed);
}

bool ProgressBoard::retire() {
  std::lock_guard lock(mutex_);
  bool empty = std::ranges::all_of(slots_, [](const Slot& slot) {
    // Relaxed: under the lock.
    return slot.phase.load(std::memory_order_relaxed) == Phase::kFree;
  });
  if (empty) drawn_ = false;
  return empty;
}

// --- The callee: a call reads one or two scalars and writes one ----------------------------------

namespace {

enum class Kind : std::uint8_t { kBegin, kBeginOf, kUpdate, kEnd, kStep };

// By kind, with the number of operands that are read; what follows are anchors.
constexpr std::array<std::pair<std::string_view, std::size_t>, 5> kKinds{
    {{"begin", 0}, {"begin_of", 1}, {"update", 2}, {"end", 2}, {"step", 0}}};

class ProgressSite final : public Site {
 public:
  ProgressSite(ProgressBoard& board, Kind kind, ProgressStart start, std::string text)
      : board_(board), kind_(kind), start_(start), text_(std::move(text)) {}

  void run(const Call& call) override {
    auto is_scalar = [](const ArrayView& view) {
      return view.dtype == DType::kS32 && view.rank == 0;
    };
    std::size_t scalars = kKinds[static_cast<std::size_t>(kind_)].second;
    if (call.operands.size() < scalars ||
        !std::ranges::all_of(call.operands.first(scalars), is_scalar) ||
        !std::ranges::all_of(call.results, is_scalar))
      throw Error(ErrorCode::kInvalidArgument, "progress: expected s32 scalars");
    std::int32_t result = answer(call);
    if (!call.results.empty()) *static_cast<std::int32_t*>(call.results[0].data) = result;
  }

 private:
  std::int32_t answer(const Call& call) {
    auto scalar = [&](std::size_t i) {
      return *static_cast<const std::int32_t*>(call.operands[i].data);
    };
    auto count = [&] { return static_cast<std::uint32_t>(scalar(1)); };
    ProgressStart start = start_;
    switch (kind_) {
      case Kind::kBeginOf: start.total = std::max(scalar(0), 0); [[fallthrough]];
      case Kind::kBegin: return board_.begin(text_, start, call.context);
      case Kind::kUpdate: return board_.update(scalar(0), count());
      case Kind::kEnd: board_.end(scalar(0), count()); break;
      case Kind::kStep: board_.step(text_, start, call.context); break;
    }
    return 0;
  }

  ProgressBoard& board_;
  Kind kind_;
  ProgressStart start_;
  std::string text_;
};

}  // namespace

std::shared_ptr<Site> ProgressCallee::specialise(SiteSpec spec) {
  static std::atomic<std::int64_t> sites{0};
  const Attributes& held = spec.held.dictionary("progress");
  const std::string_view kind = held.text("kind");
  const auto* known = std::ranges::find(kKinds, kind, &decltype(kKinds)::value_type::first);
  if (known == kKinds.end())
    throw Error("a progress bar's call", "begin, begin_of, update, end or step",
                "'" + std::string(kind) + "'");
  // Relaxed: any distinct numbers will do.
  const std::int64_t site = sites.fetch_add(1, std::memory_order_relaxed) + 1;
  return std::make_shared<ProgressSite>(
      board_, static_cast<Kind>(known - kKinds.begin()),
      ProgressStart{site, held.integer("every"), held.integer("total", -1)}, std::move(spec.spec));
}

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// The places in programs that read knobs and requests to stop.
#include "cells/steer.h"

namespace callgate {
namespace {

// A place in a program that reads a cell. `read(run, once, place)` returns the cell's value for the
// run; `place` is where the result is written (see Runs; null for a copy).
template <typename Cell>
class CellSite final : public Site {
 public:
  CellSite(std::shared_ptr<Cell> cell, const SiteSpec& spec)
      : cell_(std::move(cell)), once_(spec.held.integer("once", 0) != 0) {
    std::int64_t devices = spec.held.integer("devices", 1);
    if (devices > 1) common_.emplace(static_cast<std::size_t>(devices));
  }

  bool reads_context() const noexcept override { return common_.has_value(); }

  void run(const Call& call) override {
    MainThread::look();
    const CallContext& at = call.context;
    const void* place = at.stream == nullptr ? call.results[0].data : nullptr;
    auto value = [&] { return cell_->read(at.run, once_, place); };
    std::uint64_t bits = common_ ? common_->read(at.run, at.device, place, value) : value();
    // A program holds a result of the cell's size. A forged program gets at most its own size.
    std::memcpy(call.results[0].data, &bits, std::min(sizeof(bits), call.results[0].nbytes()));
  }

 private:
  std::shared_ptr<Cell> cell_;
  const bool once_;  // all reads of a run get the first read's value
  std::optional<CommonReads> common_;
};

}  // namespace

std::uint64_t& CommonReads::Run::next_of(std::int64_t device) {
  auto it = std::ranges::find(next, device, &std::pair<std::int64_t, std::uint64_t>::first);
  return it != next.end() ? it->second : next.emplace_back(device, 0).second;
}

void CommonReads::Run::drop_read_by_all(std::size_t devices) {
  while (values.size() > kAhead ||
         (next.size() >= devices && !values.empty() &&
          std::ranges::all_of(next, [this](const auto& one) { return one.second > first; }))) {
    values.pop_front();
    ++first;
  }
}

std::shared_ptr<Site> KnobCallee::specialise(SiteSpec spec) {
  return std::make_shared<CellSite<KnobCallee>>(shared_from_this(), spec);
}

std::uint64_t KnobCallee::read(std::int64_t run, bool once, const void* place) {
  if (!once || run == -1) return get();  // -1: XLA has no number for the run
  std::lock_guard lock(mutex_);
  return runs_.of(run, 0, place, [&] { return get(); });
}

std::shared_ptr<Site> StopCallee::specialise(SiteSpec spec) {
  return std::make_shared<CellSite<StopCallee>>(shared_from_this(), spec);
}

void StopCallee::dispatched() {
  std::lock_guard lock(mutex_);
  if (dispatches_.size() == kDispatches) dispatches_.pop_front(), ++first_;
  dispatches_.push_back(StopRequests::count());
}

std::uint64_t StopCallee::read(std::int64_t run, bool /*once*/, const void* place) {
  auto number = static_cast<std::uint32_t>(run);
  std::uint64_t known = slots_[number % slots_.size()].load(std::memory_order_relaxed);
  bool is_known = known != 0 && known >> 32 == number;
  std::uint32_t before = is_known ? static_cast<std::uint32_t>(known) : begin(number, place);
  return StopRequests::count() != before ? 1 : 0;
}

std::uint32_t StopCallee::begin(std::uint32_t run, const void* place) {
  std::lock_guard lock(mutex_);
  std::uint32_t before = runs_.of(run, 0, place, [&] {
    if (!zeroth_) zeroth_ = run;
    std::uint32_t number = run - *zeroth_ - first_;
    return number < dispatches_.size() ? dispatches_[number] : StopRequests::count();
  });
  // Relaxed: the number is complete in itself, and a reader that finds another run asks again.
  slots_[run % slots_.size()].store(std::uint64_t{run} << 32 | before, std::memory_order_relaxed);
  return before;
}

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// Reads the numbers of each bar in a call and writes the result.
#include "cells/progress_callee.h"

#include <algorithm>
#include <atomic>

namespace callgate {

void ProgressSite::run(const Call& call) {
  if (kind_ == Kind::kStep) {
    board_.step(text_, start_, call.context);
    return;
  }
  const Row& row = kKinds[static_cast<std::size_t>(kind_)];
  check(call, row);
  const std::size_t bars = (row.begins ? call.results : call.operands)[0].size();
  auto integer = [&](std::size_t operand, std::size_t bar) {
    return static_cast<const std::int32_t*>(call.operands[operand].data)[bar];
  };
  auto number = [&](std::size_t operand, std::size_t bar) {
    return static_cast<const float*>(call.operands[operand].data)[bar];
  };
  auto* result = static_cast<std::int32_t*>(call.results[0].data);
  if (row.begins) {
    for (std::size_t i = 0; i < bars; ++i) {
      ProgressStart start = start_;
      if (call.results[0].rank != 0) start.lane = static_cast<std::int64_t>(i);
      if (kind_ == Kind::kBeginOf) start.total = std::max(integer(0, i), 0);
      if (kind_ == Kind::kBeginAt) start.first = number(0, i), start.last = number(1, i);
      result[i] = board_.begin(text_, start, call.context);
    }
    return;
  }
  *result = kind_ == Kind::kEnd ? 0 : kNever;
  for (std::size_t i = 0; i < bars; ++i) {
    const auto count = static_cast<std::uint32_t>(integer(1, i));
    if (kind_ == Kind::kEnd || integer(3, i) == 0) {
      board_.end(integer(0, i), count, number(2, i));
    } else {
      *result = std::min(*result, board_.update(integer(0, i), count, number(2, i)));
    }
  }
}

void ProgressSite::check(const Call& call, const Row& row) const {
  auto is_of = [](const ArrayView& view, DType dtype) {
    return view.dtype == dtype && view.rank <= 1;
  };
  bool good = call.results.size() == 1 && is_of(call.results[0], DType::kS32) &&
              call.operands.size() >= row.least && (row.begins || call.results[0].rank == 0);
  for (std::size_t i = 0; good && i < row.least; ++i) {
    const bool is_float = row.begins ? kind_ == Kind::kBeginAt : i == 2;
    good = is_of(call.operands[i], is_float ? DType::kF32 : DType::kS32) &&
           call.operands[i].size() == (row.begins ? call.results[0] : call.operands[0]).size();
  }
  if (!good)
    throw Error(ErrorCode::kInvalidArgument,
                "progress: expected numbers of each bar, got " + to_string(call.operands));
}

std::shared_ptr<Site> ProgressCallee::specialise(SiteSpec spec) {
  static std::atomic<std::int64_t> sites{0};
  const Attributes& held = spec.held.dictionary("progress");
  const std::string_view kind = held.text("kind");
  constexpr auto& kKinds = ProgressSite::kKinds;
  const auto* known =
      std::ranges::find(kKinds, kind, [](const ProgressSite::Row& row) { return row.kind; });
  if (known == kKinds.end())
    throw Error("a progress bar's call", "begin, begin_of, begin_at, update, end or step",
                "'" + std::string(kind) + "'");
  // Relaxed: any distinct numbers work.
  const std::int64_t site = sites.fetch_add(1, std::memory_order_relaxed) + 1;
  return std::make_shared<ProgressSite>(
      board_, static_cast<ProgressSite::Kind>(known - kKinds.begin()),
      ProgressStart{
          .site = site, .every = held.integer("every"), .total = held.integer("total", -1)},
      std::move(spec.spec));
}

}  // namespace callgate

// SPDX-License-Identifier: Apache-2.0
// The callee by which programs update the board of progress bars (progress.h). Its calls read a few
// numbers of each bar and write one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "cells/progress.h"
#include "core/array_view.h"
#include "core/call.h"
#include "core/error.h"

namespace callgate {

class ProgressSite final : public Site {
 public:
  enum class Kind : std::uint8_t { kBegin, kBeginOf, kBeginAt, kUpdate, kEnd, kStep };
  // Each kind with its number of operands; further operands are anchors.
  struct Row {
    std::string_view kind;
    std::size_t least;
    bool begins;
  };
  static constexpr std::array<Row, 6> kKinds{{{"begin", 0, true},
                                              {"begin_of", 1, true},
                                              {"begin_at", 2, true},
                                              {"update", 4, false},
                                              {"end", 3, false},
                                              {"step", 0, false}}};

  ProgressSite(ProgressBoard& board, Kind kind, ProgressStart start, std::string text)
      : board_(board), kind_(kind), start_(start), text_(std::move(text)) {}

  void run(const Call& call) override;

 private:
  static constexpr std::int32_t kNever = std::int32_t{1} << 30;  // steps: none of the bars waits

  // Throws Error unless the arrays match the description of ProgressCallee.
  void check(const Call& call, const Row& row) const;

  ProgressBoard& board_;
  Kind kind_;
  ProgressStart start_;
  std::string text_;
};

// The callee by which programs update all bars of a process; the board outlives every site. A call
// holds a dictionary `progress` of kind, every and total. Its spec is the text that the board
// stores. The kinds are
//   begin (anchors...) -> handle       begin_of (total, anchors...) -> handle
//   begin_at (first, last, anchors...) -> handle
//   update (handle, count, at, going) -> steps until the next update; not going: its bar ends
//   end (handle, count, at, anchors...) -> 0      step (anchors...)
// All arrays are s32 scalars, except first, last and at, which are f32. In a loop with a bar per
// lane they are vectors, except the results of update and end. Anchors are values for which the
// call has to wait; their content is unused.
class ProgressCallee final : public Callee {
 public:
  static constexpr std::string_view kName = "callgate.progress";
  explicit ProgressCallee(ProgressBoard& board) : board_(board) {}
  // Throws Error(kInvalidArgument) for any other kind.
  std::shared_ptr<Site> specialise(SiteSpec spec) override;
  const std::string& name() const noexcept override { return name_; }

 private:
  ProgressBoard& board_;
  std::string name_{kName};
};

}  // namespace callgate

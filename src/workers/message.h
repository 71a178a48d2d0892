// SPDX-License-Identifier: Apache-2.0
// The lanes of a call on their way into a worker's memory, and their results on the way back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/lanes.h"
#include "workers/pool.h"

namespace callgate {

// A definition that workers need before they run a site, with a number unique in the process.
struct Definition {
  std::uint64_t id = 0;
  std::uint64_t of = 0;  // the definition on which this one builds, or 0
  std::string bytes;
};

// The lanes first, first + step, ...
struct Piece {
  std::int64_t first = 0, count = 0, step = 1;
  int tries = 0;  // that failed because their workers ended
};

// A request without its lanes.
struct Asked {
  std::int64_t first_lane = 0;  // the number of the call's first lane
  bool check_writes = false;
  bool send_results = false;  // results are sent with their initial content
};

// The arrays of a call, lane by lane. Borrows all of it.
class LaneArrays {
 public:
  // `lanes` is null for a call without batch levels.
  LaneArrays(const Call& call, const Lanes* lanes) : call_(call), lanes_(lanes) {}

  std::int64_t count() const noexcept { return lanes_ == nullptr ? 1 : lanes_->count(); }
  std::size_t bytes_of_lane() const;

  // Writes the request for a piece into the memory of a worker that the caller has taken, and wakes
  // the worker. The worker adds to the event count `claim.number` after its answer, and may drop
  // the definitions `forgotten`. Throws Error if there is no memory.
  void ask(Worker& worker, const Piece& piece, std::span<const Definition* const> definitions,
           std::span<const std::uint64_t> forgotten, const Claim& claim, const Asked& how) const;
  // Copies the results of a piece that the worker has run.
  void take_results(const Worker& worker, const Piece& piece) const;

 private:
  struct Sources;

  ArrayView of_lane(const ArrayView& whole) const noexcept;

  const Call& call_;
  const Lanes* lanes_;
};

}  // namespace callgate

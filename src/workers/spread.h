// SPDX-License-Identifier: Apache-2.0
// One call, spread over the workers of a pool.
//
// The calling thread takes workers as the pool grants them, hands each a piece of the lanes, sleeps
// until one answers, and copies its results out. Pieces are as large as keeps all workers busy to
// the end, but not so small that handing them out would cost more than running them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "core/call.h"
#include "workers/message.h"
#include "workers/pool.h"

namespace callgate {

// The fixed part of the calls of a site.
struct SpreadOptions {
  std::span<const Definition* const> definitions;  // the last one is what runs
  std::chrono::nanoseconds timeout{0};             // of a call; 0 for none
  int retries = 0;                                 // of a lane whose worker has ended
  bool in_order = false;                           // one lane after the other
  bool by_lane = false;                            // a lane always on the same worker
  std::int64_t first_lane = 0;                     // the number of this call's first lane, for that
  bool check_writes = false;
  std::chrono::nanoseconds loading{0};  // that a worker may take to load what it runs; 0: no limit
  // The numbers of the workers that are to run the lanes; none for any.
  std::span<const std::uint64_t> placed;
  // If not empty, it gets for each lane the number of the worker that ran it.
  std::span<std::uint64_t> ran_on;
  bool send_results = false;  // results begin as they are, for who reads them before he writes
  // How often Ctrl-C had come when a call began that no program makes: what is more ends it.
  std::optional<std::uint32_t> interrupts;
};

// How long a lane of a site takes, as its calls have shown. Relaxed throughout: a hint.
using LaneTime = std::atomic<std::int64_t>;

// Makes the call; `lanes` are null where it has no batch levels. Throws WorkerFailure, or Error.
void spread(Pool& pool, const SpreadOptions& options, const Call& call, const Lanes* lanes,
            LaneTime& lane_time);

}  // namespace callgate

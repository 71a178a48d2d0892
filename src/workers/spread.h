// SPDX-License-Identifier: Apache-2.0
// One call, spread over the workers of a pool.
//
// The calling thread takes workers as the pool grants them, assigns each a piece of the lanes,
// sleeps until one answers, and copies its results. Pieces are sized so that all workers stay busy
// to the end, but are large enough that assigning them costs less than running them.
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

// The fixed part of a site's calls.
struct SpreadOptions {
  std::span<const Definition* const> definitions;  // the last one runs
  std::chrono::nanoseconds timeout{0};             // of a call; 0 for none
  int retries = 0;                                 // of a lane whose worker has ended
  bool in_order = false;                           // one lane after the other
  bool by_lane = false;                            // a lane always runs on the same worker
  std::int64_t first_lane = 0;                     // this call's first lane, for by_lane
  bool check_writes = false;
  std::chrono::nanoseconds loading{0};  // the time limit for loading the code; 0: none
  // The numbers of the workers for the lanes; empty for any.
  std::span<const std::uint64_t> placed;
  // If not empty, it gets for each lane the number of its worker.
  std::span<std::uint64_t> ran_on;
  bool send_results = false;  // with their initial content, for functions that read it
  // The number of interrupts at the start of a call that belongs to no program: a later one ends
  // it.
  std::optional<std::uint32_t> interrupts;
};

// The measured duration of a site's lane. Relaxed throughout: a hint.
using LaneTime = std::atomic<std::int64_t>;

// Makes the call; `lanes` is null without batch levels. Throws WorkerFailure or Error.
void spread(Pool& pool, const SpreadOptions& options, const Call& call, const Lanes* lanes,
            LaneTime& lane_time);

}  // namespace callgate

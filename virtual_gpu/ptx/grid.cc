// SPDX-License-Identifier: Apache-2.0
// A launch: clusters shared out among the host's threads. See machine.h.
//
// Each host thread takes clusters in their order and runs one until it ends or has had its share of
// steps; then it starts the next one and comes back to the first later. So a block may wait for
// what an earlier one writes, and, in a cooperative launch, whose clusters all start at once, for
// any.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "machine.h"

namespace vgpu::ptx {
namespace {

constexpr std::uint64_t kSlice = 1U << 20, kCooperativeSlice = 1U << 13;
constexpr std::uint64_t kStepLimit = std::uint64_t{1} << 40;

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

class Run {
 public:
  Run(GridState& grid, std::uint64_t clusters) : grid_(grid), clusters_(clusters) {}

  Outcome all(std::uint64_t threads) {
    {
      std::vector<std::jthread> others;
      for (std::uint64_t i = 1; i < threads; ++i) others.emplace_back([this] { work(); });
      work();
    }
    return outcome_;
  }

 private:
  void work() {
    Worker worker(grid_);
    std::deque<std::unique_ptr<Cluster>> started, free;
    const bool cooperative = grid_.launch->cooperative;
    while (!grid_.stopped.load(std::memory_order_relaxed)) {
      bool more = true;
      do {
        more = start_next(started, free);
      } while (more && cooperative);
      if (started.empty()) return;
      std::unique_ptr<Cluster> cluster = std::move(started.front());
      started.pop_front();
      if (run(*cluster, worker)) {
        free.push_back(std::move(cluster));
      } else {
        started.push_back(std::move(cluster));
      }
    }
  }

  bool start_next(std::deque<std::unique_ptr<Cluster>>& started,
                  std::deque<std::unique_ptr<Cluster>>& free) {
    // Which thread takes which cluster orders nothing.
    std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    if (number >= clusters_) return false;
    if (free.empty()) free.push_back(std::make_unique<Cluster>(grid_));
    free.front()->start(number);
    started.push_front(std::move(free.front()));
    free.pop_front();
    return true;
  }

  // True when the cluster has ended.
  bool run(Cluster& cluster, Worker& worker) {
    const std::uint64_t slice = grid_.launch->cooperative ? kCooperativeSlice : kSlice;
    try {
      if (cluster.run(worker, slice) == Warp::State::kEnded) return true;
      // A count; nothing is read because of it.
      if (grid_.steps.fetch_add(slice, std::memory_order_relaxed) + slice > grid_.step_limit) {
        throw Fault{Result::kLaunchTimeout,
                    "more than " + std::to_string(grid_.step_limit) + " instructions of a warp"};
      }
    } catch (const Fault& fault) {
      stop(fault, cluster);
    }
    return false;
  }

  void stop(const Fault& fault, Cluster& cluster) {
    std::scoped_lock lock(mutex_);
    if (outcome_.result != Result::kSuccess) return;
    Dim at = cluster.block(0).index();
    outcome_.result = fault.result;
    outcome_.message = "kernel '" + grid_.program->entry->name + "', " +
                       (cluster.size() > 1 ? "cluster of block (" : "block (") +
                       std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
                       std::to_string(at.z) + "): " + fault.what;
    grid_.stopped.store(true, std::memory_order_relaxed);
  }

  GridState& grid_;
  const std::uint64_t clusters_;
  std::atomic<std::uint64_t> next_{0};
  std::mutex mutex_;
  Outcome outcome_;
};

}  // namespace

Outcome run_grid(const Program& program, const Launch& launch, Memory& memory) {
  static std::atomic<std::uint64_t> launches{0};
  GridState grid;
  grid.program = &program;
  grid.launch = &launch;
  grid.memory = &memory;
  grid.cluster = launch.cluster;
  grid.grid_id = launches.fetch_add(1, std::memory_order_relaxed);
  grid.step_limit = setting("VIRTUAL_GPU_STEPS", kStepLimit);
  const std::uint64_t clusters = launch.grid.count() / launch.cluster.count();
  const std::uint64_t threads =
      setting("VIRTUAL_GPU_THREADS", std::max(1U, std::thread::hardware_concurrency()));
  return Run(grid, clusters).all(std::min(threads, clusters));
}

}  // namespace vgpu::ptx

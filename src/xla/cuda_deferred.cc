// SPDX-License-Identifier: Apache-2.0
// Calls for which the program doesn't wait: their operands are copied while it continues, and the
// site runs on the device's completion thread after the copies. Inside a CUDA graph the copies
// belong to the graph, and a host function reports each replay to the site.
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/lifecycle.h"
#include "core/lifetime.h"
#include "cuda/completions.h"
#include "cuda/driver.h"
#include "xla/call_site.h"
#include "xla/cuda_call.h"
#include "xla/ffi.h"

namespace callgate::xla_ffi {
namespace {

// Up to this size the program's own stream copies, which takes no longer than a copy on the device.
constexpr std::size_t kCopiedInStream = std::size_t{64} << 10;

// A share of the memory that may wait for its transfer to the host. Programs are enqueued long
// before they run, so the copies of their taps could take any amount of pinned memory. Beyond the
// maximum, the program's thread waits; a call larger than the maximum waits until it is alone.
class Room : Immovable {
 public:
  // Throws if the device has failed, because no room would be freed then.
  Room(std::size_t bytes, cuda::Device& device, cuda::Stream stream) : bytes_(bytes) {
    std::unique_lock lock(all_.mutex);
    auto is_free = [&] { return all_.taken == 0 || all_.taken + bytes_ <= cuda::kMostOnTheWay; };
    while (!all_.freed.wait_for(lock, std::chrono::seconds(1), is_free))
      cuda::StreamEvent probe(device, stream);
    all_.taken += bytes_;
  }
  ~Room() {
    std::lock_guard lock(all_.mutex);
    all_.taken -= bytes_;
    all_.freed.notify_all();
  }

 private:
  struct Backlog {
    std::mutex mutex;
    std::condition_variable freed;
    std::size_t taken = 0;
  };

  std::size_t bytes_;
  Backlog& all_ = immortal<Backlog>();
};

// The host's part: runs `body` if calls may still run. An error goes to `failed`.
template <typename Body, typename Failed>
void run_late(Callee& callee, Body&& body, Failed&& failed) {
  auto run = [&] {
    ActiveCall active;
    if (!active.entered()) return refuse_at_exit(callee);
    body();
  };
  guarded(run, failed);
}

// The program already has its results: copies of operands.
void pass_on(CudaCall& call) {
  for (std::size_t i = 0; i < call.decoded.results().size(); ++i) {
    const ArrayView& to = call.decoded.results()[i];
    const ArrayView& from = call.decoded.operands()[call.call_site().site->copied_to(i)];
    auto target = cuda::address(to.data), source = cuda::address(from.data);
    if (target != source) cuda::copy_on_device(target, source, to.nbytes(), call.stream);
  }
}

// A call that a graph replays.
class CapturedCall {
 public:
  CapturedCall(const CudaCall& call, std::span<const ArrayView> sent)
      : copied_(call, sent, {}), completions_(cuda::Completions::of(call.device)) {
    completions_.order_by_streams();
    copied_.context.run = -1;  // the replaying run is unknown
    copied_.copies.fetch(call.stream);
  }

  // In a host function, which may neither call CUDA nor wait. The site takes the call at once if
  // the device has no earlier task, or gets copies on the completion thread.
  void replay() {
    auto run = [this] {
      Call call = copied_.call();
      if (!copied_.runs()) return;
      if (completions_.pending() == 0 && copied_.site->site->run_replayed(call)) return;
      auto owned = std::make_shared<OwnedCall>(call, /*private_memory=*/true);
      completions_.later([site = copied_.site, owned] {
        auto deferred = [&] {
          if (!site->site->run_replayed(owned->call())) site->site->run_deferred(owned->call());
        };
        run_late(*site->callee, deferred,
                 [&](const Error& error) { keep_failure(*site->callee, error); });
      });
    };
    run_late(*copied_.site->callee, run, [this](const Error& error) {
      auto keep = [site = copied_.site, error] { keep_failure(*site->callee, error); };
      guarded([&] { completions_.later(keep); }, [&](const Error&) { keep(); });
    });
  }

 private:
  CopiedCall copied_;
  cuda::Completions& completions_;
};

void capture(CudaCall& call, std::span<const ArrayView> sent) {
  cuda::RelaxedCapture relaxed;
  auto captured = std::make_shared<CapturedCall>(call, sent);
  auto replay = [](void* data) { static_cast<CapturedCall*>(data)->replay(); };
  cuda::check(cuda::driver().launch_host_function(call.stream, replay, captured.get()),
              "cuLaunchHostFunc");
  if (cuda::keep_in_graph(call.device, call.stream, captured)) return;
  std::lock_guard lock(call.site.mutex);
  call.site.captured.push_back(std::move(captured));
}

std::size_t nbytes(std::span<const ArrayView> views) {
  std::size_t sum = 0;
  for (const ArrayView& view : views) sum += view.nbytes();
  return sum;
}

// `to_keep` are passed to the site as copies on the device, if it wants any.
void send(CudaCall& call, std::span<const ArrayView> to_keep, std::span<const ArrayView> sent) {
  std::size_t bytes = nbytes(sent) + call.number.nbytes();
  auto room = std::make_shared<Room>(bytes + nbytes(to_keep), call.device, call.stream);
  std::shared_ptr<cuda::KeptCopies> kept;
  if (!to_keep.empty())
    kept = std::make_shared<cuda::KeptCopies>(call.device, call.stream, to_keep);
  auto copied = std::make_shared<CopiedCall>(call, sent, std::span<const ArrayView>(),
                                             /*for_keeping=*/true);
  auto& completions = cuda::Completions::of(call.device);
  auto run = [copied, kept, room](cuda::Result result) {
    // A failed stream fails its program, which reports it; the record counts as dropped.
    if (result != cuda::Result::kSuccess) {
      if (ActiveCall active; active.entered()) copied->site->site->drop({{}, {}, copied->context});
      return;
    }
    Callee& callee = *copied->site->callee;
    auto deferred = [&] {
      Site& site = *copied->site->site;
      Call on_host = copied->call();
      if (!copied->runs()) return;
      if (kept == nullptr) {
        const std::shared_ptr<void> memory = copied->copies.memory();
        if (memory != nullptr) on_host.memory = &memory;
        return site.run_deferred(on_host);
      }
      std::vector<ArrayView> operands(kept->arrays().begin(), kept->arrays().end());
      operands.insert(operands.end(), on_host.operands.begin(), on_host.operands.end());
      site.run_kept({operands, {}, on_host.context}, kept);
    };
    run_late(callee, deferred, [&](const Error& error) { callee.defer(error); });
  };
  const bool large = bytes > kCopiedInStream;
  if (completions.ordered_by_streams())
    return cuda::given(call.stream, [&] {
      std::optional<cuda::StreamEvent> arrived;
      if (large)
        arrived.emplace(copied->copies.fetch_aside(call.stream));
      else
        copied->copies.fetch(call.stream);
      completions.in_turn(call.stream, std::move(arrived), run);
    });
  constexpr auto kAsking = cuda::Device::Waiting::kAsking;
  completions.after(large ? copied->copies.fetch_aside(call.stream)
                          : copied->copies.fetch_with_event(call.stream, kAsking),
                    run);
}

}  // namespace

void run_deferred(CudaCall& call) {
  pass_on(call);
  Site& site = *call.call_site().site;
  bool captured = cuda::capturing(call.stream);
  // On several devices Ctrl-C ends no call, because others would wait; optional calls are skipped.
  if (Interrupts::ends(call.context.run) && !captured && call.callee().quiet_at_exit()) return;
  std::size_t kept = site.kept_on_device();
  if (captured && kept != 0)
    throw Error(ErrorCode::kInternal,
                "'" + call.callee().name() +
                    "' keeps copies on the device, and needs memory for them; expected a program "
                    "that is not recorded into a CUDA graph");
  std::optional<std::size_t> count =
      captured ? site.reads_replayed(call.call()) : site.reads(call.call());
  if (!count) return;
  std::span<const ArrayView> sent = call.decoded.operands().first(*count).subspan(kept);
  try {
    if (captured) return capture(call, sent);
    send(call, call.decoded.operands().first(kept), sent);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted || !site.drop(call.call())) throw;
  }
}

}  // namespace callgate::xla_ffi

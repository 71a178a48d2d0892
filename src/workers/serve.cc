// SPDX-License-Identifier: Apache-2.0
// See the header.
#include "workers/serve.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/system.h"
#include "workers/protocol.h"

namespace callgate {
namespace {

using Clock = std::chrono::steady_clock;

// Ends the process at once when its parent has ended, because no one waits for it any more. The
// parent closes the other end of the socket with its own end. If a fork's child of the parent keeps
// that end open, the changed parent's number shows it.
void end_with_parent(int socket, pid_t parent) {
  name_thread("callgate-parent");
  for (;;) {
    pollfd watched{socket, POLLIN, 0};
    int ready = poll(&watched, 1, /*milliseconds=*/1000);
    char byte = 0;
    bool closed = ready == 1 && recv(socket, &byte, 1, MSG_DONTWAIT) == 0;
    if (closed || getppid() != parent) _exit(0);
  }
}

// Not one of the program's threads: it handles no signal.
void start_watching(int socket, pid_t parent) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(end_with_parent, socket, parent).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

class Server;
thread_local Server* t_server = nullptr;

class Server {
 public:
  Server(const ServeOptions& options, Served& served)
      : memory_(options.memory, kMessages),
        calls_(options.calls, sizeof(CallEvents)),
        socket_(options.parent_socket),
        served_(served) {
    t_server = this;
  }
  ~Server() { t_server = nullptr; }

  bool interrupted() const noexcept {
    WorkerControl& control = control_of(memory_);
    // Relaxed: the signal comes later, and the answer orders nothing.
    if (control.interrupted.load(std::memory_order_relaxed) != seen_) return false;
    control.unwinding.store(seen_, std::memory_order_relaxed);
    return true;
  }

  void run() {
    for (;;) {
      next();
      memory_.follow(control_of(memory_).bytes);
      const RequestKind kind = request_of(memory_).kind;
      if (kind == RequestKind::kStop) return;
      reply_ = {};
      try {
        if (kind == RequestKind::kStart) start();
        if (kind == RequestKind::kRun) answer();
        if (kind == RequestKind::kForget) forget(request_of(memory_));
      } catch (const Raised& raised) {
        fail(raised.raised);
      }
      control_of(memory_).reply = reply_;
      // Release: a reader of it sees the reply and the results.
      control_of(memory_).answered.store(seen_, std::memory_order_release);
      if (kind != RequestKind::kRun) {
        (void)send(socket_.get(), "R", 1, MSG_NOSIGNAL);
      } else {
        (*at<CallEvents>(calls_.data(), 0))[control_of(memory_).call].add();
      }
    }
  }

 private:
  // Waits for the next request. It spins for a moment, because requests often follow each other,
  // but not on the sender's core.
  void next() {
    WorkerControl& control = control_of(memory_);
    EventCount& requests = control.requests;
    // The time in which the caller copies a megabyte out, and the next one in.
    constexpr auto kAwake = std::chrono::microseconds(100);
    if (asked_on_ != current_core()) requests.watch(seen_, kAwake);
    while (requests.now() == seen_) requests.wait(seen_, std::chrono::seconds(60));
    seen_ = requests.now();
    asked_on_ = control.asked_on;
    control.runs_on.store(current_core(), std::memory_order_relaxed);  // a hint
  }

  std::string_view text(const Extent& extent) const {
    return {at<char>(memory_.data(), extent.offset), static_cast<std::size_t>(extent.bytes)};
  }

  void start() {
    reply_.kind = ReplyKind::kUndefined;
    served_.start(text(request_of(memory_).text));
    reply_.kind = ReplyKind::kDone;
  }

  void forget(const Request& request) {
    for (std::uint32_t i = 0; i < request.forgotten; ++i)
      served_.forget(at<std::uint64_t>(memory_.data(), request.forgotten_ids)[i]);
  }

  void answer() {
    const Request request = request_of(memory_);
    std::byte* base = memory_.data();
    forget(request);
    reply_.kind = ReplyKind::kUndefined;
    for (std::uint32_t i = 0; i < request.definitions; ++i) {
      const auto& head = at<DefinitionHead>(base, request.definition_heads)[i];
      served_.define(head.id, head.of, text(head.bytes));
    }
    served_.check_writes(request.check_writes != 0);
    reply_.kind = ReplyKind::kRaised;
    control_of(memory_).running.store(seen_, std::memory_order_relaxed);  // orders nothing
    const auto begin = Clock::now();
    run_lanes(request, base);
    reply_.nanoseconds = std::chrono::nanoseconds(Clock::now() - begin).count();
    reply_.kind = ReplyKind::kDone;
  }

  void run_lanes(const Request& request, std::byte* base) {
    const std::size_t operands = request.operands, all = operands + request.results;
    views_.resize(all);
    const auto* heads = at<ArrayHead>(base, request.arrays);
    for (std::size_t i = 0; i < all; ++i)
      views_[i] = {base + heads[i].data, at<std::int64_t>(base, heads[i].dims), heads[i].rank,
                   static_cast<DType>(heads[i].dtype)};
    const std::span<ArrayView> inputs = std::span(views_).first(operands);
    const std::span<ArrayView> outputs = std::span(views_).subspan(operands);
    CallContext context;
    context.device = static_cast<std::int32_t>(request.device);
    context.run = request.run;
    const auto* places = at<std::uint64_t>(base, request.places);
    for (std::uint64_t lane = 0; lane < request.lanes; ++lane) {
      for (ArrayView& view : inputs) view.data = base + *places++;
      reply_.lane = request.first + static_cast<std::int64_t>(lane) * request.step;
      served_.run(request.site, Call{inputs, outputs, context}, request.first_lane + reply_.lane);
      for (ArrayView& view : outputs)
        view.data = static_cast<std::byte*>(view.data) + view.nbytes();
    }
  }

  // Behind the unneeded request, from the start of messages.
  void fail(const std::string& raised) {
    constexpr std::size_t kPlace = kMessages + sizeof(Request);
    memory_.grow(kPlace + raised.size());
    std::memcpy(memory_.data() + kPlace, raised.data(), raised.size());
    control_of(memory_).bytes = memory_.size();
    reply_.raised = {kPlace, raised.size()};
  }

  SharedMemory memory_, calls_;
  Descriptor socket_;
  Served& served_;
  std::uint32_t seen_ = 0;
  std::int32_t asked_on_ = -1;  // of the last request
  Reply reply_;
  std::vector<ArrayView> views_;
};

}  // namespace

bool is_interrupted() noexcept { return t_server != nullptr && t_server->interrupted(); }

void serve(const ServeOptions& options, Served& served) {
  start_watching(options.parent_socket, options.parent);
  Server(options, served).run();
}

}  // namespace callgate

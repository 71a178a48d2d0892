// SPDX-License-Identifier: Apache-2.0
// Serves a stream to all clients of a socket.
//
// One thread, "callgate-serve", accepts readers and sends without holding a lock. send() only
// passes it bytes, so a reader can't delay the channel. A reader that lags behind by more than the
// limit is disconnected. A reader beyond the limit is refused with a message, because checkpoints
// and other parts of the process need descriptors, too. send() and close() are thread-safe. The
// thread sleeps in poll(); a pipe wakes it. Sockets never block, and never raise SIGPIPE.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "channel/sinks/file.h"
#include "channel/stream_address.h"
#include "core/lifetime.h"
#include "core/system.h"

namespace callgate {

class StreamServer : Immovable {
 public:
  // The bytes that a reader may lag behind, the time that close() gives readers to catch up, and
  // the maximum number of readers, which is also limited to a quarter of the process's descriptors.
  struct Limits {
    std::size_t lag_bytes = std::size_t{64} << 20;
    std::chrono::milliseconds close_wait{1000};
    std::size_t readers = 64;
  };

  // Listens. Throws Error with the address. Readers get `preamble` first, or only `refusal`.
  using Refusal = std::string(std::string_view reason);
  StreamServer(StreamAddress address, Limits limits, std::string preamble, Refusal* refusal);
  ~StreamServer() { close(); }

  // Sends the bytes of batch() to all readers. Later readers get `preamble` first. One lock covers
  // both: a reader that connects meanwhile gets either the new preamble or the batch with its new
  // sources.
  template <typename Batch>
  void send(Batch&& batch, const std::string& preamble) {
    std::lock_guard lock(mutex_);
    if (preamble != *preamble_) preamble_ = std::make_shared<const std::string>(preamble);
    if (readers_.empty()) return;
    auto chunk = std::make_shared<const std::string>(batch());
    for (const auto& reader : readers_) push(*reader, chunk);
    wake();
  }

  // Waits a bounded time for the sent data to arrive, disconnects all readers and joins the thread.
  // In a fork's child, which owns neither, it only closes descriptors.
  void close();

  // With the port in use, for port 0.
  const StreamAddress& address() const noexcept { return address_; }

 private:
  using Clock = std::chrono::steady_clock;
  using Chunk = std::shared_ptr<const std::string>;
#ifdef MSG_NOSIGNAL
  static constexpr int kNoSignal = MSG_NOSIGNAL;
#else
  static constexpr int kNoSignal = 0;  // macOS: SO_NOSIGPIPE, by make_nonblocking()
#endif
  static constexpr int kAcceptsAtOnce = 64;  // before existing readers get their turn
  static constexpr auto kRest = std::chrono::milliseconds(100);  // if no reader can be accepted

  struct Reader {
    // Only the thread uses these.
    UniqueFd fd;
    std::deque<Chunk> sending;
    std::size_t sent = 0;  // of the first chunk
    bool gone = false;
    // The mutex guards these.
    std::deque<Chunk> pending;
    bool lags = false;
    // Unsent bytes of both queues. Relaxed: a number to compare with a limit.
    std::atomic<std::size_t> behind{0};
  };

  static bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  // A batch may exceed the limit: only the bytes before it count. The mutex is held.
  void push(Reader& reader, const Chunk& chunk) const;

  void wake();

  // The thread's functions.
  void serve();

  // False if a closing server has sent everything. Without memory it retries later.
  bool serve_once() noexcept;

  // Takes over the data that send() has queued. Returns the deadline if the server is closing.
  std::optional<Clock::time_point> take_pending();

  void drop_gone();

  // Waits for data to send, room to send it, a new reader, or the end of one.
  void wait(bool closing);

  void accept_some();

  void take_reserve() { reserve_ = UniqueFd(fcntl(listener_.get(), F_DUPFD_CLOEXEC, 0)); }

  // Uses the reserve descriptor for the reader's connection, and reopens it.
  bool refuse_without_descriptor();

  void add_reader(UniqueFd fd);

  // Sends the connection's only frame. The part that the socket doesn't accept at once is lost, and
  // the reader sees the end.
  void refuse(const UniqueFd& fd, std::string_view reason) const;

  // Sends as much as the socket accepts.
  static void pump(Reader& reader);

  StreamAddress address_;
  Limits limits_;
  Refusal* refusal_;
  UniqueFd listener_, wake_read_, wake_write_;
  UniqueFd reserve_;               // the thread's: used to refuse a reader without free descriptors
  Clock::time_point rests_until_;  // the thread's: it accepts no reader before
  OfProcess process_;
  std::mutex mutex_;  // guards the members below
  Chunk preamble_;
  std::vector<std::unique_ptr<Reader>> readers_;  // its thread reads it without the mutex
  std::optional<Clock::time_point> deadline_;     // of a closing server: it sends until then
  std::jthread thread_;                           // last, because it uses all of the above
};

}  // namespace callgate

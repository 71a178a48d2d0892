// SPDX-License-Identifier: Apache-2.0
// Serves a stream to whoever connects to a socket.
//
// One thread, "callgate-serve", accepts readers and sends, and holds no lock while it does; send()
// only hands it bytes, so a reader can't hold up the channel. A reader that lags behind by more
// than the limit is disconnected, and one too many is refused, in words: descriptors are the
// process's, for its checkpoints too. send() and close() may be called from any thread. The thread
// sleeps in poll(); a pipe wakes it. Sockets never block, and never raise SIGPIPE.
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
  // Bytes that a reader may lag behind; how long close() lets readers catch up; readers at a time,
  // of which there are at most as many as a quarter of the descriptors that the process may open.
  struct Limits {
    std::size_t lag_bytes = std::size_t{64} << 20;
    std::chrono::milliseconds close_wait{1000};
    std::size_t readers = 64;
  };

  // Listens. Throws Error naming the address. Readers get `preamble` first, or only `refusal`.
  using Refusal = std::string(std::string_view reason);
  StreamServer(StreamAddress address, Limits limits, std::string preamble, Refusal* refusal);
  ~StreamServer() { close(); }

  // Sends batch(), bytes, to all readers; those that connect from now on get `preamble` first, in
  // one lock: who connects meanwhile gets the new preamble, or the batch with its new sources.
  template <typename Batch>
  void send(Batch&& batch, const std::string& preamble) {
    std::lock_guard lock(mutex_);
    if (preamble != *preamble_) preamble_ = std::make_shared<const std::string>(preamble);
    if (readers_.empty()) return;
    auto chunk = std::make_shared<const std::string>(batch());
    for (const auto& reader : readers_) push(*reader, chunk);
    wake();
  }

  // Waits a bounded time for what was sent to arrive, disconnects all and joins the thread. In a
  // fork's child, to whom neither belongs, it only closes descriptors.
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
  static constexpr int kAcceptsAtOnce = 64;  // before the readers that there are get their turn
  static constexpr auto kRest = std::chrono::milliseconds(100);  // when nobody can be accepted

  struct Reader {
    // The thread's own.
    UniqueFd fd;
    std::deque<Chunk> sending;
    std::size_t sent = 0;  // of the first chunk
    bool gone = false;
    // The mutex guards these.
    std::deque<Chunk> pending;
    bool lags = false;
    // Bytes of both queues that have not been sent. Relaxed: a number to compare with a limit.
    std::atomic<std::size_t> behind{0};
  };

  static bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  // A batch may exceed the limit: what counts is what lies before it. The mutex is held.
  void push(Reader& reader, const Chunk& chunk) const;

  void wake();

  // The thread's, all that follow.
  void serve();

  // False when all is sent that a closing server sends. Without memory it tries again later.
  bool serve_once() noexcept;

  // Takes over what send() has left. Returns until when to send, if the server closes.
  std::optional<Clock::time_point> take_pending();

  void drop_gone();

  // Until there is something to send, room to send it, a new reader or one that has gone.
  void wait(bool closing);

  void accept_some();

  void take_reserve() { reserve_ = UniqueFd(fcntl(listener_.get(), F_DUPFD_CLOEXEC, 0)); }

  // Gives the reserve up for the reader's connection, and takes it back.
  bool refuse_without_descriptor();

  void add_reader(UniqueFd fd);

  // The connection's only frame; what it doesn't take at once is lost, and the reader sees the end.
  void refuse(const UniqueFd& fd, std::string_view reason) const;

  // Sends as much as the socket takes.
  static void pump(Reader& reader);

  StreamAddress address_;
  Limits limits_;
  Refusal* refusal_;
  UniqueFd listener_, wake_read_, wake_write_;
  UniqueFd reserve_;               // the thread's: given up to refuse a reader when none is left
  Clock::time_point rests_until_;  // the thread's: it accepts nobody before
  OfProcess process_;
  std::mutex mutex_;  // guards what follows
  Chunk preamble_;
  std::vector<std::unique_ptr<Reader>> readers_;  // the thread changes it, and reads it without
  std::optional<Clock::time_point> deadline_;     // of a server that closes: until when it sends
  std::jthread thread_;                           // last: it uses all of the above
};

}  // namespace callgate

// Serves a stream to whoever connects to a socket.
//
// One thread, "callgate-serve", accepts readers and sends, and holds no lock while it does; send()
// only hands it bytes, so a reader can't hold up the channel. A reader that lags behind by more
// than the limit is disconnected, and one too many is refused, in words: descriptors are the
// process's, for its checkpoints too. send() and close() may be called from any thread.
#pragma once

#include <atomic>
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

#include "channel/stream_address.h"
#include "channel/stream_encoder.h"
#include "channel/unique_fd.h"
#include "core/lifetime.h"

namespace callgate {

class StreamServer {
 public:
  // Bytes that a reader may lag behind; how long close() lets readers catch up; readers at a time,
  // of which there are at most as many as a quarter of the descriptors that the process may open.
  struct Limits {
    std::size_t lag_bytes = std::size_t{64} << 20;
    std::chrono::milliseconds close_wait{1000};
    std::size_t readers = 64;
  };

  // Listens. Throws Error naming the address. `preamble` is what readers get first.
  StreamServer(StreamAddress address, Limits limits, std::string preamble);
  ~StreamServer();
  StreamServer(const StreamServer&) = delete;
  StreamServer& operator=(const StreamServer&) = delete;

  // Sends the batch to all readers; those that connect from now on get `preamble` first.
  void send(const StreamBatch& batch, const std::string& preamble);

  // Waits a bounded time for what was sent to arrive, disconnects all and joins the thread. In a
  // fork's child, to whom neither belongs, it only closes descriptors.
  void close();

  // With the port in use, for port 0.
  const StreamAddress& address() const noexcept { return address_; }

 private:
  using Clock = std::chrono::steady_clock;
  using Chunk = std::shared_ptr<const std::string>;

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

  void push(Reader& reader, const Chunk& chunk) const;
  void wake();

  // The thread's.
  void serve();
  bool serve_once() noexcept;
  std::optional<Clock::time_point> take_pending();
  void drop_gone();
  void wait(bool closing);
  void accept_some();
  bool refuse_without_descriptor();
  void add_reader(UniqueFd fd);
  std::size_t most_readers() const;
  static void pump(Reader& reader);
  static void drain_input(Reader& reader);
  static void refuse(const UniqueFd& fd, std::string_view reason);

  StreamAddress address_;
  Limits limits_;
  UniqueFd listener_, wake_read_, wake_write_;
  UniqueFd reserve_;               // the thread's: given up to refuse a reader when none is left
  Clock::time_point rests_until_;  // the thread's: it accepts nobody before
  OfProcess process_;
  std::mutex mutex_;  // guards what follows
  Chunk preamble_;
  std::vector<std::unique_ptr<Reader>> readers_;  // the thread changes it, and reads it without
  bool closing_ = false;
  Clock::time_point deadline_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace callgate

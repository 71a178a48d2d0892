// Serves a stream to whoever connects to a socket.
//
// One thread, "callgate-serve", accepts readers and sends; send() only hands it bytes, so a reader
// can't hold up the channel. A reader that lags behind by more than the limit is disconnected.
// send() and close() may be called from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "channel/stream_address.h"
#include "channel/stream_encoder.h"
#include "channel/unique_fd.h"
#include "core/process.h"

namespace callgate {

class StreamServer {
 public:
  // Bytes that a reader may lag behind, and how long close() lets readers catch up.
  struct Limits {
    std::size_t lag_bytes = std::size_t{64} << 20;
    std::chrono::milliseconds close_wait{1000};
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
  using Chunk = std::shared_ptr<const std::string>;

  struct Reader {
    UniqueFd fd;
    std::deque<Chunk> queue;
    std::size_t sent = 0;    // of the first chunk
    std::size_t queued = 0;  // bytes, those sent included
    bool gone = false;
  };

  void serve();
  bool finished();
  void accept_all();
  void push(Reader& reader, const Chunk& chunk) const;
  static void pump(Reader& reader);
  static void drain_input(Reader& reader);
  void wake();

  StreamAddress address_;
  Limits limits_;
  UniqueFd listener_, wake_read_, wake_write_;
  std::mutex mutex_;  // guards what follows
  Chunk preamble_;
  std::vector<std::unique_ptr<Reader>> readers_;
  bool closing_ = false;
  OfProcess process_;
  std::chrono::steady_clock::time_point deadline_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace callgate

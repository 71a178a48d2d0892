// A consumer that writes records in the format of include/callgate/stream.h: to a file, or to those
// who read from a socket.
//
// consume(), flush() and close() are called as Consumer says. A file is appended to in one system
// call a batch; a socket's readers are served by a thread of their own and never hold up the
// channel (stream_server.h). What another process reads is what was consumed: nothing is buffered
// beyond a call.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "channel/consumer.h"
#include "channel/first_error.h"
#include "channel/stream_encoder.h"
#include "channel/stream_file.h"
#include "channel/stream_server.h"
#include "core/process.h"

namespace callgate {

class StreamSink final : public Consumer {
 public:
  // `destination`: a file's path (appended to), unix:PATH or tcp://HOST:PORT (see
  // stream_address.h). Throws Error naming it: a bad path, a port that is taken, a damaged file.
  // `process_index` goes into the stream, for readers that merge several: -1 when it is not known.
  explicit StreamSink(std::string destination, StreamServer::Limits limits = {},
                      std::int32_t process_index = -1);
  ~StreamSink() override;

  // A closed one goes on: at the end of its file, or at its address.
  void open() override;
  void consume(std::span<const Record> records) override;
  void close() override;
  std::string description() const override { return "stream to " + address(); }

  // The destination, with the port in use for port 0.
  std::string address() const;

 private:
  void start();
  void write();
  void add(const Record& record);

  std::string destination_;
  StreamServer::Limits limits_;
  StreamEncoder encoder_;
  StreamBatch batch_;
  std::optional<StreamFile> file_;  // one of the two
  std::optional<StreamServer> server_;
  std::uint64_t in_batch_ = 0;  // records
  FirstError failure_;          // to write the records of one consume()
  bool in_session_ = false;
  bool closed_ = false;
  OfProcess process_;
};

}  // namespace callgate

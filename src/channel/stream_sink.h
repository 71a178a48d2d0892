// A consumer that writes records in the format of include/callgate/stream.h: to a file, or to those
// who read from a socket.
//
// consume(), flush() and close() are called as Consumer says. A file is appended to in one system
// call a batch; a socket's readers are served by a thread of their own and never hold up the
// channel (stream_server.h). What another process reads is what was consumed: nothing is buffered
// beyond a call.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "channel/consumer.h"
#include "channel/first_error.h"
#include "channel/stream_encoder.h"
#include "channel/stream_server.h"
#include "channel/unique_fd.h"
#include "core/lifetime.h"

namespace callgate {

// The file that a stream is appended to. Belongs to one thread at a time.
//
// One writer a file: it holds a lock (flock) until it ends; who comes meanwhile is told its
// process. What an earlier writer left incomplete at the end is cut off when the file is opened; a
// file that is no stream, or is damaged before its end, is refused and left as it is.
class StreamFile {
 public:
  // Opens or makes it. Throws Error naming the path.
  explicit StreamFile(std::string path);
  ~StreamFile() { close(); }
  StreamFile(const StreamFile&) = delete;
  StreamFile& operator=(const StreamFile&) = delete;

  // Appends the batch, in one system call where the system takes it. On an error, which is thrown,
  // the frames that found room are in the file, none in part; `records` is how many of them are
  // records.
  void write(const StreamBatch& batch, std::uint64_t& records);

  // Others may write from now on. In a fork's child, whose parent may be writing, the lock stays.
  void close() noexcept;

  // Bytes of whole frames.
  std::uint64_t size() const noexcept { return size_; }
  const std::string& path() const noexcept { return path_; }

 private:
  void cut();
  void keep_whole_frames(std::uint64_t written, std::uint64_t& records);
  [[noreturn]] void fail(const std::string& step) const;

  std::string path_;
  UniqueFd fd_;
  pid_t process_ = getpid();
  std::uint64_t size_ = 0;
  bool torn_ = false;  // bytes of a batch that failed may be behind `size_`
  std::vector<iovec> pieces_;
};

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

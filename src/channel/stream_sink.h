// A consumer that writes records in the format of include/callgate/stream.h: to a file, or to those
// who read from a socket.
//
// consume(), flush() and close() are called as Consumer says. A file is appended to in one system
// call a batch; a socket's readers are served by a thread of their own and never hold up the
// channel (stream_server.h). What another process reads is what was consumed: nothing is buffered
// beyond a call.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "callgate/stream.h"
#include "channel/consumer.h"
#include "channel/sinks/file.h"
#include "channel/stream_address.h"
#include "channel/stream_encoder.h"
#include "channel/stream_server.h"
#include "channel/unique_fd.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// The file that a stream is appended to. Belongs to one thread at a time.
//
// One writer a file: it has the place (sinks/file.h) until it ends; who comes meanwhile is told its
// process. What an earlier writer left incomplete at the end is cut off when the file is opened; a
// file that is no stream, or is damaged before its end, is refused and left as it is.
class StreamFile {
 public:
  // Opens or makes it. Throws Error naming the path.
  explicit StreamFile(const std::string& path)
      : file_("the stream", path, {.mode = FileMode::kAppend, .makes_folders = false}) {
    if (!file_.regular()) return;  // a device or a named pipe is only written to
    file_.claim();
    // A few bytes could be the beginning of a stream, or zeros in its place: the reader says
    // whether they go on to the end, as after a power loss.
    const std::string head = file_.read_at(0, 4);
    if (!std::string_view("cgsS").starts_with(head.c_str()))
      throw Error("stream file '" + path + "'", "a new file or a stream to append to",
                  "a file of another kind");
    try {
      stream::Reader reader(path);
      while (reader.next()) {
      }
      size_ = reader.offset();
    } catch (const std::exception& error) {
      throw Error(ErrorCode::kInvalidArgument,
                  "stream file '" + path + "': can't be appended to: " + error.what());
    }
    cut();
  }

  // Appends the batch, in one system call where the system takes it. On an error, which is thrown,
  // the records that found room are in the file, none in part; `records` is how many there are.
  void write(const StreamBatch& batch, std::size_t& records) {
    records = 0;
    if (torn_) cut();
    pieces_.clear();
    batch.each_piece([&](const char* data, std::size_t size) {
      pieces_.push_back({const_cast<char*>(data), size});  // iovec has no const form
    });
    torn_ = true;
    std::span<iovec> rest = pieces_;
    std::size_t before = 0;  // of what is done
    const Transfer done = transfer_all(batch.size(), ENOSPC, [&](std::size_t so_far) {
      rest = without(rest, so_far - std::exchange(before, so_far));
      return writev(file_.fd(), rest.data(), static_cast<int>(std::min(rest.size(), kMostPieces)));
    });
    if (done.error != 0) {
      const auto whole = whole_units(batch.records, done.bytes);
      records = whole.count;
      size_ += whole.bytes;
      FirstError().survives([&] { cut(); });  // else torn_ stays, and the next write cuts
      file_.fail("write to", done.error);
    }
    size_ += batch.size();
    torn_ = false;
  }

  // Bytes of whole frames.
  std::uint64_t size() const noexcept { return size_; }

 private:
  static constexpr std::size_t kMostPieces = 1024;  // IOV_MAX of Linux and macOS

  // The pieces without their first bytes.
  static std::span<iovec> without(std::span<iovec> pieces, std::size_t bytes) noexcept {
    while (!pieces.empty() && bytes >= pieces.front().iov_len) {
      bytes -= pieces.front().iov_len;
      pieces = pieces.subspan(1);
    }
    if (bytes == 0) return pieces;
    pieces.front().iov_base = static_cast<char*>(pieces.front().iov_base) + bytes;
    pieces.front().iov_len -= bytes;
    return pieces;
  }

  void cut() {
    file_.truncate(size_);
    if (lseek(file_.fd(), static_cast<off_t>(size_), SEEK_SET) < 0) file_.fail("seek in", errno);
    torn_ = false;
  }

  File file_;
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
                      std::int32_t process_index = -1)
      : destination_(std::move(destination)), limits_(limits), encoder_(process_index) {
    start();
  }
  ~StreamSink() override {
    FirstError().survives([&] { close(); });  // nobody is left to tell
  }

  // A closed one goes on: at the end of its file, or at its address.
  void open() override {
    if (closed_ && process_.here()) start();
  }

  void consume(std::span<const Record> records) override {
    if (!process_.here()) return;  // the file and the readers are the parent's
    auto take = [&](const Record& record) {
      add(record);
      if (batch_.bytes.size() >= kBatchBytes) failure_.survives([&] { write(); });
    };
    auto finish = [&] {
      failure_.survives([&] { write(); });
      failure_.rethrow();
    };
    consume_each(*this, records, [&] { open(); }, take, finish);
  }

  // Others may write to the file from now on. In a fork's child both are the parent's.
  void close() override {
    if (std::exchange(closed_, true)) return;
    FirstError errors;
    auto finish = [&] {
      encoder_.finish(batch_);
      write();
    };
    if (process_.here() && in_session_) errors.survives(finish);
    file_.reset();
    if (server_) server_->close();
    errors.rethrow();
  }

  std::string description() const override { return "stream to " + address(); }

  // The destination, with the port in use for port 0.
  std::string address() const { return server_ ? server_->address().text() : destination_; }

 private:
  // What is gathered before it is written, so that a large batch needs no second copy in memory.
  static constexpr std::size_t kBatchBytes = std::size_t{1} << 20;

  void start() {
    const StreamAddress address = parse_stream_address(destination_);
    if (address.transport == StreamTransport::kFile) {
      file_.emplace(address.path);
      encoder_.start(batch_);
      write();
    } else {
      encoder_.start(batch_);
      batch_.clear();  // readers get the preamble when they connect
      server_.reset();
      server_.emplace(address, limits_, encoder_.preamble());
    }
    in_session_ = true;
    closed_ = false;
  }

  void add(const Record& record) {
    // After a write that failed: readers may have seen nothing of it, descriptions included.
    if (!in_session_) encoder_.start(batch_);
    in_session_ = true;
    // Readers leave out the lanes whose sizes the array has not; they are lost, and said to be so.
    FirstError refused;
    if (!record.source->padded.empty()) {
      RecordViews views(*record.source);
      std::uint64_t good = 0;
      refused.survives([&] { visit_lanes(*this, views, record, [&](auto, auto) { ++good; }); });
      if (good == 0) refused.rethrow();
    }
    encoder_.add(record, batch_);
    refused.rethrow();
  }

  void write() {
    if (batch_.size() == 0) return;
    std::size_t written = 0;
    try {
      if (file_) file_->write(batch_, written);
      if (server_) server_->send(batch_, encoder_.preamble());
    } catch (...) {
      lose(batch_.records.size() - written);
      batch_.clear();
      in_session_ = false;
      throw;
    }
    batch_.clear();
  }

  std::string destination_;
  StreamServer::Limits limits_;
  StreamEncoder encoder_;
  StreamBatch batch_;
  std::optional<StreamFile> file_;  // one of the two
  std::optional<StreamServer> server_;
  FirstError failure_;  // to write the records of one consume()
  bool in_session_ = false;
  bool closed_ = false;
  OfProcess process_;
};

}  // namespace callgate

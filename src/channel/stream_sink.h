// SPDX-License-Identifier: Apache-2.0
// A consumer that writes records in the format of include/callgate/stream.h to a file, or to the
// clients of a socket.
//
// A file gets one append per batch, in one system call. A separate thread serves a socket's
// readers, so they never delay the channel (stream_server.h). Other processes can read all consumed
// records: nothing is buffered beyond a call. Small payloads are copied behind their headers. Large
// payloads stay in place and the batch refers to them, so writing them to a file copies nothing.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "callgate/stream.h"
#include "channel/consumer.h"
#include "channel/record.h"
#include "channel/sinks/file.h"
#include "channel/stream_address.h"
#include "channel/stream_server.h"
#include "core/error.h"
#include "core/lifetime.h"

namespace callgate {

// Bytes to write: `bytes`, with the externals inserted at their positions.
struct StreamBatch {
  struct External {
    std::size_t position = 0;  // in `bytes`
    const char* data = nullptr;
    std::size_t size = 0;
  };

  std::string bytes;
  std::vector<External> externals;
  std::size_t outside = 0;           // bytes of the externals
  std::vector<std::size_t> records;  // the end of each, in all bytes

  void clear() noexcept;
  std::size_t size() const noexcept { return bytes.size() + outside; }

  // All bytes in order, as pieces.
  std::vector<iovec> pieces() const;

  std::string flat() const;
};

// A frame at the end of `out`. Its end fills in the header's checksums.
class StreamFrame : Immovable {
 public:
  StreamFrame(std::string& out, char kind);
  ~StreamFrame();

  // Appends numbers, each with the bytes of its type.
  template <typename... T>
  StreamFrame& put(T... values) {
    static_assert(std::endian::native == std::endian::little, "the format is written as it lies");
    (out_.append(reinterpret_cast<const char*>(&values), sizeof(T)), ...);
    return *this;
  }
  StreamFrame& put_sizes(auto... sizes) { return put(static_cast<std::uint32_t>(sizes)...); }
  void put_padded(std::string_view text) {
    out_.append(text).append(stream::pad8(text.size()) - text.size(), '\0');
  }

  // Adds bytes that belong to the frame, padded, and stay in place.
  void put_outside(std::string_view bytes, StreamBatch& batch);

 private:
  // Adds the bytes so far to the body's checksum.
  void sum_up();

  std::string& out_;
  const std::size_t start_;
  std::size_t summed_, outside_ = 0;
  std::uint32_t crc_ = 0;
};

class StreamEncoder {
 public:
  // `process_index` is the index of this process in its program, -1 if unknown.
  explicit StreamEncoder(std::int32_t process_index = -1) : process_index_(process_index) {}

  // Begins a session: the sources are forgotten, and described again before their next record.
  void start(StreamBatch& batch);

  // Adds the record, after its source's description if the session has none. Throws Error for a
  // source that no reader would accept, and leaves the batch unchanged.
  void add(const Record& record, StreamBatch& batch);

  void finish(StreamBatch& batch) { StreamFrame(batch.bytes, 'E').put(records_, wall_time_ns()); }

  // The beginning for a reader that joins now: the session's frame and all descriptions.
  const std::string& preamble() const noexcept { return preamble_; }

  // The frame for a refused reader.
  static std::string refusal(std::string_view reason);

 private:
  static constexpr std::size_t kExternalBytes = 65'536;  // larger payloads are not copied

  std::uint32_t number_of(const Source& source, StreamBatch& batch);

  void put_source(const Source& source, std::uint32_t number);

  void append(const Record& record, std::uint32_t number, StreamBatch& batch) const;

  std::int32_t process_index_;
  std::string preamble_;
  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by Source::id
  std::uint64_t records_ = 0;
};

// The file to which a stream is appended. Belongs to one thread at a time.
//
// Each file has one writer, which holds the place (sinks/file.h) until it ends. Opening the file
// cuts off an incomplete frame at the end, left by an earlier writer. A file that isn't a stream,
// or is damaged before its end, is refused and stays unchanged.
class StreamFile : public UnitFile {
 public:
  // Opens or creates it. Throws Error with the path.
  explicit StreamFile(const std::string& path);
};

class StreamSink final : public Sink {
 public:
  // `destination`: a file's path (appended to), unix:PATH or tcp://HOST:PORT (see
  // stream_address.h). Throws Error with the destination for a bad path, a port in use, or a
  // damaged file. The stream contains `process_index`, for readers that merge several streams; -1
  // if unknown.
  explicit StreamSink(std::string destination, StreamServer::Limits limits = {},
                      std::int32_t process_index = -1);
  ~StreamSink() override {
    FirstError().survives([&] { close(); });  // nobody is left to receive it
  }

  // A closed sink continues at the end of its file, or at its address.
  void open() override {
    if (closed_ && process_.here()) start();
  }

  void consume(std::span<const Record> records) override {
    if (process_.here()) Sink::consume(records);  // the file and the readers are the parent's
  }

  // Other writers may use the file from now on. In a fork's child, file and readers are the
  // parent's.
  void close() override;

  std::string description() const override { return "stream to " + address(); }

  // The destination, with the port in use for port 0.
  std::string address() const { return server_ ? server_->address().text() : destination_; }

 private:
  void start();

  void begin() override { open(); }

  void take(const Record& record) override;

  void write() override;

  std::string destination_;
  StreamServer::Limits limits_;
  StreamEncoder encoder_;
  StreamBatch batch_;
  std::optional<StreamFile> file_;  // either this or the server
  std::optional<StreamServer> server_;
  bool in_session_ = false;
  bool closed_ = false;
  OfProcess process_;
};

}  // namespace callgate

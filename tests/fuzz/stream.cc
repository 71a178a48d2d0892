// SPDX-License-Identifier: Apache-2.0
// A stream: from memory, from a file and from a pipe, as it is and with right checksums; and a file
// that the next writer appends to.
#include "callgate/stream.h"

#include <unistd.h>

#include <string>
#include <string_view>

#include "channel/stream_sink.h"
#include "core/error.h"
#include "stream_reading.h"
#include "targets.h"

namespace callgate::fuzz {
namespace {

constexpr std::size_t kPipeBytes = 65'536;  // that a pipe takes without a reader

StreamRead read_pipe(std::string_view bytes) {
  int ends[2];
  require(pipe(ends) == 0, "a pipe can be made");
  const ssize_t written = ::write(ends[1], bytes.data(), bytes.size());
  require(written == static_cast<ssize_t>(bytes.size()), "a pipe takes a few bytes");
  ::close(ends[1]);
  stream::Reader reader(ends[0]);
  return read_stream(reader);
}

// A file that is no stream is refused and stays as it was; of another, what is torn is cut off.
void append(std::string_view bytes, const StreamRead& memory) {
  const MemoryFile file(bytes);
  try {
    StreamFile writer(file.path());
    require(writer.size() <= bytes.size(), "opening a stream's file makes it no longer");
    const std::string kept = file.contents();
    require(kept == bytes.substr(0, writer.size()), "whole frames stay as they are");
    const StreamRead again = read_stream(kept);
    require(again.records == memory.records && !again.refused, "no whole record is lost");
  } catch (const Error&) {
    require(file.contents() == bytes, "a file that is refused stays as it was");
  }
}

void read(std::string_view bytes) {
  const StreamRead memory = read_stream(bytes);
  require(memory.offset <= bytes.size(), "a reader stays inside the bytes");
  // Their buffers take a hundred times as long as the reading: every few inputs are enough.
  if (stream::crc32c(bytes.data(), bytes.size()) % 8 != 0) return;
  {
    const MemoryFile file(bytes);
    stream::Reader reader(file.path());
    const StreamRead read = read_stream(reader);
    require(read.records == memory.records && read.offset == memory.offset &&
                read.refused == memory.refused,
            "a file is read as its bytes are");
  }
  if (bytes.size() <= kPipeBytes)
    require(read_pipe(bytes).records == memory.records, "a pipe is read as its bytes are");
  append(bytes, memory);
}

}  // namespace

void stream(std::string_view bytes) {
  read(bytes);
  std::string sealed(bytes);
  reseal(sealed);
  if (sealed != bytes) read(sealed);
}

}  // namespace callgate::fuzz

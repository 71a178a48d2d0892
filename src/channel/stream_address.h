// Where a stream goes to or comes from: "unix:PATH", "tcp://HOST:PORT", or the path of a file.
//
// A host that is left out ("tcp://:7000") is loopback: other machines are served only when an
// address says so. Port 0 is any free one. Errors are thrown as callgate::Error and name the
// address.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "channel/unique_fd.h"

namespace callgate {

enum class StreamTransport { kFile, kUnix, kTcp };

struct StreamAddress {
  StreamTransport transport = StreamTransport::kFile;
  std::string path;  // of the file or the Unix socket
  std::string host;  // without the brackets that an IPv6 address has in text
  std::uint16_t port = 0;

  std::string text() const;
};

StreamAddress parse_stream_address(std::string_view text);

// A non-blocking listening socket. `address` then has the port that was found, for port 0. What a
// dead process left at a Unix path is replaced; a live one's is an error.
UniqueFd listen_stream(StreamAddress& address);

// A blocking connection. Without one where a signal ended the wait.
UniqueFd connect_stream(const StreamAddress& address);

// Also closed by exec, and never a reason for SIGPIPE.
void make_nonblocking(int fd);

}  // namespace callgate

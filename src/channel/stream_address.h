// SPDX-License-Identifier: Apache-2.0
// The destination or origin of a stream: "unix:PATH", "tcp://HOST:PORT", or the path of a file.
//
// A missing host ("tcp://:7000") is loopback: other machines are only served if an address says so.
// Port 0 is any free port. Errors are thrown as callgate::Error with the address. Uses plain POSIX
// sockets; getaddrinfo accepts numeric and named hosts, IPv4 and IPv6.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "channel/sinks/file.h"
#include "core/error.h"

namespace callgate {

enum class StreamTransport { kFile, kUnix, kTcp };

struct StreamAddress {
  StreamTransport transport = StreamTransport::kFile;
  std::string path;  // of the file or the Unix socket
  std::string host;  // without the brackets of an IPv6 address in text
  std::uint16_t port = 0;

  static constexpr std::string_view kUnix = "unix:", kTcp = "tcp://";

  std::string text() const;

  [[noreturn]] void fail(const std::string& step,
                         const std::string& reason = std::strerror(errno)) const;
};

StreamAddress parse_stream_address(std::string_view text);

// Also sets close-on-exec, and prevents SIGPIPE.
void make_nonblocking(int fd);

// A non-blocking listening socket. For port 0, `address` gets the chosen port. Replaces a dead
// process's socket at a Unix path; throws Error for a live one's.
UniqueFd listen_stream(StreamAddress& address);

// A blocking connection. Returns no connection if a signal ended the wait.
UniqueFd connect_stream(const StreamAddress& address);

}  // namespace callgate

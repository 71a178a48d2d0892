// Plain POSIX sockets. getaddrinfo takes numeric and named hosts, IPv4 and IPv6.
#include "channel/stream_address.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "core/error.h"

namespace callgate {
namespace {

constexpr std::string_view kUnix = "unix:", kTcp = "tcp://";

[[noreturn]] void fail(const StreamAddress& address, const std::string& step,
                       const std::string& reason) {
  throw Error(ErrorCode::kInvalidArgument,
              "stream at '" + address.text() + "': " + step + ": " + reason);
}

[[noreturn]] void fail(const StreamAddress& address, const std::string& step) {
  fail(address, step, std::strerror(errno));
}

void set_flags(int fd, bool nonblocking) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  if (nonblocking) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

sockaddr_un unix_name(const StreamAddress& address) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (address.path.size() >= sizeof(name.sun_path))
    fail(address, "its path", "longer than a socket's may be");
  std::memcpy(name.sun_path, address.path.data(), address.path.size());
  return name;
}

// Without a connection `reason` is the errno of the attempt.
UniqueFd connect_unix(const StreamAddress& address, int& reason) {
  sockaddr_un name = unix_name(address);
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM, 0));
  if (!fd) fail(address, "making a socket");
  set_flags(fd.get(), /*nonblocking=*/false);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0) return fd;
  reason = errno;
  return UniqueFd();
}

// Removes the socket of a process that is gone.
void clear_unix_path(const StreamAddress& address) {
  struct stat status{};
  if (lstat(address.path.c_str(), &status) != 0) return;
  if (!S_ISSOCK(status.st_mode)) fail(address, "listening", "a file of another kind is there");
  int reason = 0;
  if (connect_unix(address, reason)) fail(address, "listening", "another process listens there");
  if (reason == ECONNREFUSED) unlink(address.path.c_str());
}

UniqueFd listen_unix(const StreamAddress& address) {
  sockaddr_un name = unix_name(address);
  clear_unix_path(address);
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM, 0));
  if (!fd) fail(address, "making a socket");
  set_flags(fd.get(), /*nonblocking=*/true);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 ||
      chmod(address.path.c_str(), 0600) != 0 || listen(fd.get(), SOMAXCONN) != 0)
    fail(address, "listening");
  return fd;
}

using Found = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Found look_up(const StreamAddress& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) fail(address, "looking up its host", gai_strerror(error));
  return {found, &freeaddrinfo};
}

std::uint16_t port_of(int fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size);
  if (name.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6*>(&name)->sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

UniqueFd listen_tcp(StreamAddress& address) {
  Found found = look_up(address);
  UniqueFd fd(socket(found->ai_family, SOCK_STREAM, 0));
  if (!fd) fail(address, "making a socket");
  set_flags(fd.get(), /*nonblocking=*/true);
  int on = 1;  // the port of a process that has just ended may be used again
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), found->ai_addr, found->ai_addrlen) != 0 || listen(fd.get(), SOMAXCONN) != 0)
    fail(address, "listening");
  address.port = port_of(fd.get());
  return fd;
}

UniqueFd connect_tcp(const StreamAddress& address, int& reason) {
  Found found = look_up(address);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    UniqueFd fd(socket(one->ai_family, SOCK_STREAM, 0));
    if (!fd) continue;
    set_flags(fd.get(), /*nonblocking=*/false);
    if (connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0) return fd;
    reason = errno;
    if (reason == EINTR) break;
  }
  return UniqueFd();
}

}  // namespace

std::string StreamAddress::text() const {
  if (transport == StreamTransport::kFile) return path;
  if (transport == StreamTransport::kUnix) return std::string(kUnix) + path;
  bool v6 = host.find(':') != std::string::npos;
  return std::string(kTcp) + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

StreamAddress parse_stream_address(std::string_view text) {
  auto refuse = [&] {
    throw Error(ErrorCode::kInvalidArgument, "address of a stream",
                "a file's path, unix:PATH or tcp://HOST:PORT", "'" + std::string(text) + "'");
  };
  if (text.empty() || text.find('\0') != std::string_view::npos) refuse();
  if (text.starts_with(kUnix)) {
    if (text == kUnix) refuse();
    return {StreamTransport::kUnix, std::string(text.substr(kUnix.size())), "", 0};
  }
  if (!text.starts_with(kTcp)) return {StreamTransport::kFile, std::string(text), "", 0};
  std::string_view rest = text.substr(kTcp.size());
  std::size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) refuse();
  std::string_view host = rest.substr(0, colon), port = rest.substr(colon + 1);
  StreamAddress address{StreamTransport::kTcp, "", "", 0};
  auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc() || end != port.data() + port.size()) refuse();
  bool brackets = host.starts_with('[') && host.ends_with(']');
  if (!brackets && host.find(':') != std::string_view::npos) refuse();
  if (brackets) host = host.substr(1, host.size() - 2);
  if (host.find_first_of("[]") != std::string_view::npos) refuse();
  address.host = host.empty() ? "127.0.0.1" : std::string(host);
  return address;
}

UniqueFd listen_stream(StreamAddress& address) {
  return address.transport == StreamTransport::kUnix ? listen_unix(address) : listen_tcp(address);
}

UniqueFd connect_stream(const StreamAddress& address) {
  int reason = 0;
  UniqueFd fd = address.transport == StreamTransport::kUnix ? connect_unix(address, reason)
                                                            : connect_tcp(address, reason);
  if (!fd && reason != EINTR) fail(address, "connecting", std::strerror(reason));
  return fd;
}

}  // namespace callgate

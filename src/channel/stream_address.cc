// Plain POSIX sockets. getaddrinfo takes numeric and named hosts, IPv4 and IPv6.
#include "channel/stream_address.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <vector>

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

// What a socket is bound or connected to.
struct SocketName {
  sockaddr_storage storage{};
  socklen_t size = 0;

  SocketName(const void* name, std::size_t bytes) : size(static_cast<socklen_t>(bytes)) {
    std::memcpy(&storage, name, bytes);
  }
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketName unix_name(const StreamAddress& address) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (address.path.size() >= sizeof(name.sun_path))
    fail(address, "its path", "longer than a socket's may be");
  std::memcpy(name.sun_path, address.path.data(), address.path.size());
  return {&name, sizeof(name)};
}

// At least one; of a host there may be several.
std::vector<SocketName> names_of(const StreamAddress& address) {
  if (address.transport == StreamTransport::kUnix) return {unix_name(address)};
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) fail(address, "looking up its host", gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  std::vector<SocketName> names;
  for (; found != nullptr; found = found->ai_next)
    names.emplace_back(found->ai_addr, found->ai_addrlen);
  return names;
}

UniqueFd new_socket(const StreamAddress& address, const SocketName& name) {
  UniqueFd fd(socket(name.storage.ss_family, SOCK_STREAM, 0));
  if (!fd && errno != EAFNOSUPPORT) fail(address, "making a socket");
  if (fd) fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
  return fd;
}

// Without a connection `reason` is the errno of the last attempt.
UniqueFd try_to_connect(const StreamAddress& address, int& reason) {
  for (const SocketName& name : names_of(address)) {
    UniqueFd fd = new_socket(address, name);
    if (fd && connect(fd.get(), name.get(), name.size) == 0) return fd;
    reason = errno;
    if (reason == EINTR) break;
  }
  return UniqueFd();
}

// Removes the socket of a process that is gone.
void clear_unix_path(const StreamAddress& address) {
  struct stat status{};
  if (lstat(address.path.c_str(), &status) != 0) return;
  if (!S_ISSOCK(status.st_mode)) fail(address, "listening", "a file of another kind is there");
  int reason = 0;
  if (try_to_connect(address, reason)) fail(address, "listening", "another process listens there");
  if (reason == ECONNREFUSED) unlink(address.path.c_str());
}

std::uint16_t port_of(int fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size);
  if (name.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6*>(&name)->sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in*>(&name)->sin_port);
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

void make_nonblocking(int fd) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
#ifdef SO_NOSIGPIPE
  int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof(on));
#endif
}

UniqueFd listen_stream(StreamAddress& address) {
  const bool is_unix = address.transport == StreamTransport::kUnix;
  const SocketName name = names_of(address).front();
  if (is_unix) clear_unix_path(address);
  UniqueFd fd = new_socket(address, name);
  if (!fd) fail(address, "making a socket");
  make_nonblocking(fd.get());
  int on = 1;  // the port of a process that has just ended may be used again
  if (!is_unix) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), name.get(), name.size) != 0 ||
      (is_unix && chmod(address.path.c_str(), 0600) != 0) || listen(fd.get(), SOMAXCONN) != 0)
    fail(address, "listening");
  if (!is_unix) address.port = port_of(fd.get());
  return fd;
}

UniqueFd connect_stream(const StreamAddress& address) {
  int reason = 0;
  UniqueFd fd = try_to_connect(address, reason);
  if (!fd && reason != EINTR) fail(address, "connecting", std::strerror(reason));
  return fd;
}

}  // namespace callgate

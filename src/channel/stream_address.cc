// SPDX-License-Identifier: Apache-2.0
// Addresses as texts, and their sockets.
#include "channel/stream_address.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <memory>

namespace callgate {
namespace {

// The address to which a socket is bound or connected.
struct SocketName {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);

  sockaddr* get() noexcept { return reinterpret_cast<sockaddr*>(&storage); }
};

// At least one; a host may have several.
std::vector<SocketName> socket_names(const StreamAddress& address) {
  if (address.transport == StreamTransport::kUnix) {
    SocketName name{.size = sizeof(sockaddr_un)};
    auto* unix_name = reinterpret_cast<sockaddr_un*>(&name.storage);
    unix_name->sun_family = AF_UNIX;
    if (address.path.size() >= sizeof(unix_name->sun_path))
      address.fail("its path", "longer than a socket's may be");
    std::ranges::copy(address.path, unix_name->sun_path);
    return {name};
  }
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) address.fail("looking up its host", gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  std::vector<SocketName> names;
  for (; found != nullptr; found = found->ai_next)
    std::memcpy(&names.emplace_back(SocketName{.size = found->ai_addrlen}).storage, found->ai_addr,
                found->ai_addrlen);
  return names;
}

UniqueFd make_socket(const StreamAddress& address, const SocketName& name) {
  UniqueFd fd(socket(name.storage.ss_family, SOCK_STREAM, 0));
  if (!fd && errno != EAFNOSUPPORT) address.fail("making a socket");
  if (fd) fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
  return fd;
}

// Without a connection, `reason` is the errno of the last attempt.
UniqueFd try_to_connect(const StreamAddress& address, int& reason) {
  for (SocketName& name : socket_names(address)) {
    UniqueFd fd = make_socket(address, name);
    if (fd && connect(fd.get(), name.get(), name.size) == 0) return fd;
    reason = errno;
    if (reason == EINTR) break;
  }
  return UniqueFd();
}

// Removes the socket of a process that has ended.
void clear_unix_path(const StreamAddress& address) {
  struct stat status{};
  if (lstat(address.path.c_str(), &status) != 0) return;
  if (!S_ISSOCK(status.st_mode)) address.fail("listening", "the path is another kind of file");
  int reason = 0;
  if (try_to_connect(address, reason)) address.fail("listening", "another process listens there");
  if (reason == ECONNREFUSED) unlink(address.path.c_str());
}

}  // namespace

std::string StreamAddress::text() const {
  if (transport == StreamTransport::kFile) return path;
  if (transport == StreamTransport::kUnix) return std::string(kUnix) + path;
  const bool v6 = host.find(':') != std::string::npos;
  return std::string(kTcp) + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

void StreamAddress::fail(const std::string& step, const std::string& reason) const {
  throw Error(ErrorCode::kInvalidArgument, "stream at '" + text() + "': " + step + ": " + reason);
}

StreamAddress parse_stream_address(std::string_view text) {
  constexpr std::string_view kUnix = StreamAddress::kUnix, kTcp = StreamAddress::kTcp;
  auto refuse_if = [&](bool bad) {
    if (!bad) return;
    throw Error("address of a stream", "a file's path, unix:PATH or tcp://HOST:PORT",
                "'" + std::string(text) + "'");
  };
  refuse_if(text.empty() || text == kUnix || text.find('\0') != std::string_view::npos);
  if (text.starts_with(kUnix))
    return {StreamTransport::kUnix, std::string(text.substr(kUnix.size())), "", 0};
  if (!text.starts_with(kTcp)) return {StreamTransport::kFile, std::string(text), "", 0};
  const std::string_view rest = text.substr(kTcp.size());
  const std::size_t colon = rest.rfind(':');
  refuse_if(colon == std::string_view::npos);
  std::string_view host = rest.substr(0, colon), port = rest.substr(colon + 1);
  StreamAddress address{StreamTransport::kTcp, "", "", 0};
  auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  refuse_if(error != std::errc() || end != port.data() + port.size());
  const bool brackets = host.starts_with('[') && host.ends_with(']');
  if (brackets) host = host.substr(1, host.size() - 2);
  refuse_if(host.find_first_of(brackets ? "[]" : "[]:") != std::string_view::npos);
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
  SocketName name = socket_names(address).front();
  if (is_unix) clear_unix_path(address);
  UniqueFd fd = make_socket(address, name);
  if (!fd) address.fail("making a socket");
  make_nonblocking(fd.get());
  int on = 1;  // allows reusing the port of a process that has just ended
  if (!is_unix) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), name.get(), name.size) != 0 ||
      (is_unix && chmod(address.path.c_str(), 0600) != 0) || listen(fd.get(), SOMAXCONN) != 0)
    address.fail("listening");
  if (is_unix) return fd;
  SocketName bound;
  getsockname(fd.get(), bound.get(), &bound.size);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&bound.storage);
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&bound.storage);
  address.port = ntohs(v6->sin6_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
  return fd;
}

UniqueFd connect_stream(const StreamAddress& address) {
  int reason = 0;
  UniqueFd fd = try_to_connect(address, reason);
  if (!fd && reason != EINTR) address.fail("connecting", std::strerror(reason));
  return fd;
}

}  // namespace callgate

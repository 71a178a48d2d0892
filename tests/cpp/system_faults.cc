// See the header.
#include "system_faults.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

namespace callgate::fake {
namespace {

thread_local SystemFault* t_fault = nullptr;

}  // namespace

SystemFault::SystemFault(Calls calls, std::size_t nth, int error)
    : calls_(calls), nth_(nth), error_(error) {
  t_fault = this;
}

SystemFault::~SystemFault() { t_fault = nullptr; }

bool SystemFault::strikes(Calls calls) noexcept {
  if (t_fault == nullptr || t_fault->calls_ != calls || t_fault->met_++ != t_fault->nth_)
    return false;
  errno = t_fault->error_;
  return true;
}

namespace {

constexpr auto kWrite = SystemFault::Calls::kWrite, kOpen = SystemFault::Calls::kOpen;

// The function that would have been called.
template <typename Function>
Function* next(Function* /*type*/, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace
}  // namespace callgate::fake

namespace fake = callgate::fake;

extern "C" {

ssize_t write(int fd, const void* data, std::size_t size) {
  static auto* real = fake::next(&write, "write");
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : real(fd, data, size);
}

ssize_t pwrite(int fd, const void* data, std::size_t size, off_t offset) {
  static auto* real = fake::next(&pwrite, "pwrite");
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : real(fd, data, size, offset);
}

ssize_t writev(int fd, const iovec* pieces, int count) {
  static auto* real = fake::next(&writev, "writev");
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : real(fd, pieces, count);
}

int ftruncate(int fd, off_t size) noexcept {
  static auto* real = fake::next(&ftruncate, "ftruncate");
  return fake::SystemFault::strikes(fake::kWrite) ? -1 : real(fd, size);
}

int open(const char* path, int flags, ...) {
  using Open = int(const char*, int, mode_t);
  static auto* real = fake::next(static_cast<Open*>(nullptr), "open");
  std::va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return fake::SystemFault::strikes(fake::kOpen) ? -1 : real(path, flags, mode);
}

int socket(int domain, int type, int protocol) noexcept {
  static auto* real = fake::next(&socket, "socket");
  return fake::SystemFault::strikes(fake::kOpen) ? -1 : real(domain, type, protocol);
}

int pipe(int* ends) noexcept {
  static auto* real = fake::next(&pipe, "pipe");
  return fake::SystemFault::strikes(fake::kOpen) ? -1 : real(ends);
}

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
// See the header. All that runs in the handler is async-signal-safe: it reads memory that was
// written before, formats numbers by itself, and calls write, sigaction and raise.
#include <signal.h>  // NOLINT(modernize-deprecated-headers): more is there than in C's
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "kernels/kernel_debug.h"

// A plain load in the handler; the general access to a library's thread-local may allocate.
#if defined(__ELF__)
#define CALLGATE_STATIC_TLS __attribute__((tls_model("initial-exec")))
#else
#define CALLGATE_STATIC_TLS
#endif

namespace callgate {
namespace {

// A signal, and its previous handler.
struct Handled {
  const char* name;
  int number;
  bool chained = false;  // this handler was installed and may still be called
  struct sigaction before{};
};
constinit Handled handled[] = {{"SIGSEGV", SIGSEGV},
                               {"SIGBUS", SIGBUS},
                               {"SIGFPE", SIGFPE},
                               {"SIGILL", SIGILL},
                               {"SIGABRT", SIGABRT}};

CALLGATE_STATIC_TLS thread_local const KernelRecord* current = nullptr;

// Running calls, for crashes on a kernel's own threads. Calls without a free slot aren't reported.
std::array<std::atomic<const KernelRecord*>, 64> slots{};

// --- The text --------------------------------------------------------------------------------

// Writes lines to stderr.
class Writer {
 public:
  ~Writer() { flush(); }
  Writer& operator<<(std::string_view text) noexcept {
    for (char c : text) {
      if (used_ == buffer_.size()) flush();
      buffer_[used_++] = c;
    }
    return *this;
  }
  Writer& operator<<(std::uint64_t value) noexcept { return number(value, 10); }
  Writer& hex(std::uintptr_t value) noexcept { return (*this << "0x").number(value, 16); }

 private:
  Writer& number(std::uint64_t value, int base) noexcept {
    std::array<char, 20> digits{};
    char* end = std::to_chars(digits.begin(), digits.end(), value, base).ptr;
    return *this << std::string_view(digits.data(), end);
  }
  void flush() noexcept {
    for (std::size_t done = 0; done < used_;) {
      ssize_t wrote = ::write(STDERR_FILENO, buffer_.data() + done, used_ - done);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) break;
      done += static_cast<std::size_t>(wrote);
    }
    used_ = 0;
  }

  std::array<char, 512> buffer_;
  std::size_t used_ = 0;
};

void write_name(Writer& out, const char* side, std::size_t i,
                std::span<const std::string> labels) noexcept {
  out << side << " " << std::uint64_t{i};
  if (i < labels.size()) out << " " << std::string_view(labels[i]);
}

void write_arrays(Writer& out, const char* side, std::span<const ArrayView> views,
                  std::span<const std::string> labels) noexcept {
  for (std::size_t i = 0; i < views.size(); ++i) {
    write_name(out << "  ", side, i, labels);
    out << ": " << name(views[i].dtype) << "[";
    for (std::int32_t axis = 0; axis < views[i].rank; ++axis)
      (axis == 0 ? out : out << ",") << static_cast<std::uint64_t>(views[i].dims[axis]);
    auto data = reinterpret_cast<std::uintptr_t>(views[i].data);
    (out << "] at ").hex(data) << "-";
    out.hex(data + views[i].nbytes()) << "\n";
  }
}

// Describes the address if it is close to one of the arrays.
void write_place(Writer& out, std::uintptr_t address, const char* side,
                 std::span<const ArrayView> views, std::span<const std::string> labels) noexcept {
  constexpr std::uintptr_t kClose = std::uintptr_t{1} << 20;
  for (std::size_t i = 0; i < views.size(); ++i) {
    auto first = reinterpret_cast<std::uintptr_t>(views[i].data), last = first + views[i].nbytes();
    bool before = address < first, after = address >= last;
    if (views[i].data == nullptr || (before && first - address > kClose) ||
        (after && address - last >= kClose))
      continue;
    out << "  the address is ";
    if (before) out << std::uint64_t{first - address} << " bytes before the start of ";
    if (after) out << std::uint64_t{address - last} << " bytes after the end of ";
    if (!before && !after) out << "inside ";
    write_name(out, side, i, labels);
    out << "\n";
  }
}

void write_record(Writer& out, const KernelRecord& record) noexcept {
  out << "kernel '" << record.kernel << "'";
  if (record.site[0] != '\0') out << ", called at " << record.site;
  if (record.lanes != 1)
    out << ", one of the " << static_cast<std::uint64_t>(record.lanes) << " lanes of a vmap";
  out << "\n";
  write_arrays(out, "operand", record.call.operands, record.labels.operands);
  write_arrays(out, "result", record.call.results, record.labels.results);
}

void write_report(const char* signal, const siginfo_t* info) noexcept {
  Writer out;
  // Only faults have an address. x86 gives 0 for addresses that can't exist.
  bool fault = info != nullptr && info->si_code > 0 &&
               (info->si_signo == SIGSEGV || info->si_signo == SIGBUS);
  auto address = fault ? reinterpret_cast<std::uintptr_t>(info->si_addr) : 0;
  auto head = [&](const char* where) {
    out << "\ncallgate: " << signal;
    if (fault) (out << " at address ").hex(address);
    out << where;
  };
  if (const KernelRecord* record = current) {
    head(" in ");
    write_record(out, *record);
    if (fault) {
      write_place(out, address, "operand", record->call.operands, record->labels.operands);
      write_place(out, address, "result", record->call.results, record->labels.results);
    }
    return;
  }
  const KernelRecord* shown = nullptr;
  for (const auto& slot : slots) {
    const KernelRecord* record = slot.load(std::memory_order_acquire);  // see RunningKernel
    if (record == nullptr || record == shown) continue;  // each thread of a kernel has a slot
    if (shown == nullptr) head(" on a thread that callgate did not start, while there ran\n");
    shown = record;
    write_record(out, *record);
  }
}

// --- The handlers ----------------------------------------------------------------------------

void on_signal(int number, siginfo_t* info, void* context);

void leave_to_default(int number, const siginfo_t* info) noexcept {
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  ::sigaction(number, &action, nullptr);
  // A fault repeats when the handler returns; a signal that was sent must be sent again.
  if (info == nullptr || info->si_code <= 0 || number == SIGABRT) ::raise(number);
}

// As if this handler didn't exist.
void chain(const struct sigaction& previous, int number, siginfo_t* info, void* context) noexcept {
  if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(number, info, context);
  if (previous.sa_handler == SIG_DFL) return leave_to_default(number, info);
  if (previous.sa_handler != SIG_IGN) return previous.sa_handler(number);
  if (info != nullptr && info->si_code > 0) leave_to_default(number, info);  // can't be ignored
}

bool is_ours(const struct sigaction& action) noexcept {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_signal;
}

// True if the previous handler has raised the signal again for its own predecessor, and that is
// this handler. The other handler was installed between two installations of this one, and the two
// would call each other for ever.
bool is_passed_back(int number) noexcept {
  struct sigaction now{};
  sigset_t pending;
  return ::sigpending(&pending) == 0 && sigismember(&pending, number) == 1 &&
         ::sigaction(number, nullptr, &now) == 0 && is_ours(now);
}

void on_signal(int number, siginfo_t* info, void* context) {
  CALLGATE_STATIC_TLS static thread_local bool inside = false;
  int kept_errno = errno;
  if (inside) {
    leave_to_default(number, info);  // a crash in the handlers, or handlers that call each other
  } else {
    inside = true;
    const Handled& signal = *std::ranges::find(handled, number, &Handled::number);
    if (kernel_mode(KernelMode::kCrashReport)) write_report(signal.name, info);
    chain(signal.before, number, info, context);
    if (is_passed_back(number)) leave_to_default(number, info);
    inside = false;
  }
  errno = kept_errno;
}

// A stack for the handler of a thread whose own stack has overflowed.
struct SignalStack {
  SignalStack() noexcept {
    stack_t now{};
    if (::sigaltstack(nullptr, &now) != 0 || (now.ss_flags & SS_DISABLE) == 0) return;
    constexpr std::size_t kBytes = std::size_t{64} << 10;
    memory = std::malloc(kBytes);
    stack_t ours{};
    ours.ss_sp = memory;
    ours.ss_size = kBytes;
    if (memory != nullptr) ::sigaltstack(&ours, nullptr);
  }
  ~SignalStack() {
    stack_t now{};
    if (memory == nullptr || ::sigaltstack(nullptr, &now) != 0) return;
    stack_t none{};
    none.ss_flags = SS_DISABLE;
    if (now.ss_sp == memory) ::sigaltstack(&none, nullptr);
    std::free(memory);
  }

  void* memory = nullptr;
};

}  // namespace

const KernelRecord* running_kernel() noexcept { return current; }

RunningKernel::RunningKernel(const KernelRecord* record) noexcept : before_(current) {
  static thread_local SignalStack stack;
  (void)stack;
  current = record;
  for (; slot_ < slots.size(); ++slot_) {
    const KernelRecord* free = nullptr;
    // Release: a handler on another thread that sees the record also sees its content.
    if (slots[slot_].compare_exchange_strong(free, record, std::memory_order_release,
                                             std::memory_order_relaxed))
      return;
  }
}

RunningKernel::~RunningKernel() {
  if (slot_ < slots.size()) slots[slot_].store(nullptr, std::memory_order_relaxed);
  current = before_;
}

void set_crash_report(bool on) {
  set_kernel_mode(KernelMode::kCrashReport, on);
  for (Handled& signal : handled) {
    struct sigaction now{};
    ::sigaction(signal.number, nullptr, &now);
    if (on && !is_ours(now)) {
      struct sigaction ours{};
      ours.sa_sigaction = &on_signal;
      ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
      sigemptyset(&ours.sa_mask);
      signal.before = now;
      signal.chained = true;
      ::sigaction(signal.number, &ours, nullptr);
    } else if (!on && signal.chained && is_ours(now)) {
      // If another handler was installed later and may call this one, it stays and only passes on.
      signal.chained = false;
      ::sigaction(signal.number, &signal.before, nullptr);
    }
  }
}

}  // namespace callgate

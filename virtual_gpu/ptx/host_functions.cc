// SPDX-License-Identifier: Apache-2.0
// Functions that the host runs for kernels. See host_functions.h.
#include "host_functions.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "elementwise.h"

// The driver's: what a kernel sets a conditional node of a graph to.
extern "C" __attribute__((weak)) void vgpu_set_conditional(std::uint64_t handle, unsigned value);

namespace vgpu::ptx {
namespace {

// The values of a call, for one lane.
class Arguments {
 public:
  Arguments(Warp& warp, const Instruction& instruction, std::uint32_t lane)
      : warp_(warp), instruction_(instruction), lane_(lane) {}
  template <typename T>
  T get(std::size_t index) {
    T value{};
    std::memcpy(&value, at(instruction_.call->parameters[index], sizeof(T)), sizeof(T));
    return value;
  }
  template <typename T>
  void set(const T& value) {
    if (instruction_.call->results.empty()) return;
    std::memcpy(at(instruction_.call->results[0], sizeof(T)), &value, sizeof(T));
  }
  // What a kernel's pointer points to.
  template <typename T>
  T read(std::uint64_t address) {
    T value{};
    std::memcpy(&value, warp_.resolve(Space::kGeneric, address, sizeof(T), lane_, instruction_),
                sizeof(T));
    return value;
  }
  std::string text(std::uint64_t address) {
    std::string result;
    if (address == 0) return "(null)";
    for (;; ++address) {
      char c = read<char>(address);
      if (c == '\0' || result.size() > 4096) return result;
      result += c;
    }
  }

 private:
  std::byte* at(std::uint32_t offset, std::size_t bytes) {
    return warp_.local(warp_.frame().local_base + offset, static_cast<std::uint32_t>(bytes), lane_,
                       instruction_);
  }
  Warp& warp_;
  const Instruction& instruction_;
  std::uint32_t lane_;
};

template <typename... Values>
std::string formatted(const std::string& format, Values... values) {
  char buffer[512];
  int length = std::snprintf(buffer, sizeof(buffer), format.c_str(), values...);
  return {buffer, static_cast<std::size_t>(length < 0 ? 0 : length < 511 ? length : 511)};
}

// printf's text from a format and a buffer of arguments, each at its own alignment.
class Printer {
 public:
  Printer(Arguments& arguments, std::uint64_t buffer) : arguments_(arguments), next_(buffer) {}

  std::string text(const std::string& format) {
    std::string out;
    for (std::size_t i = 0; i < format.size(); ++i) {
      if (format[i] != '%') {
        out += format[i];
      } else {
        out += item(format, i);
      }
    }
    return out;
  }

 private:
  template <typename T>
  T take() {
    next_ = (next_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    return arguments_.read<T>(std::exchange(next_, next_ + sizeof(T)));
  }

  std::string item(const std::string& format, std::size_t& i) {
    std::string item = "%";
    bool is_long = false;
    for (++i; i < format.size(); ++i) {
      char c = format[i];
      if (c == '*') {
        item += std::to_string(take<std::int32_t>());
      } else if (c == 'l' || c == 'j' || c == 'z' || c == 't') {
        is_long = true;
      } else if (c != 'h') {
        item += c;
        if (std::string_view("-+ #.0123456789").find(c) == std::string_view::npos) break;
      }
    }
    return convert(item, is_long);
  }

  std::string convert(std::string item, bool is_long) {
    switch (item.back()) {
      case '%': return "%";
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o':
        if (!is_long) return formatted(item, take<std::int32_t>());
        item.insert(item.size() - 1, "ll");
        return formatted(item, static_cast<long long>(take<std::int64_t>()));
      case 'c': return formatted(item, take<std::int32_t>());
      case 'p': return formatted(item, reinterpret_cast<void*>(take<std::uint64_t>()));
      case 's': return formatted(item, arguments_.text(take<std::uint64_t>()).c_str());
      default: return formatted(item, take<double>());
    }
  }

  Arguments& arguments_;
  std::uint64_t next_;
};

void print(Warp& warp, const Instruction& instruction, Lanes lanes) {
  each_lane(lanes, [&](std::uint32_t lane) {
    Arguments arguments(warp, instruction, lane);
    std::string format = arguments.text(arguments.get<std::uint64_t>(0));
    std::string text = Printer(arguments, arguments.get<std::uint64_t>(1)).text(format);
    std::fwrite(text.data(), 1, text.size(), stdout);
    arguments.set(static_cast<std::int32_t>(text.size()));
  });
  std::fflush(stdout);
}

void assertion(Warp& warp, const Instruction& instruction, Lanes lanes) {
  auto lane = static_cast<std::uint32_t>(std::countr_zero(lanes));
  Arguments arguments(warp, instruction, lane);
  std::string text = arguments.text(arguments.get<std::uint64_t>(0));
  std::string file = arguments.text(arguments.get<std::uint64_t>(1));
  std::string function = arguments.text(arguments.get<std::uint64_t>(3));
  throw Fault{Result::kAssert, file + ":" + std::to_string(arguments.get<std::uint32_t>(2)) + ": " +
                                   function + ": assertion `" + text + "` failed at " +
                                   warp.where(instruction, lane)};
}

void allocate(Warp& warp, const Instruction& instruction, Lanes lanes) {
  each_lane(lanes, [&](std::uint32_t lane) {
    Arguments arguments(warp, instruction, lane);
    arguments.set(warp.worker().grid().memory->allocate(arguments.get<std::uint64_t>(0), 16));
  });
}
void release(Warp& warp, const Instruction& instruction, Lanes lanes) {
  each_lane(lanes, [&](std::uint32_t lane) {
    Arguments arguments(warp, instruction, lane);
    auto address = arguments.get<std::uint64_t>(0);
    if (address != 0) warp.worker().grid().memory->free(address);
  });
}

void set_conditional(Warp& warp, const Instruction& instruction, Lanes lanes) {
  if (vgpu_set_conditional == nullptr) {
    throw Fault{Result::kIllegalInstruction, "cudaGraphSetConditional without a driver's graphs"};
  }
  each_lane(lanes, [&](std::uint32_t lane) {
    Arguments arguments(warp, instruction, lane);
    vgpu_set_conditional(arguments.get<std::uint64_t>(0), arguments.get<std::uint32_t>(1));
  });
}

}  // namespace

Instruction::Run host_function(std::string_view name) {
  if (name == "vprintf") return print;
  if (name == "__assertfail") return assertion;
  if (name == "malloc") return allocate;
  if (name == "free") return release;
  if (name == "cudaGraphSetConditional") return set_conditional;
  return nullptr;
}

}  // namespace vgpu::ptx

// SPDX-License-Identifier: Apache-2.0
// Which test has which instruction: the table INSTRUCTIONS.md, and an error where one has no test.
//
// run_kernel() notes each text that was compiled, with the file of the running test. After the last
// test the interpreter's own list is gone through. VIRTUAL_GPU_PTX_WRITE=1 writes the table anew.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "kernel_test.h"
#include "ptx/decoder.h"

namespace vgpu::ptx {
namespace {

using Files = std::set<std::string>;
std::map<const Opcode*, Files>& seen() {
  static auto* all = new std::map<const Opcode*, Files>();
  return *all;
}

// As Decoder::decode() chooses.
const Opcode* opcode_of(const Statement& statement) {
  for (const Opcode& each : all_opcodes()) {
    if (each.name == statement.name && (each.fits == nullptr || each.fits(statement))) return &each;
  }
  return nullptr;
}

// In a Markdown table a bar ends the cell.
std::string cell(std::string_view text) {
  std::string result;
  for (char each : text) result += each == '|' ? std::string("\\|") : std::string(1, each);
  return result;
}

std::string table() {
  std::string text =
      "# Instructions\n\nWhat the interpreter knows, and the tests that run it. Written by the "
      "tests (`VIRTUAL_GPU_PTX_WRITE=1`), which fail\nfor an instruction without one and for a "
      "table that is old.\n\n| instruction | forms | tests |\n| --- | --- | --- |\n";
  for (const Opcode& each : all_opcodes()) {
    std::string files;
    for (const std::string& file : seen()[&each]) files += (files.empty() ? "" : ", ") + file;
    const std::string forms = each.forms.empty() ? "" : "`" + cell(each.forms) + "`";
    text += "| `" + std::string(each.name) + "` | " + forms + " | " + files + " |\n";
  }
  return text;
}

class Coverage final : public testing::Environment {
 public:
  void TearDown() override {
    const auto& all = *testing::UnitTest::GetInstance();
    if (all.test_to_run_count() != all.total_test_count()) return;  // a part says nothing
    for (const Opcode& each : all_opcodes()) {
      if (seen()[&each].empty()) ADD_FAILURE() << each.name << each.forms << " has no test";
    }
    const std::filesystem::path path = VIRTUAL_GPU_INSTRUCTIONS;
    if (std::getenv("VIRTUAL_GPU_PTX_WRITE") != nullptr) std::ofstream(path) << table();
    std::stringstream written;
    written << std::ifstream(path).rdbuf();
    EXPECT_EQ(written.str(), table()) << "VIRTUAL_GPU_PTX_WRITE=1 writes it";
  }
};
const auto* const kCoverage = testing::AddGlobalTestEnvironment(new Coverage);

}  // namespace

void note(const std::string& text) {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string file = std::filesystem::path(test->file()).stem().string();
  for (const auto& function : parse(text).functions) {
    for (const Statement& statement : function->body) {
      if (statement.kind != Statement::Kind::kInstruction) continue;
      if (const Opcode* known = opcode_of(statement)) seen()[known].insert(file);
    }
  }
}

}  // namespace vgpu::ptx

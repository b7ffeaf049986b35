// The text of PTX: statements, and parts of strings.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

namespace uly_emulated {
namespace ptx {

bool starts(const std::string &s, const char *with);
bool ends(const std::string &s, const char *with);
// trimmed returns s without white space at its ends.
std::string trimmed(const std::string &s);
// split returns the trimmed parts between separators that are not inside of brackets.
std::vector<std::string> split(const std::string &s, char at);

// Statement is a statement with its line: text up to a semicolon, a brace, the colon of a label, or
// the end of the line of a location.
struct Statement {
  std::string text;
  uint32_t line;
};

// statements splits text[from, to). Braces of operands stay in their statement.
std::vector<Statement> statements(const std::string &text, size_t from, size_t to);

} // namespace ptx
} // namespace uly_emulated

#include "statements.h"

#include <string.h>

#include <algorithm>

namespace uly_emulated {
namespace ptx {

bool starts(const std::string &s, const char *with) { return s.compare(0, strlen(with), with) == 0; }
bool ends(const std::string &s, const char *with) {
  return s.size() >= strlen(with) && s.compare(s.size() - strlen(with), std::string::npos, with) == 0;
}
std::string trimmed(const std::string &s) {
  const size_t a = s.find_first_not_of(" \t\n\r"), b = s.find_last_not_of(" \t\n\r");
  return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}
std::vector<std::string> split(const std::string &s, char at) {
  std::vector<std::string> all;
  int depth = 0;
  std::string part;
  for (char c : s) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == at && depth == 0) {
      all.push_back(trimmed(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trimmed(part).empty() || !all.empty()) all.push_back(trimmed(part));
  return all;
}

std::vector<Statement> statements(const std::string &text, size_t from, size_t to) {
  std::vector<Statement> all;
  uint32_t line = 1 + (uint32_t)std::count(text.begin(), text.begin() + (int64_t)from, '\n');
  std::string s;
  auto take = [&] {
    s = trimmed(s);
    if (!s.empty()) all.push_back({s, line});
    s.clear();
  };
  for (size_t i = from; i < to; i++) {
    const char c = text[i];
    if (c == '/' && text[i + 1] == '/') {
      i = std::min(text.find('\n', i), to) - 1;
      continue;
    }
    const bool fresh = trimmed(s).empty();
    if (c == ';' || (c == '\n' && starts(trimmed(s), ".loc"))) take();
    else if (c == '{' && fresh) all.push_back({"{", line});
    else if (c == '}' && fresh) all.push_back({"}", line});
    else if (c == ':' && text[i + 1] != ':' && s.back() != ':' && s.find_first_of("[ ") == std::string::npos) {
      s += c;
      take();
    } else {
      s += c;
    }
    if (c == '\n') line++;
  }
  take();
  return all;
}

} // namespace ptx
} // namespace uly_emulated

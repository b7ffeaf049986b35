// Reads PTX: the statements of a kernel become Instructions.
#include "program.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <unordered_map>

#include "../settings.h"
#include "statements.h"

namespace uly_emulated {
namespace ptx {
namespace {

std::string read(const std::string &path) {
  FILE *f = fopen(path.c_str(), "rb");
  if (!f) throw Fault("cannot read " + path);
  std::string text;
  char part[65536];
  for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) text.append(part, n);
  fclose(f);
  return text;
}

// plain_name returns what the symbols of g++ and of nvcc have in common. nvcc names anonymous
// namespaces after their file, and does not mark static functions. The two write a type that
// depends on a template's arguments differently; the arguments, which end in EEv, identify such a
// kernel.
std::string plain_name(std::string name) {
  if (starts(name, "_ZL")) name.erase(2, 1);
  if (const size_t end = name.find("EEv"); name.find("Xsr") != std::string::npos && end != std::string::npos)
    name.resize(end + 3);
  const char *mark = "_GLOBAL__N__";
  std::string out;
  for (size_t i = 0; i < name.size();) {
    size_t digits = i;
    while (digits < name.size() && isdigit((unsigned char)name[digits])) digits++;
    if (digits > i && name.compare(digits, strlen(mark), mark) == 0) {
      out += "12_GLOBAL__N_1";
      i = digits + (size_t)atoi(name.c_str() + i);
    } else {
      digits = std::max(digits, i + 1);
      out.append(name, i, digits - i);
      i = digits;
    }
  }
  return out;
}

Width width_of(const std::string &type, uint32_t line) {
  if (type == ".pred") return PREDICATE;
  if (ends(type, "16")) return HALF;
  if (ends(type, "32")) return WORD;
  if (ends(type, "64")) return LONG;
  throw Fault(format("line %u: a register of type %s", line, type.c_str()));
}
Width width_of(char letter) { return letter == 'p' ? PREDICATE : letter == 'h' ? HALF : letter == 'w' ? WORD : LONG; }
uint32_t type_bytes(const std::string &type) { // .b8, .u32, …
  return ends(type, "8") ? 1 : ends(type, "16") ? 2 : ends(type, "32") ? 4 : 8;
}
size_t table_bytes(Width w) { return w == PREDICATE ? 64 : w == HALF ? 64 : w == WORD ? 128 : 256; }

struct Register {
  Width width;
  uint32_t at;
};

const char *const specials[SPECIALS] = {"%tid.x",   "%tid.y",   "%tid.z",   "%ntid.x",   "%ntid.y",   "%ntid.z",
                                        "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z"};

// Reader builds one program.
class Reader {
 public:
  Reader(const std::string &file, const std::string &text) : text(text) {
    p.file = file;
    p.register_bytes = SPECIALS * TABLE;
    scopes.emplace_back();
    for (uint32_t n = 0; n < SPECIALS; n++) scopes[0][specials[n]] = {WORD, n * TABLE};
    for (size_t at = 0; (at = text.find("\n.extern .shared", at)) != std::string::npos;) {
      const size_t end = text.find(';', ++at);
      declare_shared({text.substr(at, end - at), 0});
    }
    for (size_t at = 0; (at = text.find("\n\t.file\t", at)) != std::string::npos;) { // NUMBER "PATH"
      const size_t space = text.find(' ', at += strlen("\n\t.file\t")), end = text.find('"', space + 2);
      const std::string path = text.substr(space + 2, end - space - 2);
      files[text.substr(at, space - at)] = path.substr(path.find_last_of('/') + 1);
    }
  }
  Program read(size_t entry);

 private:
  typedef std::unordered_map<std::string, Register> Scope;
  struct Dynamic { // an extern array, placed behind all others
    std::string name;
    uint32_t alignment;
  };

  const std::string &text;
  Program p;
  std::vector<Scope> scopes;
  std::map<std::string, uint64_t> symbols; // addresses of shared memory and of parameters
  std::vector<Dynamic> dynamic;
  std::unordered_map<std::string, uint32_t> labels;
  std::vector<std::pair<size_t, std::string>> branches;
  std::map<std::pair<uint64_t, Width>, uint32_t> constants;
  uint32_t line = 0;
  std::map<std::string, std::string> files; // by number (.file)
  std::string source;

  [[noreturn]] void fail(const std::string &why) const { throw Fault(format("line %u: %s", line, why.c_str())); }
  uint32_t place(Width w) {
    const uint32_t at = (uint32_t)p.register_bytes;
    p.register_bytes += table_bytes(w);
    return at;
  }
  uint32_t constant(uint64_t value, Width w) {
    auto [it, fresh] = constants.insert({{value, w}, 0});
    if (fresh) {
      it->second = place(w);
      p.constants.push_back({it->second, w, value});
    }
    return it->second;
  }
  void parameters(const std::string &text);
  void declare_shared(const Statement &s);
  void declare(const std::string &text);
  const Register *find(const std::string &name) const {
    for (size_t n = scopes.size(); n-- > 0;)
      if (auto it = scopes[n].find(name); it != scopes[n].end()) return &it->second;
    return nullptr;
  }
  bool number(const std::string &s, uint64_t *value) const;
  uint32_t operand(const std::string &s, Width w);
  void address(const std::string &s, Instruction *i);
  void operands(Instruction *i, const std::vector<std::string> &all, const char *letters);
  void access(Instruction *i, const std::vector<std::string> &parts, const std::vector<std::string> &all);
  void operation(Instruction *i, std::string name, const std::vector<std::string> &all);
  void instruction(const std::string &text);
  void location(const std::string &text);
};

void Reader::parameters(const std::string &text) {
  for (const std::string &one : split(text, ',')) {
    std::vector<std::string> words;
    for (const std::string &word : split(one, ' '))
      if (!word.empty()) words.push_back(word);
    if (words.size() < 3 || words[0] != ".param") fail("a parameter: " + one);
    std::string name = words.back(), type = words[words.size() - 2];
    size_t bytes = 0, alignment = 0;
    if (const size_t bracket = name.find('['); bracket != std::string::npos) {
      bytes = (size_t)atoll(name.c_str() + bracket + 1);
      name.resize(bracket);
      for (size_t n = 0; n + 1 < words.size(); n++)
        if (words[n] == ".align") alignment = (size_t)atoll(words[n + 1].c_str());
    } else {
      bytes = alignment = type_bytes(type);
    }
    if (!bytes || !alignment) fail("a parameter: " + one);
    p.parameter_bytes = (p.parameter_bytes + alignment - 1) / alignment * alignment;
    p.parameters.push_back({p.parameter_bytes, bytes});
    symbols[name] = p.parameter_bytes;
    p.parameter_bytes += bytes;
  }
}

// declare_shared reads [.extern] .shared .align 4 .b8 name[bytes], and ignores other statements.
void Reader::declare_shared(const Statement &s) {
  const bool external = starts(s.text, ".extern .shared");
  if (!external && !starts(s.text, ".shared")) return;
  line = s.line;
  uint32_t alignment = 1;
  if (const size_t at = s.text.find(".align "); at != std::string::npos)
    alignment = (uint32_t)atoll(s.text.c_str() + at + 7);
  const size_t space = s.text.find_last_of(' ');
  std::string name = trimmed(s.text.substr(space));
  const std::string before = trimmed(s.text.substr(0, space)), type = before.substr(before.find_last_of(' ') + 1);
  uint32_t bytes = type_bytes(type);
  if (const size_t bracket = name.find('['); bracket != std::string::npos) {
    bytes *= (uint32_t)atoll(name.c_str() + bracket + 1);
    name.resize(bracket);
  }
  if (external) {
    dynamic.push_back({name, alignment});
    return;
  }
  p.fixed_shared = (p.fixed_shared + alignment - 1) / alignment * alignment;
  symbols[name] = SHARED_START + p.fixed_shared;
  p.fixed_shared += bytes;
}

// declare reads: .reg .b32 %r<12>, or .reg .pred p, q
void Reader::declare(const std::string &text) {
  const size_t space = text.find_first_of(" \t", 5);
  const std::string type = trimmed(text.substr(5, space - 5));
  const Width w = width_of(type, line);
  for (std::string name : split(text.substr(space), ',')) {
    const size_t bracket = name.find('<');
    if (bracket == std::string::npos) {
      scopes.back()[name] = {w, place(w)};
      continue;
    }
    const int n = atoi(name.c_str() + bracket + 1);
    name.resize(bracket);
    for (int k = 0; k < n; k++) scopes.back()[name + std::to_string(k)] = {w, place(w)};
  }
}

bool Reader::number(const std::string &s, uint64_t *value) const {
  if (s.empty()) return false;
  if (starts(s, "0f") || starts(s, "0d")) {
    *value = strtoull(s.c_str() + 2, nullptr, 16);
    return true;
  }
  if (!isdigit((unsigned char)s[0]) && s[0] != '-') return false;
  char *end;
  *value = s[0] == '-' ? (uint64_t)strtoll(s.c_str(), &end, 0) : strtoull(s.c_str(), &end, 0);
  if (*end && strcmp(end, "U")) fail("a number: " + s);
  return true;
}

uint32_t Reader::operand(const std::string &s, Width w) {
  if (const Register *r = find(s)) {
    if (r->width != w) fail("register " + s + " of another width");
    return r->at;
  }
  uint64_t value;
  if (number(s, &value)) {
    if (w == PREDICATE) value = value ? ~0u : 0;
    return constant(value, w);
  }
  if (auto it = symbols.find(s); it != symbols.end()) return constant(it->second, w);
  fail("operand " + s);
}

// address reads: [register + offset], [symbol + offset]
void Reader::address(const std::string &s, Instruction *i) {
  if (s.size() < 3 || s[0] != '[' || s.back() != ']') fail("an address: " + s);
  std::string base = s.substr(1, s.size() - 2);
  if (const size_t plus = base.find('+'); plus != std::string::npos) {
    i->offset = strtoll(base.c_str() + plus + 1, nullptr, 0);
    base.resize(plus);
  }
  if (const Register *r = find(base)) {
    i->width = r->width;
    if (r->width != LONG && r->width != WORD) fail("an address: " + s);
    i->at.push_back(r->at);
  } else if (auto it = symbols.find(base); it != symbols.end()) {
    i->width = LONG;
    i->at.push_back(constant(it->second, LONG));
  } else {
    fail("an address: " + s);
  }
}

// operands appends operands with widths by letter. a is an address, s and g are addresses of shared
// and global memory in a register alone, and an operand in braces has a letter for each register.
void Reader::operands(Instruction *i, const std::vector<std::string> &all, const char *letters) {
  std::vector<std::string> flat;
  for (const std::string &s : all) {
    if (s[0] == '{')
      for (const std::string &part : split(s.substr(1, s.size() - 2), ',')) flat.push_back(part);
    else if (const size_t bar = s.find('|'); bar != std::string::npos && s[0] != '[')
      flat.push_back(s.substr(0, bar)), flat.push_back(s.substr(bar + 1));
    else flat.push_back(s);
  }
  if (flat.size() != strlen(letters)) fail(format("%zu operands, not %zu", flat.size(), strlen(letters)));
  for (size_t n = 0; n < flat.size(); n++) {
    if (letters[n] == 'a') address(flat[n], i);
    else if (letters[n] == 's') i->at.push_back(operand(trimmed(flat[n].substr(1, flat[n].size() - 2)), WORD));
    else if (letters[n] == 'g') i->at.push_back(operand(trimmed(flat[n].substr(1, flat[n].size() - 2)), LONG));
    else i->at.push_back(operand(flat[n], width_of(letters[n])));
  }
}

// access reads ld or st, with a space and with v2 or v4 or without.
void Reader::access(Instruction *i, const std::vector<std::string> &parts, const std::vector<std::string> &all) {
  const bool loads = parts[0] == "ld";
  std::string space;
  for (size_t n = 1; n + 1 < parts.size(); n++) {
    if (parts[n] == "v2" || parts[n] == "v4") i->count = (uint8_t)(parts[n][1] - '0');
    else if (parts[n] == "global" || parts[n] == "shared" || parts[n] == "param") space = parts[n];
    else if (parts[n] != "wb") return; // the default of stores
  }
  std::string values = all[loads ? 0 : 1];
  if (values[0] == '{') values = values.substr(1, values.size() - 2);
  const std::vector<std::string> registers = split(values, ',');
  if (registers.size() != i->count) return;
  const std::string &type = parts.back();
  // registers may be wider than the type
  const Register *r = find(registers[0]);
  const Width w = r ? r->width : type_bytes(type) <= 2 ? HALF : type_bytes(type) == 4 ? WORD : LONG;
  if (!loads) address(all[0], i);
  for (const std::string &value : registers) i->at.push_back(operand(value, w));
  if (loads) address(all[1], i);
  i->run = loads ? load(space, type, w) : store(space, type, w);
  if (space != "param")
    i->accesses.push_back({space == "shared"   ? Space::SHARED
                           : space == "global" ? Space::GLOBAL
                                               : Space::ANY,
                           (uint8_t)(loads ? i->count : 0), i->count * type_bytes(type), i->width});
}

// operation reads an instruction that has an Operation.
void Reader::operation(Instruction *i, std::string name, const std::vector<std::string> &all) {
  if (starts(name, "mov.") && all.size() == 2 && all[0][0] == '{') name.replace(0, 3, "unpack");
  else if (starts(name, "mov.") && all.size() == 2 && all[1][0] == '{') name.replace(0, 3, "pack");
  const Operation *o = arithmetic(name);
  if (!o) o = memory(name);
  if (!o) o = product(name);
  if (!o) return;
  std::string letters = o->operands ? o->operands : "";
  if (!o->operands) { // wgmma: the columns are in the name, and A is in registers or not
    const size_t columns = (size_t)atoi(name.c_str() + strlen("wgmma.mma_async.sync.aligned.m64n"));
    i->count = (uint8_t)(columns / 8);
    letters = std::string(columns / 2, 'w') + (all.size() > 1 && all[1][0] == '{' ? "wwwwlpwww" : "llpwwww");
  }
  operands(i, all, letters.c_str());
  i->run = o->run, i->kind = o->kind;
  for (size_t n = 0; n < letters.size() && o->bytes; n++)
    if (const char c = letters[n]; c == 's' || c == 'g' || c == 'a') {
      const bool shared = c == 's' || (c == 'a' && name.find(".shared") != std::string::npos);
      i->accesses.push_back({shared ? Space::SHARED : Space::GLOBAL, (uint8_t)n, o->bytes,
                             c == 's'   ? WORD
                             : c == 'g' ? LONG
                                        : i->width});
    }
}

// location reads .loc FILE LINE COLUMN[, …], which nvcc writes with -lineinfo.
void Reader::location(const std::string &text) {
  const std::vector<std::string> words = split(trimmed(text.substr(strlen(".loc"))), ' ');
  if (words.size() < 2) fail("a location: " + text);
  source = files[words[0]] + ":" + words[1];
}

void Reader::instruction(const std::string &text) {
  Instruction i;
  i.line = line;
  i.source = source;
  std::string rest = text;
  if (rest[0] == '@') {
    const size_t end = rest.find_first_of(" \t"), first = rest[1] == '!' ? 2 : 1;
    i.has_guard = true;
    i.negated = first == 2;
    i.guard = operand(rest.substr(first, end - first), PREDICATE);
    rest = trimmed(rest.substr(end));
  }
  const size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
  const std::string name = rest.substr(0, end);
  const std::vector<std::string> all = split(rest.substr(end), ','), parts = split(name, '.');
  i.name = name;

  if (parts[0] == "bra") {
    i.kind = Kind::BRANCH;
    branches.push_back({p.code.size(), all.at(0)});
  } else if (parts[0] == "ret") {
    i.kind = Kind::END;
  } else if (name == "bar.sync" || name == "bar.arrive" || name == "bar.red.or.pred") {
    i.kind = Kind::BARRIER;
    i.barrier = name == "bar.sync" ? Arrival::WAITS : name == "bar.arrive" ? Arrival::LEAVES : Arrival::ANY;
    operands(&i, all, i.barrier == Arrival::ANY ? "pwp" : all.size() == 1 ? "w" : "ww");
  } else if ((parts[0] == "ld" || parts[0] == "st") && all.size() == 2) {
    access(&i, parts, all);
  } else if (parts[0] == "cvt" && all.size() > 1 && find(all[0]) && find(all[1])) {
    for (const std::string &s : all) i.at.push_back(operand(s, find(s) ? find(s)->width : WORD));
    i.run = conversion(name, find(all[0])->width, find(all[1])->width);
  } else {
    operation(&i, name, all);
  }
  if (!i.run && (i.kind == Kind::PLAIN || i.kind == Kind::TOGETHER)) fail("an unknown instruction: " + text);
  p.code.push_back(std::move(i));
}

Program Reader::read(size_t entry) {
  const size_t open = text.find('(', entry), close = text.find(')', open), body = text.find('{', close);
  line = 1 + (uint32_t)std::count(text.begin(), text.begin() + (int64_t)open, '\n');
  std::string inside = text.substr(open + 1, close - open - 1);
  std::replace(inside.begin(), inside.end(), '\n', ' ');
  std::replace(inside.begin(), inside.end(), '\t', ' ');
  if (!trimmed(inside).empty()) parameters(inside);
  if (const size_t most = text.find(".maxntid", close); most < body)
    p.most_threads = (unsigned)atoi(text.c_str() + most + strlen(".maxntid"));
  size_t end = text.find("\n}", body);
  if (end == std::string::npos) fail("a kernel without an end");
  const std::vector<Statement> all = statements(text, body + 1, end);
  for (const Statement &s : all) declare_shared(s);
  // Arrays of all alignments up to 1024 begin behind the fixed ones.
  for (const Dynamic &d : dynamic) {
    p.fixed_shared = (p.fixed_shared + d.alignment - 1) / d.alignment * d.alignment;
    symbols[d.name] = SHARED_START + p.fixed_shared;
  }
  for (const Statement &s : all) {
    line = s.line;
    if (s.text == "{") scopes.emplace_back();
    else if (s.text == "}") scopes.pop_back();
    else if (starts(s.text, ".reg")) declare(s.text);
    else if (starts(s.text, ".shared") || starts(s.text, ".extern .shared") || starts(s.text, ".pragma")) continue;
    else if (starts(s.text, ".loc")) location(s.text);
    else if (s.text[0] == '.') fail("an unknown directive: " + s.text);
    else if (s.text.back() == ':') labels[s.text.substr(0, s.text.size() - 1)] = (uint32_t)p.code.size();
    else instruction(s.text);
  }
  for (auto &[at, label] : branches) {
    auto it = labels.find(label);
    if (it == labels.end()) fail("no label " + label);
    p.code[at].target = it->second;
  }
  return std::move(p);
}

// Folder has the kernels of all files of a folder and its subfolders: their file, and their place
// in it.
struct Folder {
  struct Entry {
    std::string file;
    size_t at;
  };
  std::map<std::string, std::string> texts; // by file
  std::unordered_map<std::string, Entry> entries;
  explicit Folder(const std::string &path) {
    std::error_code failed;
    for (auto &e : std::filesystem::recursive_directory_iterator(path, failed))
      if (e.path().extension() == ".ptx") texts[e.path().lexically_relative(path)] = ptx::read(e.path());
    for (auto &[file, text] : texts)
      for (size_t at = 0; (at = text.find(".entry ", at)) != std::string::npos;) {
        at += strlen(".entry ");
        const std::string symbol = trimmed(text.substr(at, text.find('(', at) - at)), name = plain_name(symbol);
        // A kernel of a header is in several files. Anonymous namespaces could have two of one
        // name.
        if (!entries.insert({name, {file, at}}).second && name != symbol)
          throw Fault(file + ": a second kernel " + name);
      }
    if (entries.empty()) throw Fault("no kernel in " + path + " (ULYSSES_EMULATED_PTX)");
  }
};

} // namespace

const Program &program(const std::string &symbol) {
  static std::unordered_map<std::string, std::unique_ptr<Program>> all;
  std::unique_ptr<Program> &p = all[symbol];
  if (p) return *p;
  static const Folder folder(getenv("ULYSSES_EMULATED_PTX"));
  auto it = folder.entries.find(plain_name(symbol));
  if (it == folder.entries.end()) throw Fault("no instructions of " + symbol);
  const std::string &text = folder.texts.at(it->second.file);
  try {
    p = std::make_unique<Program>(Reader(it->second.file, text).read(it->second.at));
  } catch (const Fault &f) { throw Fault(it->second.file + ": " + f.what()); }
  return *p;
}

} // namespace ptx
} // namespace uly_emulated

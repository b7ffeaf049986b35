// Names of the functions of this library, from its table of symbols.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <unordered_map>

#include "program.h"

namespace uly_emulated {
namespace ptx {

std::string symbol(const void *function) {
  Dl_info info;
  if (!dladdr(function, &info)) return "";
  static const auto names = [&] {
    std::unordered_map<uint64_t, std::string> all;
    const int fd = open(info.dli_fname, O_RDONLY | O_CLOEXEC);
    struct stat s;
    if (fd < 0 || fstat(fd, &s)) return all;
    void *map = mmap(nullptr, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED) return all;
    auto *file = static_cast<const unsigned char *>(map);
    auto *header = reinterpret_cast<const Elf64_Ehdr *>(file);
    auto *sections = reinterpret_cast<const Elf64_Shdr *>(file + header->e_shoff);
    for (int n = 0; n < header->e_shnum; n++) {
      if (sections[n].sh_type != SHT_SYMTAB) continue;
      auto *names = reinterpret_cast<const char *>(file + sections[sections[n].sh_link].sh_offset);
      auto *symbols = reinterpret_cast<const Elf64_Sym *>(file + sections[n].sh_offset);
      for (uint64_t k = 0; k < sections[n].sh_size / sizeof *symbols; k++)
        if (ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC) all[symbols[k].st_value] = names + symbols[k].st_name;
    }
    munmap(map, (size_t)s.st_size);
    return all;
  }();
  auto it = names.find((uint64_t)function - (uint64_t)info.dli_fbase);
  return it == names.end() ? "" : it->second;
}

} // namespace ptx
} // namespace uly_emulated

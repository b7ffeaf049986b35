// Apart from NCCL, so that it can be tested on the host.
#pragma once

#include <ctype.h>
#include <stdint.h>
#include <string.h>

// nccl_seconds reads a duration as Go writes it ("10m", "1h30m", "2.5s", "300ms"); 0 is without end; `otherwise` is for nothing and nonsense.
inline double nccl_seconds(const char *text, double otherwise) {
  if (!text || !*text) return otherwise;
  if (!strcmp(text, "0")) return 0;
  double sum = 0;
  while (*text) {
    const char *end = text;
    double x = 0, place = 1;
    for (; isdigit(static_cast<unsigned char>(*end)); end++) x = x * 10 + (*end - '0');
    if (*end == '.')
      for (end++; isdigit(static_cast<unsigned char>(*end)); end++) x += (place /= 10) * (*end - '0');
    if (end == text) return otherwise;
    static const struct { const char *name; double seconds; } units[] = {{"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}, {"h", 3600}, {"m", 60}, {"s", 1}};
    double scale = -1;
    for (const auto &u : units) {
      if (strncmp(end, u.name, strlen(u.name)) == 0) {
        scale = u.seconds;
        text = end + strlen(u.name);
        break;
      }
    }
    if (scale < 0) return otherwise;
    sum += x * scale;
  }
  return sum;
}

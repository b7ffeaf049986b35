// State that several processes share: handles of memory, and the counters of events.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace uly_emulated {

// Handle is the content of a cudaIpcMemHandle_t or cudaIpcEventHandle_t.
struct Handle {
  char magic[8];
  int32_t pid, fd;
  // offset, mapped and lead are those fields of an Allocation (heap.h). bytes is the size of the
  // allocation, or -1 - the position of an event's slot in its page.
  int64_t offset, mapped, lead, bytes;
};
void handle_write(int fd, int64_t offset, size_t mapped, size_t lead, int64_t bytes, char out[64]);
// handle_read returns false if the bytes are not a handle.
bool handle_read(const char in[64], Handle *h);
// handle_map maps `mapped` bytes of the process that made the handle; NULL if that fails.
char *handle_map(const Handle &h, size_t mapped);

// Slot is the state of an event that other processes see: the number of records, the number of
// completed records, and the first record that failed. Records complete in order, because all of
// them are in one stream. Slots are never freed, because another process may still read one.
struct Slot;
Slot *slot_create();
uint64_t slot_record(Slot *s); // returns the number of the new record
uint64_t slot_recorded(Slot *s);
void slot_complete(Slot *s, uint64_t n, bool failed);
bool slot_completed(Slot *s, uint64_t n, bool *failed);
int32_t slot_owner(Slot *s); // the process that made it
void slot_handle(Slot *s, char handle[64]);
Slot *slot_open(const char handle[64]);

} // namespace uly_emulated

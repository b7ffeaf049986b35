// crash_code makes a process that aborts exit with a code, after a line on stderr: the text and the
// reason of the crash.
void crash_code(int exit_code, const char *text);

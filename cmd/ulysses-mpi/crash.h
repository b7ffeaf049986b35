// crash_code makes a process that aborts exit with a code, after a text on stderr.
void crash_code(int exit_code, const char *text);

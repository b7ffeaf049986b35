//go:build race || asan

package need

// Instrumented reports whether the test is built with Go's race detector or AddressSanitizer.
const Instrumented = true

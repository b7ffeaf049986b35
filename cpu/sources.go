package cpu

import "embed"

// The go tool builds a package anew when a file that it knows has changed, and it does not know *.inc as C. Naming them here makes it
// look at them; nothing of them gets into the binary.
//
//go:embed *.inc
var _ embed.FS

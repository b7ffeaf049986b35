//go:build !linux

package comm

func copiesForbidden() bool { return false }

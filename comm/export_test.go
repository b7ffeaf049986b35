package comm

// What tests of communicators that stand on this package use of its own tests.

var (
	Suite      = suite
	Wrong      = wrong
	NewOperand = newOperand
	Reduced    = reducedTypes
)

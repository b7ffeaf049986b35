package comm

// What tests of communicators that stand on this package use of its own tests.

// Parts of this package's tests that the tests of package comm_test use.
var (
	Suite      = suite
	Wrong      = wrong
	Within     = within
	NewOperand = newOperand
	Reduced    = reducedTypes
)

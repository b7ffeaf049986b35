package status

import "regexp"

// goNames matches names of packages and functions before the text of an error.
var goNames = regexp.MustCompile(`\b(sp|gdn|comm|cuda|cpu|device|tensor|backends|libulysses)(\.[A-Za-z]+)*: `)

// WithoutGoNames returns the text of an error without the names of packages and functions before
// it, which users of jobs and of the C library do not know.
func WithoutGoNames(err error) string { return goNames.ReplaceAllString(err.Error(), "") }

package conformance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/device"
)

// Every operation has conformance cases: a file of this package calls it. Files of refusals do not
// count, because they check errors and no results.
func TestEveryOperationHasCases(t *testing.T) {
	called := map[string]bool{}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") || strings.Contains(path, "refusals") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if method, ok := n.(*ast.SelectorExpr); ok {
				if device, ok := method.X.(*ast.SelectorExpr); ok && device.Sel.Name == "dev" {
					called[method.Sel.Name] = true
				}
			}
			return true
		})
	}
	for _, o := range device.Operations {
		if !called[o.Name] {
			t.Errorf("operation %s has no conformance cases: add a test of it to the list in run", o.Name)
		}
	}
}

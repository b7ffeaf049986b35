package mpitest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
)

// testsOfRanks returns the names of the tests in a folder that run on several ranks: those that
// call Sizes, also through other functions of the tests.
func testsOfRanks(folder string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		return nil, err
	}
	mentions := map[string]map[string]bool{} // of each function: the identifiers in it
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			ids := map[string]bool{}
			ast.Inspect(fn.Body, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok {
					ids[id.Name] = true
				}
				return true
			})
			mentions[fn.Name.Name] = ids
		}
	}
	users := map[string]bool{"Sizes": true}
	for grew := true; grew; {
		grew = false
		for name, ids := range mentions {
			for id := range ids {
				if users[id] && !users[name] {
					users[name], grew = true, true
				}
			}
		}
	}
	var tests []string
	for name := range users {
		if strings.HasPrefix(name, "Test") && name != "TestMain" {
			tests = append(tests, name)
		}
	}
	slices.Sort(tests)
	return tests, nil
}

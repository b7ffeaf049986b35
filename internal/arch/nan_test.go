package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// root is the repository's folder.
const root = "../.."

// walkFiles calls f with the path, relative to root, of every file whose name ends as given.
// Folders of build products, of virtual environments and of version control are left out.
func walkFiles(t *testing.T, ends []string, f func(path string)) {
	t.Helper()
	seen := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		path, _ = filepath.Rel(root, path)
		if d.IsDir() {
			name := d.Name()
			if strings.HasPrefix(name, ".") && path != "." && name != ".ci" && name != ".github" || path == "bin" ||
				path == "build" || path == "lib" || path == "dist" || path == "out" ||
				path == "shared" || name == "__pycache__" {
				return fs.SkipDir
			}
			return nil
		}
		for _, end := range ends {
			if d.Type().IsRegular() && strings.HasSuffix(path, end) {
				seen++
				f(path)
				break
			}
		}
		return nil
	})
	if err != nil || seen == 0 {
		t.Fatalf("%d files that end in %v: %v", seen, ends, err)
	}
}

// In tests no comparison of a difference accepts NaN. `math.Abs(a-b) > tolerance` is false for NaN,
// so the test passes.
func TestComparisonsRefuseNaN(t *testing.T) {
	files := token.NewFileSet()
	packages := map[string][]*ast.File{} // by folder
	walkFiles(t, []string{".go"}, func(path string) {
		if !strings.HasSuffix(path, "_test.go") && !strings.HasPrefix(path, "testkit"+string(filepath.Separator)) {
			return
		}
		file, err := parser.ParseFile(files, filepath.Join(root, path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		packages[filepath.Dir(path)] = append(packages[filepath.Dir(path)], file)
	})
	for _, parsed := range packages {
		for _, at := range acceptsNaN(parsed) {
			p := files.Position(at)
			path, _ := filepath.Rel(root, p.Filename)
			t.Errorf("%s:%d: this comparison accepts NaN: use ulysses/testkit/near, or write !(difference <= tolerance)",
				path, p.Line)
		}
	}
}

// The rule finds what it is for, and nothing else.
func TestAcceptsNaN(t *testing.T) {
	for _, x := range []struct {
		statement string
		want      bool
	}{
		{"if math.Abs(a-b) > 1e-6 { t.Error() }", true},
		{"if n == 0 || math.Abs(a-b) >= 1e-6*a { t.Error() }", true},
		{"if 1e-6 < math.Abs(a-b) { t.Error() }", true},
		{"if d := math.Abs(a-b); d > 1e-6 { t.Error() }", true},
		{"d := 0.0; d = max(d, math.Abs(a-b)); if d/size > 1e-6 { t.Error() }", true},
		{"if e := far(a, b); e > 1e-6 { t.Error() }", true},
		{"if far(a, b) > 1e-6 { t.Error() }", true},
		{"if d := a - b; d > 1e-6 || d < -1e-6 { t.Error() }", true},
		{"if d := a - b; n > 1 && (-1e-6 > d || 1e-6 <= d) { t.Error() }", true},
		{"if !(math.Abs(a-b) <= 1e-6) { t.Error() }", false},
		{"if !(math.Abs(a-b) > 1e-6) { t.Error() }", false},
		{"if d := math.Abs(a-b); !(d <= 1e-6) { t.Error() }", false},
		{"if d := math.Abs(a-b); d != 0 { t.Error() }", false},
		{"if n > 1 && !(math.Abs(a-b) <= 1e-6) { t.Error() }", false},
		{"if n := len(x); n > 1 { t.Error() }", false},
		{"if n < 1 || n > 6 { t.Error() }", false},
		{"if d := a - b; !(d <= 1e-6 && d >= -1e-6) { t.Error() }", false},
	} {
		source := `package p
func far(a, b float64) (worst float64) { worst = math.Abs(a - b); return worst }
func test() { ` + x.statement + ` }`
		file, err := parser.ParseFile(token.NewFileSet(), "p.go", source, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(x.statement, err)
		}
		if got := len(acceptsNaN([]*ast.File{file})) > 0; got != x.want {
			t.Errorf("%s: found %v, want %v", x.statement, got, x.want)
		}
	}
}

// acceptsNaN returns the places, in the conditions of if statements of one package, where a
// difference is compared in a way that is false for NaN. A difference is an expression with a call
// of math.Abs, with a variable that such an expression was assigned to in the same function, or
// with a call of a function of the package that returns one. A value that is compared with a limit
// and with its negative is a difference as well.
func acceptsNaN(files []*ast.File) (found []token.Pos) {
	functions := map[string]bool{}
	for again := true; again; {
		again = false
		for _, f := range files {
			for _, d := range f.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil && !functions[f.Name.Name] &&
					returnsDifference(f, differences(f, functions)) {
					functions[f.Name.Name], again = true, true
				}
			}
		}
	}
	for _, f := range files {
		for _, d := range f.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			is := differences(f, functions)
			ast.Inspect(f.Body, func(n ast.Node) bool {
				if n, ok := n.(*ast.IfStmt); ok {
					found = append(found, open(n.Cond, is)...)
				}
				return true
			})
		}
	}
	return found
}

// open returns the comparisons below a condition that are false for NaN, and for which the
// condition then is false as well.
func open(cond ast.Expr, is func(ast.Expr) bool) []token.Pos {
	switch x := cond.(type) {
	case *ast.ParenExpr:
		return open(x.X, is)
	case *ast.BinaryExpr:
		switch x.Op {
		case token.LAND, token.LOR:
			if x.Op == token.LOR && (outside(x.X, x.Y) || outside(x.Y, x.X)) {
				return []token.Pos{x.Pos()}
			}
			return append(open(x.X, is), open(x.Y, is)...)
		case token.GTR, token.GEQ:
			if is(x.X) {
				return []token.Pos{x.Pos()}
			}
		case token.LSS, token.LEQ:
			if is(x.Y) {
				return []token.Pos{x.Pos()}
			}
		}
	}
	return nil
}

// outside reports whether the conditions are that a value is above a limit, and that it is below
// the negative of this limit.
func outside(above, below ast.Expr) bool {
	limit, value := sides(above)
	again, negative := sides(below)
	return value != "" && value == again && negative == "-"+limit
}

// sides returns the side of a comparison that is smaller if it is true, and the larger side.
func sides(cond ast.Expr) (small, large string) {
	for {
		x, ok := cond.(*ast.ParenExpr)
		if !ok {
			break
		}
		cond = x.X
	}
	x, ok := cond.(*ast.BinaryExpr)
	switch {
	case ok && (x.Op == token.LSS || x.Op == token.LEQ):
		return types.ExprString(x.X), types.ExprString(x.Y)
	case ok && (x.Op == token.GTR || x.Op == token.GEQ):
		return types.ExprString(x.Y), types.ExprString(x.X)
	}
	return "", ""
}

// differences returns whether an expression of a function holds a difference.
func differences(f *ast.FuncDecl, functions map[string]bool) func(ast.Expr) bool {
	variables := map[string]bool{}
	is := func(e ast.Expr) (found bool) {
		ast.Inspect(e, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncLit, *ast.CompositeLit:
				return false
			case *ast.CallExpr:
				name := fmt.Sprint(n.Fun)
				if s, ok := n.Fun.(*ast.SelectorExpr); ok {
					name = fmt.Sprint(s.X, ".", s.Sel)
				}
				found = found || name == "math.Abs" && hasMinus(n) || functions[name]
				// of other functions only those that pass a NaN on
				return name == "max" || name == "math.Max" || name == "math.Sqrt" || name == "float64" ||
					name == "float32"
			case *ast.Ident:
				found = found || variables[n.Name]
			}
			return true
		})
		return found
	}
	for range 2 {
		ast.Inspect(f.Body, func(n ast.Node) bool {
			a, ok := n.(*ast.AssignStmt)
			if ok && len(a.Lhs) == len(a.Rhs) {
				for i, left := range a.Lhs {
					if name, ok := left.(*ast.Ident); ok && is(a.Rhs[i]) {
						variables[name.Name] = true
					}
				}
			}
			if ok && len(a.Rhs) == 1 && len(a.Lhs) > 1 && is(a.Rhs[0]) {
				if name, ok := a.Lhs[0].(*ast.Ident); ok {
					variables[name.Name] = true
				}
			}
			return true
		})
	}
	return is
}

// hasMinus reports whether an argument of a call is a difference, or a value that a NaN can be in.
func hasMinus(call *ast.CallExpr) (found bool) {
	ast.Inspect(call, func(n ast.Node) bool {
		b, ok := n.(*ast.BinaryExpr)
		found = found || ok && b.Op == token.SUB
		return true
	})
	return found
}

// returnsDifference reports whether the first result of a function is a difference.
func returnsDifference(f *ast.FuncDecl, is func(ast.Expr) bool) (found bool) {
	results := f.Type.Results
	if results == nil {
		return false
	}
	if kind, ok := results.List[0].Type.(*ast.Ident); !ok || kind.Name != "float64" && kind.Name != "float32" {
		return false
	}
	ast.Inspect(f.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return false
		case *ast.ReturnStmt:
			if len(n.Results) > 0 {
				found = found || is(n.Results[0])
			} else if names := results.List[0].Names; len(names) > 0 {
				found = found || is(names[0])
			}
		}
		return true
	})
	return found
}

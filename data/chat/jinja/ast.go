package jinja

// expr is an expression of a template.
type expr interface {
	eval(in *interp) Value
}

// stmt is a statement of a template. It appends its output to b. The result says how the loop
// around it continues.
type stmt interface {
	exec(in *interp, b *builder) flow
}

type flow int

const (
	flowNext flow = iota
	flowBreak
	flowContinue
)

type (
	literal  struct{ value Value }
	nameExpr struct {
		name string
		line int
	}
	listExpr struct {
		items []expr
		tuple bool
	}
	dictExpr struct {
		keys, values []expr
		line         int
	}
	// attrExpr is x.name. It looks for a method first, then for a key.
	attrExpr struct {
		of   expr
		name string
		line int
	}
	// itemExpr is x[key]. It looks for a key first, then for a method.
	itemExpr struct {
		of, key expr
		line    int
	}
	sliceExpr struct {
		of           expr
		lo, hi, step expr // nil = absent
		line         int
	}
	callExpr struct {
		of   expr
		args arguments
		line int
	}
	filterExpr struct {
		of   expr // nil in a filter block
		name string
		args arguments
		line int
	}
	testExpr struct {
		of   expr
		name string
		args []expr
		not  bool
		line int
	}
	notExpr struct{ of expr }
	negExpr struct {
		of   expr
		plus bool
		line int
	}
	logicExpr struct {
		or          bool
		left, right expr
	}
	binaryExpr struct {
		op          string
		left, right expr
		line        int
	}
	concatExpr struct {
		of   []expr
		line int
	}
	compareExpr struct {
		first expr
		ops   []string
		rest  []expr
		line  int
	}
	condExpr struct{ test, yes, no expr } // no may be nil
)

// arguments are the arguments of a call.
type arguments struct {
	positional []expr
	names      []string
	named      []expr
}

type (
	dataStmt struct{ text Text }
	outStmt  struct {
		of   expr
		line int
	}
	ifStmt struct {
		test    expr
		yes, no []stmt
	}
	forStmt struct {
		targets    []string
		unpack     bool
		over, cond expr
		body, no   []stmt
		recursive  bool
		line       int
	}
	setStmt struct {
		targets []target
		unpack  bool
		value   expr
		line    int
	}
	// setBlock is {% set x %} … {% endset %}, and a filter block, whose target has no name.
	setBlock struct {
		to      target
		filters []*filterExpr
		body    []stmt
		line    int
	}
	macroStmt struct{ macro *macro }
	callBlock struct {
		macro *macro // the body
		call  *callExpr
		line  int
	}
	withStmt struct {
		names  []string
		values []expr
		body   []stmt
	}
	generationStmt struct {
		body []stmt
		line int
	}
	loopControl struct{ flow flow }
)

// target is what a set assigns to: a name, or an attribute of a namespace.
type target struct{ name, attr string }

// macro is the definition of a macro, or the body of a call block.
type macro struct {
	name     string
	params   []string
	defaults []expr // nil = none
	body     []stmt
	line     int
	// names that the body reads
	caller, varargs, kwargs bool
}

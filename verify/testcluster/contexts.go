package testcluster

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// ContextCalls calls every exported function and method of the package in the working
// directory that takes a context: once with one that is cancelled, once with one whose
// deadline has passed. Each call must return the context's error and run no callback.
//
// The source says what there is, so that a new function cannot be forgotten: values has
// one value of each type with such methods, and functions one closure for each such
// function, by name. args are what the methods are given, chosen by type.
func ContextCalls(t *testing.T, values []any, functions map[string]func(context.Context) error, args ...any) {
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	contexts := map[string]context.Context{"cancelled": cancelled, "late": late}
	for recv, names := range contextFunctions(t) {
		for _, name := range names {
			for kind, ctx := range contexts {
				t.Run(strings.TrimPrefix(recv+"."+name, ".")+"/"+kind, func(t *testing.T) {
					if recv == "" {
						require.Contains(t, functions, name, "a function that takes a context has to be called by this test")
						require.ErrorIs(t, functions[name](ctx), ctx.Err())
						return
					}
					v := valueOf(values, recv)
					require.True(t, v.IsValid(), "type %s takes contexts: this test needs a value of it", recv)
					for _, err := range call(t, v.MethodByName(name), ctx, args) {
						require.ErrorIs(t, err, ctx.Err())
					}
				})
			}
		}
	}
}

func valueOf(values []any, typeName string) reflect.Value {
	for _, v := range values {
		if reflect.Indirect(reflect.ValueOf(v)).Type().Name() == typeName {
			return reflect.ValueOf(v)
		}
	}
	return reflect.Value{}
}

// call calls a method with arguments chosen by type and returns the errors among its results.
func call(t *testing.T, m reflect.Value, ctx context.Context, args []any) (errs []error) {
	var in []reflect.Value
	for i := range m.Type().NumIn() {
		in = append(in, argument(t, m.Type().In(i), ctx, args))
	}
	if m.Type().IsVariadic() {
		in = in[:len(in)-1]
	}
	for _, out := range m.Call(in) {
		switch out := out.Interface().(type) {
		case error:
			errs = append(errs, out)
		case []error:
			errs = append(errs, out...)
		case context.Context: // for other calls
			errs = append(errs, out.Err())
		}
	}
	require.NotEmpty(t, errs, "the call has succeeded")
	return errs
}

func argument(t *testing.T, want reflect.Type, ctx context.Context, args []any) reflect.Value {
	if want == reflect.TypeFor[context.Context]() {
		return reflect.ValueOf(ctx)
	}
	for _, a := range args {
		if reflect.TypeOf(a) == want {
			return reflect.ValueOf(a)
		}
	}
	if want.Kind() == reflect.Func {
		return reflect.MakeFunc(want, func([]reflect.Value) (out []reflect.Value) {
			t.Error("a callback has run")
			for i := range want.NumOut() {
				out = append(out, reflect.Zero(want.Out(i)))
			}
			return out
		})
	}
	return reflect.Zero(want)
}

// contextFunctions lists the exported functions of the package in the working directory
// whose first parameter is a context, by receiver type; "" for none.
func contextFunctions(t *testing.T) map[string][]string {
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	out := map[string][]string{}
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), f.Name(), nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range parsed.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || !fn.Name.IsExported() || !takesContext(fn.Type) {
				continue
			}
			recv := ""
			if fn.Recv != nil {
				recv = typeName(fn.Recv.List[0].Type)
				if !ast.IsExported(recv) {
					continue
				}
			}
			out[recv] = append(out[recv], fn.Name.Name)
		}
	}
	require.NotEmpty(t, out)
	return out
}

func takesContext(f *ast.FuncType) bool {
	if len(f.Params.List) == 0 {
		return false
	}
	sel, ok := f.Params.List[0].Type.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "Context"
}

func typeName(e ast.Expr) string {
	if star, ok := e.(*ast.StarExpr); ok {
		e = star.X
	}
	if id, ok := e.(*ast.Ident); ok {
		return id.Name
	}
	return ""
}

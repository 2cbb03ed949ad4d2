package rights

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/quarrystore/quarry/internal/httpserver"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// procedures are the methods of every service of the file.
func procedures() (out []string) {
	services := quarrypb.File_quarry_proto.Services()
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			m := methods.Get(j)
			out = append(out, "/"+string(m.Parent().(protoreflect.ServiceDescriptor).FullName())+"/"+string(m.Name()))
		}
	}
	return out
}

func TestEveryMethodHasALine(t *testing.T) {
	all := procedures()
	require.Greater(t, len(all), 40)
	for _, p := range all {
		if len(table[p].roles) == 0 {
			t.Errorf("%s has no line in the table: say which roles may call it", p)
		}
	}
	for p, r := range table {
		require.Contains(t, all, p, "a line of a method that is gone")
		for _, role := range r.roles {
			require.Contains(t, identity.Roles, role)
		}
	}
}

// What only operators may do, and what only controllers may.
func TestRolesThatMatter(t *testing.T) {
	for _, p := range procedures() {
		service, method, _ := strings.Cut(strings.TrimPrefix(p, "/quarry.v1."), "/")
		if service == "Agent" {
			require.Equal(t, []identity.Role{identity.Controller}, table[p].roles, p)
		}
		for _, verb := range []string{"Remove", "Revoke", "Forget", "Drain", "Move", "Rebalance", "Add", "Set", "Delete", "CreateToken", "CreateTenant"} {
			if service == "Controller" && strings.HasPrefix(method, verb) && method != "RevokeSession" && method != "RevokeGrant" && method != "DeleteName" && method != "DeleteSpace" {
				require.Equal(t, []identity.Role{identity.Operator}, table[p].roles, p)
				require.True(t, Admin(p), p)
			}
		}
	}
	require.NotContains(t, table[quarrypbconnect.ControllerDeleteNameProcedure].roles, identity.Client)
	require.NotContains(t, table[quarrypbconnect.ControllerDeleteSpaceProcedure].roles, identity.Client)
	require.True(t, Admin(quarrypbconnect.ControllerDeleteSpaceProcedure))
}

type server struct {
	quarrypbconnect.UnimplementedControllerHandler
	calls int
}

func (s *server) Status(ctx context.Context, _ *connect.Request[quarrypb.StatusRequest]) (*connect.Response[quarrypb.StatusResponse], error) {
	s.calls++
	return connect.NewResponse(&quarrypb.StatusResponse{Version: From(ctx).Name}), nil
}

func (s *server) RemoveNode(context.Context, *connect.Request[quarrypb.RemoveNodeRequest]) (*connect.Response[quarrypb.Node], error) {
	s.calls++
	return connect.NewResponse(&quarrypb.Node{}), nil
}

// Every role with every method: what the table does not give is refused before it is decoded.
func TestGate(t *testing.T) {
	path, h := quarrypbconnect.NewControllerHandler(&server{})
	as := ""
	who := func(*http.Request) (Caller, error) {
		if as == "" {
			return Caller{}, errors.New("show a certificate")
		}
		return Caller{Name: as, Roles: []identity.Role{identity.Role(as)}}, nil
	}
	mux := http.NewServeMux()
	mux.Handle(path, Identify(who, httpserver.Gate{Allow: Allow, MaxBytes: func(string) int64 { return 64 }}.Before(h)))
	srv := httptest.NewServer(mux)
	defer srv.Close()
	call := func(p string) int { // of nonsense: what is decoded is answered with 400
		res, err := http.Post(srv.URL+p, "application/proto", strings.NewReader("\xff\xff\xff"))
		require.NoError(t, err)
		defer res.Body.Close()
		return res.StatusCode
	}
	for _, p := range procedures() {
		if !strings.HasPrefix(p, path) || strings.HasSuffix(p, "/WatchTable") || strings.HasSuffix(p, "/WatchNames") {
			continue
		}
		as = ""
		require.Equal(t, http.StatusUnauthorized, call(p), p)
		for _, role := range append(slices.Clone(identity.Roles), "king") {
			as = string(role)
			want := http.StatusForbidden
			if slices.Contains(table[p].roles, role) {
				want = http.StatusBadRequest
			}
			require.Equal(t, want, call(p), "%s %s", role, p)
		}
	}
	as = "operator"
	cl := quarrypbconnect.NewControllerClient(srv.Client(), srv.URL)
	st, err := cl.Status(t.Context(), connect.NewRequest(&quarrypb.StatusRequest{}))
	require.NoError(t, err)
	require.Equal(t, "operator", st.Msg.Version)
	as = "client"
	_, err = cl.RemoveNode(t.Context(), connect.NewRequest(&quarrypb.RemoveNodeRequest{}))
	require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err))
	require.ErrorContains(t, err, "client may not call /quarry.v1.Controller/RemoveNode: it is for [operator]")
}

func TestNobodyIsAllowedWithoutIdentify(t *testing.T) {
	require.Equal(t, connect.CodeUnauthenticated, connect.CodeOf(Allow(httptest.NewRequest("POST", quarrypbconnect.ControllerStatusProcedure, nil))))
}

// docs/SECURITY.md: go run ./cmd/quarry rights --markdown
func TestTheDocumentedTableIsThisOne(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "SECURITY.md"))
	require.NoError(t, err)
	require.True(t, strings.Contains(string(b), Begin+Markdown()+End), "docs/SECURITY.md is not up to date: go generate ./internal/rights")
}

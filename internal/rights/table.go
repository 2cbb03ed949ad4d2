package rights

import (
	"fmt"
	"slices"
	"strings"

	"github.com/quarrystore/quarry/internal/identity"
	c "github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// rule is one method's.
type rule struct {
	roles []identity.Role
	admin bool // changes the cluster: an entry of the audit log
}

const (
	client     = identity.Client
	node       = identity.Node
	worker     = identity.Worker
	gateway    = identity.Gateway
	viewer     = identity.Viewer
	operator   = identity.Operator
	controller = identity.Controller
)

func to(roles ...identity.Role) rule    { return rule{roles: roles} }
func admin(roles ...identity.Role) rule { return rule{roles: roles, admin: true} }

// Rows of the table, in the order of docs/SECURITY.md.
var (
	users    = to(client, worker, gateway, operator)
	sessions = to(client, worker, gateway, operator, node) // a node's own programs have sessions too
	nodes    = to(node)
	readers  = to(client, worker, gateway, viewer, operator, node, controller)
	deleters = to(worker, gateway, operator)
	lookers  = to(viewer, operator, controller) // controllers show it on their page
	admins   = admin(operator)
	// Others than operators: only in tenants where they have the right admin.
	grantors = admin(client, worker, gateway, operator)
	tenants  = to(client, worker, gateway, viewer, operator, controller)
)

// table is every method of proto/quarrypb/quarry.proto. What is not in it is refused.
var table = map[string]rule{
	c.ControllerOpenSessionProcedure:   sessions,
	c.ControllerHeartbeatProcedure:     sessions,
	c.ControllerCloseSessionProcedure:  sessions,
	c.ControllerCertifyFenceProcedure:  sessions,
	c.ControllerPassProcedure:          sessions,
	c.ControllerListSessionsProcedure:  readers,
	c.ControllerRevokeSessionProcedure: {roles: sessions.roles, admin: true}, // others than operators: only what they name by its serial

	c.ControllerReadTableProcedure:    readers,
	c.ControllerWatchTableProcedure:   readers,
	c.ControllerStatusProcedure:       readers,
	c.ControllerCreateRegionProcedure: users,
	c.ControllerDeleteSpaceProcedure:  {roles: deleters.roles, admin: true}, // takes regions away, with what they hold

	c.ControllerCreateNameProcedure:  users,
	c.ControllerCreateNamesProcedure: users,
	c.ControllerLookupNameProcedure:  users,
	c.ControllerLookupNamesProcedure: users,
	c.ControllerSwapNameProcedure:    users,
	c.ControllerListNamesProcedure:   users,
	c.ControllerWatchNamesProcedure:  users,
	c.ControllerDeleteNameProcedure:  deleters,

	c.ControllerDelegateJobProcedure:    users,
	c.ControllerEndDelegationProcedure:  users,
	c.ControllerQueueJobProcedure:       users,
	c.ControllerAdmitJobProcedure:       users,
	c.ControllerLeaveJobQueueProcedure:  users,
	c.ControllerListJobQueueProcedure:   users,
	c.ControllerListWorkersProcedure:    users,
	c.ControllerListUserGrantsProcedure: to(gateway, operator),
	c.ControllerPollJobsProcedure:       to(worker, operator),

	c.ControllerRegisterNodeProcedure:  nodes,
	c.ControllerNodeHeartbeatProcedure: nodes,

	c.ControllerAddNodeProcedure:          admins,
	c.ControllerDrainNodeProcedure:        admins,
	c.ControllerRemoveNodeProcedure:       admins,
	c.ControllerForgetNodeProcedure:       admins,
	c.ControllerSetDefaultsProcedure:      admins,
	c.ControllerRemoveRegionProcedure:     admins,
	c.ControllerMoveRegionProcedure:       admins,
	c.ControllerRebalanceProcedure:        admins,
	c.ControllerAddControllerProcedure:    admins,
	c.ControllerRemoveControllerProcedure: admins,
	c.ControllerListControllersProcedure:  lookers,
	c.ControllerInspectNodeProcedure:      lookers,
	c.ControllerCreateTokenProcedure:      admins,
	c.ControllerRevokeTokenProcedure:      admins,
	c.ControllerListTokensProcedure:       to(operator),
	c.ControllerRotateKeyProcedure:        admins,
	c.ControllerListKeysProcedure:         to(operator),
	c.ControllerListAuditProcedure:        to(operator),
	c.ControllerCreateTenantProcedure:     admins,
	c.ControllerSetTenantProcedure:        admins,
	c.ControllerDeleteTenantProcedure:     admins,
	c.ControllerGrantProcedure:            grantors,
	c.ControllerRevokeGrantProcedure:      grantors,
	c.ControllerListTenantsProcedure:      tenants,

	c.AgentHostRegionProcedure:  to(controller),
	c.AgentOpenRegionProcedure:  to(controller),
	c.AgentCloseRegionProcedure: to(controller),
	c.AgentDropRegionProcedure:  to(controller),
	c.AgentFenceProcedure:       to(controller),
	c.AgentWorkProcedure:        to(controller),
	c.AgentPingProcedure:        to(controller),
	c.AgentInspectProcedure:     to(controller),
}

// Admin says whether calls of a method belong into the audit log.
func Admin(procedure string) bool { return table[procedure].admin }

// Markdown is the table as docs/SECURITY.md has it.
func Markdown() string {
	var names []string
	for p := range table {
		names = append(names, p)
	}
	slices.Sort(names)
	var b strings.Builder
	b.WriteString("| method |")
	for _, r := range identity.Roles {
		fmt.Fprintf(&b, " %s |", r)
	}
	b.WriteString(" audit |\n|---|" + strings.Repeat("---|", len(identity.Roles)+1) + "\n")
	yes := map[bool]string{true: " yes |", false: " |"}
	for _, p := range names {
		rule := table[p]
		fmt.Fprintf(&b, "| %s |", strings.TrimPrefix(p, "/quarry.v1."))
		for _, r := range identity.Roles {
			b.WriteString(yes[slices.Contains(rule.roles, r)])
		}
		b.WriteString(yes[rule.admin] + "\n")
	}
	return b.String()
}

// Begin and End are the lines around the table in docs/SECURITY.md.
const (
	Begin = "<!-- go generate ./internal/rights -->\n\n"
	End   = "\n<!-- end of the generated table -->\n"
)

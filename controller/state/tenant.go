package state

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TenantPrefix is the key prefix of the records of tenants.
const TenantPrefix = tenantPrefix

// TenantNames is the key prefix of the names of all tenants but the default one.
const TenantNames = "tenant-names/"

// NamesOf is the key prefix of the names of a tenant that is not the default one.
func NamesOf(tenant uint32) string { return fmt.Sprintf("%s%08x/", TenantNames, tenant) }

// TenantKey is the key of a tenant's record.
func TenantKey(id uint32) string { return tenantKey(id) }

// Limits of tenants.
const (
	MaxGrants          = 256 // of one tenant
	MaxTenants         = 1024
	maxTenantNameBytes = 63
	// nodeLanes is how many lanes a session without a number counts for: as many as a node
	// admits of one session unless told otherwise.
	nodeLanes = 256
)

// tenant is a tenant's record, and what it has. Each change of either is a step of the machine, so that
// requests side by side do not exceed a quota together.
type tenant struct {
	rec             *quarrypb.Tenant // as staged; nil: there is none
	bytes           uint64           // of regions, those in the making included, times their replicas
	regions         int              // of the tenant
	sessions, lanes int              // of live sessions that are not agents'
}

// tenants are indexed by number. Never ranged over: the order of a map is random.
type tenants struct {
	byID  map[uint32]*tenant
	order []uint32 // those that byID has, ascending
}

// of is the tenant with a number, an empty one at first.
func (x *tenants) of(id uint32) *tenant {
	t := x.byID[id]
	if t == nil {
		t = &tenant{}
		if id == 0 {
			t.rec = &quarrypb.Tenant{Name: quarrypb.DefaultTenant}
		}
		if x.byID == nil {
			x.byID = map[uint32]*tenant{}
		}
		x.byID[id] = t
		i, _ := slices.BinarySearch(x.order, id)
		x.order = slices.Insert(x.order, i, id)
	}
	return t
}

// all are those that have a record, and the default one.
func (x *tenants) all() (out []*tenant) {
	x.of(0)
	for _, id := range x.order {
		if t := x.byID[id]; t.rec != nil {
			out = append(out, t)
		}
	}
	return out
}

// tenant is the one with a number that a request was given. It may have been deleted since.
func (m *Machine) tenant(id uint32) (*tenant, *Error) {
	m.tenants.of(0)
	t := m.tenants.byID[id]
	if t == nil || t.rec == nil {
		return nil, errorf(NotFound, "tenant %d: no such tenant; quarry tenant list shows them", id)
	}
	return t, nil
}

// tenantNamed is the tenant with a name.
func (m *Machine) tenantNamed(name string) (*tenant, *Error) {
	for _, t := range m.tenants.all() {
		if t.rec.Name == name {
			return t, nil
		}
	}
	return nil, errorf(NotFound, "tenant %q: no such tenant; quarry tenant list shows them", name)
}

// answer is the record with the use.
func (t *tenant) answer() *quarrypb.Tenant {
	rec := proto.CloneOf(t.rec)
	rec.Use = &quarrypb.TenantUse{Bytes: t.bytes, Sessions: uint32(t.sessions), Lanes: uint32(t.lanes), Regions: uint32(t.regions)}
	return rec
}

// uses are all tenants with what they use, without grants.
func (x *tenants) uses() (out []*quarrypb.Tenant) {
	for _, t := range x.all() {
		rec := t.answer()
		rec.Grants = nil
		out = append(out, rec)
	}
	return out
}

// countSession adds a live session to the counts, or takes it away.
func (m *Machine) countSession(rec *quarrypb.Session, sign int) {
	m.live += sign
	if rec.Agent {
		return
	}
	t := m.tenants.of(rec.Tenant)
	t.sessions += sign
	t.lanes += sign * lanesOf(rec.Lanes)
}

// lanesOf is how many lanes a session counts: what it has announced, or as many as a node allows.
func lanesOf(announced uint32) int {
	if announced == 0 {
		return nodeLanes
	}
	return int(announced)
}

// roomForSession refuses a session that its tenant has no room for.
func (m *Machine) roomForSession(r *quarrypb.OpenSessionRequest) *Error {
	t, err := m.tenant(r.Tenant)
	switch {
	case err != nil:
		return err
	case t.rec.Deleting:
		return t.leaving()
	case r.Lanes > nodeLanes:
		return errorf(Invalid, "session %q with %d lanes: want at most %d", r.Name, r.Lanes, nodeLanes)
	case r.Agent:
		return nil
	case t.rec.QuotaSessions != 0 && t.sessions >= int(t.rec.QuotaSessions):
		return t.full("sessions", fmt.Sprint(t.sessions), fmt.Sprint(t.rec.QuotaSessions), "another one does not fit: close some, or raise it with --sessions")
	case t.rec.QuotaLanes != 0 && t.lanes+lanesOf(r.Lanes) > int(t.rec.QuotaLanes):
		return t.full("lanes", fmt.Sprint(t.lanes), fmt.Sprint(t.rec.QuotaLanes), fmt.Sprintf("%d more do not fit: close sessions, open them with fewer lanes, or raise it with --lanes", lanesOf(r.Lanes)))
	}
	return nil
}

// roomForRegions refuses regions that the tenant has no room for.
func (m *Machine) roomForRegions(r *quarrypb.CreateRegionRequest, sets []placed) *Error {
	t, err := m.tenant(r.Tenant)
	if err != nil || t.rec.QuotaBytes == 0 {
		return err
	}
	sum, quota := uint64(0), t.rec.QuotaBytes
	for _, s := range sets {
		sum += s.bytes * uint64(r.Replicas)
	}
	if t.bytes > quota || sum > quota-t.bytes {
		return t.full("bytes", bytesText(t.bytes), bytesText(quota), fmt.Sprintf("%s more in %d regions of %d replicas do not fit: free objects, so that regions have room again, or raise it with --quota-bytes", bytesText(sum), len(sets), r.Replicas))
	}
	return nil
}

// full is the refusal of a quota, with the remedy.
func (t *tenant) full(what, used, quota, remedy string) *Error {
	return errorf(Exhausted, "tenant %s: quota of %s: %s of %s are used, %s (quarry tenant set %s)", t.rec.Name, what, used, quota, remedy, t.rec.Name)
}

// goodTenantName says whether a tenant can have a name.
func goodTenantName(name string) bool {
	return name != "" && len(name) <= maxTenantNameBytes && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_") == ""
}

// createTenant makes a tenant, with a number that was never used.
func (m *Machine) createTenant(waiter uint64, r *quarrypb.CreateTenantRequest) {
	_, missing := m.tenantNamed(r.Name)
	switch {
	case !goodTenantName(r.Name):
		m.fail(waiter, errorf(Invalid, "tenant %q: want 1 to %d of a-z, 0-9, - and _", r.Name, maxTenantNameBytes))
		return
	case missing == nil:
		m.fail(waiter, errorf(Exists, "tenant %s exists: quarry tenant set %s changes its quotas", r.Name, r.Name))
		return
	case len(m.tenants.all()) >= MaxTenants || m.cluster.LastTenant == math.MaxUint32:
		m.fail(waiter, errorf(Exhausted, "%d tenants, the most there can be: delete some", len(m.tenants.all())))
		return
	}
	c := m.editCluster()
	c.LastTenant++
	t := m.tenants.of(c.LastTenant)
	t.rec = &quarrypb.Tenant{Id: c.LastTenant, Name: r.Name, QuotaBytes: r.QuotaBytes, QuotaSessions: r.QuotaSessions, QuotaLanes: r.QuotaLanes}
	m.stage(m.clusterChange(c), change{tenantKey(t.rec.Id), t.rec, nil})
	m.note("tenant %s (%d) is made", r.Name, t.rec.Id)
	m.answer(waiter, t.answer())
}

// setTenant changes quotas. Quotas below the present use stop growth and end nothing.
func (m *Machine) setTenant(waiter uint64, r *quarrypb.SetTenantRequest) {
	t, err := m.tenantNamed(r.Name)
	if err != nil {
		m.fail(waiter, err)
		return
	}
	rec := proto.CloneOf(t.rec)
	if r.QuotaBytes != nil {
		rec.QuotaBytes = *r.QuotaBytes
	}
	if r.QuotaSessions != nil {
		rec.QuotaSessions = *r.QuotaSessions
	}
	if r.QuotaLanes != nil {
		rec.QuotaLanes = *r.QuotaLanes
	}
	if !proto.Equal(rec, t.rec) {
		m.setRecord(t, rec)
		m.note("tenant %s: quotas %s, %d sessions, %d lanes; 0 is none", rec.Name, bytesText(rec.QuotaBytes), rec.QuotaSessions, rec.QuotaLanes)
	}
	m.answer(waiter, t.answer())
}

// deleteTenant deletes a tenant that has nothing left, or begins to delete one with its data.
func (m *Machine) deleteTenant(waiter uint64, r *quarrypb.DeleteTenantRequest) {
	t, err := m.tenantNamed(r.Name)
	switch {
	case err != nil:
	case t.rec.Id == 0:
		err = errorf(Invalid, "tenant %s is always there", r.Name)
	case r.WithData:
		m.deleteWithData(waiter, t)
		return
	case t.regions > 0:
		err = errorf(Precondition, "tenant %s holds regions%s: %s of memory; --with-data deletes the tenant with all that it holds", r.Name, list(m.regionsOf(t.rec.Id)), bytesText(t.bytes))
	case t.sessions > 0:
		err = errorf(Precondition, "tenant %s has %d live sessions: quarry session revoke ends them, or --with-data", r.Name, t.sessions)
	}
	if err != nil {
		m.fail(waiter, err)
		return
	}
	m.stage(change{tenantKey(t.rec.Id), nil, nil})
	m.note("tenant %s (%d) is deleted", r.Name, t.rec.Id)
	t.rec = nil
	m.answer(waiter, &quarrypb.DeleteTenantResponse{})
}

// grant gives an identity rights under a prefix, in the place of those that it has there.
//
// Grants also decide in which tenants an identity works. So an admin of a tenant changes only grants
// that admins have given, to identities that have an operator's grant there: it can neither draw an
// identity into its tenant nor, by taking its last grant, let one out of it.
func (m *Machine) grant(waiter uint64, r *quarrypb.GrantRequest) {
	t, err := m.tenantNamed(r.Tenant)
	if err == nil {
		err = goodGrant(r.Grant)
	}
	if err != nil {
		m.fail(waiter, err)
		return
	}
	rec := proto.CloneOf(t.rec)
	same := func(g *quarrypb.Grant) bool { return g.Identity == r.Grant.Identity && g.Prefix == r.Grant.Prefix }
	if r.Grant.ByAdmin {
		switch {
		case slices.Contains(r.Grant.Rights, quarrypb.Right_RIGHT_ADMIN):
			err = errorf(Denied, "operators alone give the right admin")
		case !admitted(rec, r.Grant.Identity):
			err = errorf(Denied, "%s has no grant of an operator in tenant %s: an operator lets identities in (quarry tenant grant)", r.Grant.Identity, r.Tenant)
		case slices.ContainsFunc(rec.Grants, func(g *quarrypb.Grant) bool { return same(g) && !g.ByAdmin }):
			err = errorf(Denied, "the grant of %s with prefix %q is an operator's: operators change it", r.Grant.Identity, r.Grant.Prefix)
		}
		if err != nil {
			m.fail(waiter, err)
			return
		}
	}
	rec.Grants = slices.DeleteFunc(rec.Grants, same)
	if len(rec.Grants) >= MaxGrants {
		m.fail(waiter, errorf(Exhausted, "tenant %s has %d grants, the most there can be: revoke some (quarry tenant grants %s)", r.Tenant, len(rec.Grants), r.Tenant))
		return
	}
	rec.Grants = append(rec.Grants, proto.CloneOf(r.Grant))
	m.setRecord(t, rec)
	m.answer(waiter, t.answer())
}

// admitted says whether an operator has given an identity a grant.
func admitted(t *quarrypb.Tenant, identity string) bool {
	return slices.ContainsFunc(t.Grants, func(g *quarrypb.Grant) bool { return g.Identity == identity && !g.ByAdmin })
}

// goodGrant refuses a grant that can never be given.
func goodGrant(g *quarrypb.Grant) *Error {
	switch {
	case g == nil || g.Identity == "" || len(g.Identity) > MaxNameBytes || !goodName(g.Identity):
		return errorf(Invalid, "a grant without an identity, or with one of more than %d bytes", MaxNameBytes)
	case len(g.Prefix) > MaxNameBytes || g.Prefix != "" && !goodName(g.Prefix):
		return errorf(Invalid, "a prefix is printable UTF-8 of at most %d bytes", MaxNameBytes)
	case g.Prefix != "" && slices.Contains(g.Rights, quarrypb.Right_RIGHT_ADMIN):
		return errorf(Invalid, "the right admin is for a whole tenant: give it without a prefix")
	case len(g.Rights) == 0 || len(g.Rights) > 5:
		return errorf(Invalid, "%d rights: want 1 to 5 of read, write, create, delete and admin", len(g.Rights))
	}
	for _, r := range g.Rights {
		if r < quarrypb.Right_RIGHT_READ || r > quarrypb.Right_RIGHT_ADMIN {
			return errorf(Invalid, "right %d: want read, write, create, delete or admin", r)
		}
	}
	return nil
}

// revokeGrant takes grants of an identity away. Sessions that are open continue.
func (m *Machine) revokeGrant(waiter uint64, r *quarrypb.RevokeGrantRequest) {
	t, err := m.tenantNamed(r.Tenant)
	if err != nil {
		m.fail(waiter, err)
		return
	}
	rec := proto.CloneOf(t.rec)
	rec.Grants = slices.DeleteFunc(rec.Grants, func(g *quarrypb.Grant) bool {
		return g.Identity == r.Identity && (r.Prefix == nil || g.Prefix == *r.Prefix) && (g.ByAdmin || !r.ByAdmin)
	})
	// What admins have given goes with the last grant of an operator.
	if !admitted(rec, r.Identity) {
		rec.Grants = slices.DeleteFunc(rec.Grants, func(g *quarrypb.Grant) bool { return g.Identity == r.Identity })
	}
	if len(rec.Grants) == len(t.rec.Grants) {
		if r.ByAdmin && admitted(t.rec, r.Identity) {
			m.fail(waiter, errorf(Denied, "the grants of %s that you name are an operator's: operators revoke them", r.Identity))
			return
		}
		m.fail(waiter, errorf(NotFound, "tenant %s has no such grant of %s: quarry tenant grants %s shows them", r.Tenant, r.Identity, r.Tenant))
		return
	}
	m.setRecord(t, rec)
	m.answer(waiter, t.answer())
}

// setRecord gives a tenant another record.
func (m *Machine) setRecord(t *tenant, rec *quarrypb.Tenant) {
	t.rec = rec
	m.stage(change{tenantKey(rec.Id), rec, nil})
}

// regionsOf names the regions of a tenant.
func (m *Machine) regionsOf(tenant uint32) (out []string) {
	for _, g := range m.regions {
		if g.rec.Tenant == tenant {
			out = append(out, fmt.Sprint(g.rec.Id))
		}
	}
	return out
}

// listTenants answers with all tenants, their grants and what they use.
func (m *Machine) listTenants(waiter uint64) {
	resp := &quarrypb.ListTenantsResponse{}
	for _, t := range m.tenants.all() {
		resp.Tenants = append(resp.Tenants, t.answer())
	}
	m.answer(waiter, resp)
}

package quarrypb

import (
	"net/url"
	"slices"
	"strings"
)

// LeaderHeader is the header of a standby controller's answers that holds the
// leader's URL, where the standby knows it.
const LeaderHeader = "Quarry-Leader"

// IncarnationHeader names, in a controller's call of an agent, the incarnation of the node
// that is meant: another incarnation refuses it.
const IncarnationHeader = "Quarry-Incarnation"

// TokenHeader carries the cluster's token in calls of a controller whose messages have no field for it.
const TokenHeader = "Quarry-Token"

// TenantHeader names the tenant that a call of a controller is made in; without it: the one that the
// caller has grants in, else DefaultTenant.
const TenantHeader = "Quarry-Tenant"

// JobHeader names, in a worker's call of a controller, the job that it acts for: a number in the tenant of
// TenantHeader. What it may do is what the job's submitter may.
const JobHeader = "Quarry-Job"

// UserHeader names, in a gateway's call of a controller, the user that it acts for: redis:NAME.
const UserHeader = "Quarry-User"

// JobsTree is the name of the tree of a tenant that has its jobs. A right to any name is one to this.
const JobsTree = ".jobs"

// DefaultTenant is the name of tenant 0, which is always there.
const DefaultTenant = "default"

// VersionHeader is the header of /healthz that tells the version of the service.
const VersionHeader = "Quarry-Version"

// LeaderFrom is the leader's URL as a controller names it in LeaderHeader, without a slash at
// its end; "" for none, and for one that is not followed. A controller that was asked over https is followed to
// https alone, where the leader shows a certificate. Over http its answer may be another process's, and the next
// call shows a token: it is followed only to a known controller, or to another port of such a host.
func LeaderFrom(asked, named string, known []string) string {
	named = strings.TrimRight(named, "/")
	if strings.HasPrefix(asked, "https://") {
		if strings.HasPrefix(named, "https://") {
			return named
		}
		return ""
	}
	to := hostOf(named)
	if slices.ContainsFunc(known, func(k string) bool { return to != "" && to == hostOf(k) }) {
		return named
	}
	return ""
}

// hostOf is the host of an http URL; "" if it is none.
func hostOf(address string) string {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil {
		return ""
	}
	return u.Hostname()
}

// SignatureHeader carries a controller's signature of a call to an agent: the id of its key and
// the SHA-256 of the body in hexadecimal digits, and the Ed25519 signature in base64.
const SignatureHeader = "Quarry-Signature"

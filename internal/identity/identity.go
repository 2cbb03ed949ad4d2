package identity

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Role is what a process, or a user, is in a cluster.
type Role string

// Roles. A caller has exactly one, but for the cluster's own token, which has all of them.
const (
	Client     Role = "client"     // programs that use objects, names and trees
	Node       Role = "node"       // storage nodes, and their agents
	Worker     Role = "worker"     // processes that run parts of jobs
	Gateway    Role = "gateway"    // processes that serve other protocols
	Viewer     Role = "viewer"     // people and programs that look at the cluster and change nothing
	Operator   Role = "operator"   // people and programs that change the cluster
	Controller Role = "controller" // controllers, and the etcd inside them
)

// Roles lists every role.
var Roles = []Role{Client, Node, Worker, Gateway, Viewer, Operator, Controller}

const (
	scheme = "spiffe"
	// maxPart bounds the bytes of a cluster's name, and of a name.
	maxPart = 128
)

// ID is an identity. The zero ID is none.
type ID struct {
	Cluster string
	Role    Role
	Name    string
}

// String is the URI, or "" for none.
func (i ID) String() string {
	if i == (ID{}) {
		return ""
	}
	return scheme + "://" + i.Cluster + "/" + string(i.Role) + "/" + i.Name
}

func (i ID) uri() *url.URL {
	return &url.URL{Scheme: scheme, Host: i.Cluster, Path: "/" + string(i.Role) + "/" + i.Name}
}

// goodPart says whether s is letters, digits, dots, underscores and dashes: what a SPIFFE ID may
// have in a segment of its path.
func goodPart(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= maxPart && strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-')
	}) < 0
}

// New checks the parts of an identity.
func New(cluster string, role Role, name string) (ID, error) {
	switch {
	case !goodPart(cluster) || cluster != strings.ToLower(cluster):
		return ID{}, fmt.Errorf("cluster %q: want 1 to %d lower-case letters, digits and . _ -", cluster, maxPart)
	case !slices.Contains(Roles, role):
		return ID{}, fmt.Errorf("role %q: want one of %v", role, Roles)
	case !goodPart(name):
		return ID{}, fmt.Errorf("name %q: want 1 to %d letters, digits and . _ -", name, maxPart)
	}
	return ID{cluster, role, name}, nil
}

// FromCertificate reads the identity of a certificate that has been verified. A certificate
// without a URI of this scheme has none, which is no error; one with several, or with another
// form of it, is refused.
func FromCertificate(c *x509.Certificate) (ID, error) {
	var found []*url.URL
	for _, u := range c.URIs {
		if u.Scheme == scheme {
			found = append(found, u)
		}
	}
	switch len(found) {
	case 0:
		return ID{}, nil
	case 1:
	default:
		return ID{}, fmt.Errorf("certificate %q has %d identities: want one", c.Subject, len(found))
	}
	u := found[0]
	parts := strings.Split(strings.TrimPrefix(u.Path, "/"), "/")
	if len(parts) != 2 || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return ID{}, fmt.Errorf("identity %s: want spiffe://CLUSTER/ROLE/NAME", u)
	}
	id, err := New(u.Host, Role(parts[0]), parts[1])
	if err != nil {
		return ID{}, fmt.Errorf("identity %s: %w", u, err)
	}
	return id, nil
}

// OfPeer is the identity of the certificate that a server has verified, or none: without a
// certificate, with one that names none, or with one of another cluster than own.
func OfPeer(cs *tls.ConnectionState, own ID) (ID, error) {
	if cs == nil || len(cs.VerifiedChains) == 0 || own == (ID{}) {
		return ID{}, nil
	}
	id, err := FromCertificate(cs.VerifiedChains[0][0])
	if err != nil {
		return ID{}, err
	}
	if id != (ID{}) && id.Cluster != own.Cluster {
		return ID{}, fmt.Errorf("identity %s: this is cluster %s", id, own.Cluster)
	}
	return id, nil
}

// AuthorityOf names the authority that a peer's certificate was verified by: a hash of its public key. "" if there is none.
func AuthorityOf(cs *tls.ConnectionState) string {
	if cs == nil || len(cs.VerifiedChains) == 0 {
		return ""
	}
	chain := cs.VerifiedChains[0]
	return authorityName(chain[len(chain)-1])
}

func authorityName(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return string(sum[:16])
}

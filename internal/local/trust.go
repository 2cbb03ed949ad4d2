package local

import (
	"os"
	"path/filepath"
	"time"

	"github.com/quarrystore/quarry/internal/identity"
)

// pki issues the certificates of a cluster with mutual TLS.
type pki struct {
	authority *identity.Authority
	dir       string
}

const certsEndAfter = 30 * 24 * time.Hour

func newPKI(dir string) (*pki, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	a, ca, _, err := identity.NewAuthority("local", certsEndAfter)
	if err != nil {
		return nil, err
	}
	return &pki{a, dir}, os.WriteFile(filepath.Join(dir, "ca.crt"), ca, 0o600)
}

// issue writes a certificate, in place of one that is there.
func (p *pki) issue(role identity.Role, name string) (identity.Files, error) {
	base := filepath.Join(p.dir, string(role)+"-"+name)
	f := identity.Files{Cert: base + ".crt", Key: base + ".key", CA: filepath.Join(p.dir, "ca.crt")}
	cert, key, err := p.authority.Issue(role, name, []string{"127.0.0.1", "localhost"}, certsEndAfter)
	if err != nil {
		return f, err
	}
	for file, b := range map[string][]byte{f.Key: key, f.Cert: cert} {
		if err := os.WriteFile(file+".new", b, 0o600); err != nil {
			return f, err
		}
		if err := os.Rename(file+".new", file); err != nil {
			return f, err
		}
	}
	return f, nil
}

// Issue writes a certificate of a cluster with Config.TLS, or replaces the one that is there.
func (c *Cluster) Issue(role identity.Role, name string) (identity.Files, error) {
	return c.pki.issue(role, name)
}

// Env are the variables with which a command uses a cluster as a role.
func (c *Cluster) Env(role identity.Role, name string) ([]string, error) {
	f, err := c.Issue(role, name)
	return []string{"QUARRY_TLS_CERT=" + f.Cert, "QUARRY_TLS_KEY=" + f.Key, "QUARRY_TLS_CA=" + f.CA}, err
}

// trust are the flags of a service.
func (c *Cluster) trust(role identity.Role, name string) ([]string, error) {
	if c.pki == nil {
		return nil, nil
	}
	f, err := c.Issue(role, name)
	return []string{"--tls-cert", f.Cert, "--tls-key", f.Key, "--tls-ca", f.CA}, err
}

func (c *Cluster) scheme() string {
	if c.pki != nil {
		return "https://"
	}
	return "http://"
}

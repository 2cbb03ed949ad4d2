package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/quarrystore/quarry/internal/identity"
)

// certCmd keeps a small certificate authority in a folder.
type certCmd struct {
	CreateCA   certCreateCACmd `cmd:"" name:"create-ca" help:"Make the authority of a cluster: ca.crt for every process, ca.key for this command alone."`
	Controller certIssueCmd    `cmd:"" help:"Issue a controller's certificate."`
	Node       certIssueCmd    `cmd:"" help:"Issue a storage node's certificate; it registers under this name only."`
	Client     certIssueCmd    `cmd:"" help:"Issue a client's certificate."`
	Worker     certIssueCmd    `cmd:"" help:"Issue a worker's certificate."`
	Gateway    certIssueCmd    `cmd:"" help:"Issue a gateway's certificate."`
	Viewer     certIssueCmd    `cmd:"" help:"Issue a certificate for a person or program that sees the cluster and changes nothing."`
	Operator   certIssueCmd    `cmd:"" help:"Issue an operator's certificate."`
	List       certListCmd     `cmd:"" help:"List the certificates of a folder."`
	Expire     certExpireCmd   `cmd:"" help:"List certificates that end soon; fails if there are any."`
}

// Help is shown by --help.
func (*certCmd) Help() string {
	return "Each certificate names its holder as spiffe://CLUSTER/ROLE/NAME. Services read replaced files without a restart. SPIRE, step-ca and cert-manager can issue the same: see docs/SECURITY.md."
}

type certDir struct {
	Dir string `default:"pki" placeholder:"DIR" help:"Folder of the authority and of what it issues."`
}

func (d certDir) path(name string) string { return filepath.Join(d.Dir, name) }

const certDay = 24 * time.Hour

// maxCertDays is a hundred years; a time beyond it cannot be written in a certificate safely.
const maxCertDays = 36500

// checkDays refuses lifetimes that no certificate can have.
func checkDays(days int) error {
	if days < 1 || days > maxCertDays {
		return usagef("--days %d: want 1 to %d", days, maxCertDays)
	}
	return nil
}

type certCreateCACmd struct {
	certDir
	Cluster string `default:"quarry" placeholder:"NAME" help:"The cluster's name: the same in all its certificates, and in those of no other."`
	Days    int    `default:"3650" help:"Days until it ends."`
	Rotate  bool   `help:"Replace the authority: ca.crt keeps the former one behind the new one, until every process has a certificate of the new one."`
}

// Run makes an authority. With --rotate the new authority has the former one's cluster, and the former certificate
// stays behind it in the file, so that both are trusted until every certificate is renewed.
func (c *certCreateCACmd) Run(a *app) error {
	if err := checkDays(c.Days); err != nil {
		return err
	}
	former, err := os.ReadFile(c.path("ca.crt"))
	switch {
	case err == nil && !c.Rotate:
		return usagef("%s is there already: --rotate replaces the authority", c.path("ca.crt"))
	case err != nil && c.Rotate:
		return usagef("--rotate: %w", err)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if c.Rotate {
		old, err := c.authority()
		if err != nil {
			return err
		}
		c.Cluster = old.Cluster
	}
	_, cert, key, err := identity.NewAuthority(c.Cluster, time.Duration(c.Days)*certDay)
	if err != nil {
		return usageError{err}
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return err
	}
	if err := writeFile(c.path("ca.key"), key, 0o600); err != nil {
		return err
	}
	if err := writeFile(c.path("ca.crt"), append(cert, former...), 0o644); err != nil {
		return err
	}
	return a.print(map[string]string{"cluster": c.Cluster, "ca": c.path("ca.crt"), "key": c.path("ca.key")}, func(w io.Writer) {
		fmt.Fprintf(w, "authority of cluster %s: %s\nkeep %s on this host, readable for you alone\n", c.Cluster, c.path("ca.crt"), c.path("ca.key"))
	})
}

// authority reads the folder's.
func (d certDir) authority() (*identity.Authority, error) {
	cert, err := os.ReadFile(d.path("ca.crt"))
	if err != nil {
		return nil, usagef("no authority in %s, make one with quarry cert create-ca --dir %s: %w", d.Dir, d.Dir, err)
	}
	key, err := os.ReadFile(d.path("ca.key"))
	if err != nil {
		return nil, usagef("key of the authority: %w", err)
	}
	ca, err := identity.ReadAuthority(cert, key)
	if err != nil {
		return nil, usagef("authority %s: %w", d.path("ca.crt"), err)
	}
	return ca, nil
}

// writeFile replaces a file as a whole: a service that reads it meets the old or the new one.
func writeFile(path string, b []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

type certIssueCmd struct {
	certDir
	Name  string   `arg:"" help:"Name of the holder; of a controller and of a node that of its --name."`
	Host  []string `placeholder:"HOST,..." help:"Names and addresses that clients without a certificate, and browsers, reach it by."`
	Days  int      `default:"365" help:"Days until it ends; never after its authority."`
	Renew bool     `help:"Replace the certificate and the key that are there."`
}

// Run issues for the role that is the command's name.
func (c *certIssueCmd) Run(k *kong.Context, a *app) error {
	role := identity.Role(k.Selected().Name)
	if err := checkDays(c.Days); err != nil {
		return err
	}
	base := c.path(string(role) + "-" + c.Name)
	if _, err := os.Lstat(base + ".crt"); err == nil && !c.Renew {
		return usagef("%s.crt is there already: --renew replaces it", base)
	}
	ca, err := c.authority()
	if err != nil {
		return err
	}
	cert, key, err := ca.Issue(role, c.Name, c.Host, time.Duration(c.Days)*certDay)
	if err != nil {
		return usageError{err}
	}
	if err := writeFile(base+".key", key, 0o600); err != nil {
		return err
	}
	if err := writeFile(base+".crt", cert, 0o644); err != nil {
		return err
	}
	id := identity.ID{Cluster: ca.Cluster, Role: role, Name: c.Name}
	return a.print(map[string]string{"identity": id.String(), "cert": base + ".crt", "key": base + ".key", "ca": c.path("ca.crt")}, func(w io.Writer) {
		fmt.Fprintf(w, "%s: --tls-cert %s.crt --tls-key %s.key --tls-ca %s\n", id, base, base, c.path("ca.crt"))
	})
}

// certLine is one certificate of a folder.
type certLine struct {
	File     string    `json:"file"`
	Identity string    `json:"identity"`
	Hosts    []string  `json:"hosts"`
	Expires  time.Time `json:"expires"`
	State    string    `json:"state"` // valid, soon or expired
}

// list reads the certificates of a folder; soon is how long before its end one is listed as such.
func (d certDir) list(soon time.Duration) ([]certLine, error) {
	files, err := filepath.Glob(d.path("*.crt"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, usagef("no certificates (*.crt) in %s", d.Dir)
	}
	lines := []certLine{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		certs, err := identity.ParsePEM(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		for _, c := range certs {
			l := certLine{File: f, Hosts: slices.Clone(c.DNSNames), Expires: c.NotAfter, State: "valid"}
			if id, err := identity.FromCertificate(c); err == nil {
				l.Identity = id.String()
			}
			if c.IsCA {
				l.Identity = c.Subject.CommonName
			}
			for _, ip := range c.IPAddresses {
				l.Hosts = append(l.Hosts, ip.String())
			}
			switch left := time.Until(c.NotAfter); {
			case left <= 0:
				l.State = "expired"
			case left < soon:
				l.State = "soon"
			}
			lines = append(lines, l)
		}
	}
	return lines, nil
}

func (a *app) printCerts(lines []certLine) error {
	return a.print(lines, func(w io.Writer) {
		fmt.Fprintln(w, "FILE\tIDENTITY\tHOSTS\tEXPIRES\tSTATE")
		for _, l := range lines {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", l.File, l.Identity, strings.Join(l.Hosts, ","), l.Expires.UTC().Format(time.DateTime), l.State)
		}
	})
}

const certSoon = 30 * certDay

type certListCmd struct{ certDir }

func (c *certListCmd) Run(a *app) error {
	lines, err := c.list(certSoon)
	if err != nil {
		return err
	}
	return a.printCerts(lines)
}

type certExpireCmd struct {
	certDir
	Within int `default:"30" placeholder:"DAYS" help:"Days from now on."`
}

// Run fails if a certificate ends within --within days, for a daily check; the ones that do not are not listed.
func (c *certExpireCmd) Run(a *app) error {
	if err := checkDays(c.Within); err != nil {
		return err
	}
	lines, err := c.list(time.Duration(c.Within) * certDay)
	if err != nil {
		return err
	}
	lines = slices.DeleteFunc(lines, func(l certLine) bool { return l.State == "valid" })
	if err := a.printCerts(lines); err != nil || len(lines) == 0 {
		return err
	}
	return fmt.Errorf("%d certificates of %s end within %d days: issue them again with --renew, an authority with create-ca --rotate", len(lines), c.Dir, c.Within)
}

package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"
)

// Authority signs certificates of one cluster.
type Authority struct {
	Cluster string
	cert    *x509.Certificate
	key     crypto.Signer
}

// backdate lets hosts whose clocks are behind use a new certificate.
const backdate = 5 * time.Minute

// PeerName is the DNS name that the certificate of every controller of a cluster has, and no
// other: the embedded etcds tell each other by it. etcd checks no URI.
func PeerName(cluster string) string { return "controller." + cluster + ".quarry" }

func newKey() (crypto.Signer, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// NewAuthority makes an authority and its files, PEM.
func NewAuthority(cluster string, valid time.Duration) (a *Authority, cert, key []byte, err error) {
	if _, err := New(cluster, Controller, "c"); err != nil {
		return nil, nil, nil, err
	}
	k, keyPEM, err := newKey()
	if err != nil {
		return nil, nil, nil, err
	}
	now := time.Now()
	t := &x509.Certificate{
		Subject: pkix.Name{CommonName: "Quarry authority of " + cluster}, URIs: []*url.URL{{Scheme: scheme, Host: cluster}},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(valid), IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, k.Public(), k)
	if err != nil {
		return nil, nil, nil, err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	a, err = ReadAuthority(certPEM, keyPEM)
	return a, certPEM, keyPEM, err
}

// ReadAuthority reads an authority. Of several certificates it is the first: the others are
// those that it replaces.
func ReadAuthority(certs, key []byte) (*Authority, error) {
	block, _ := pem.Decode(certs)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("no PEM certificate in it")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, err
	}
	if !cert.IsCA || len(cert.URIs) != 1 || cert.URIs[0].Scheme != scheme || strings.Trim(cert.URIs[0].Path, "/") != "" {
		return nil, errors.New("not an authority of a cluster: make one with quarry cert create-ca")
	}
	kb, _ := pem.Decode(key)
	if kb == nil {
		return nil, errors.New("no PEM key in it")
	}
	k, err := x509.ParsePKCS8PrivateKey(kb.Bytes)
	if err != nil {
		return nil, err
	}
	signer, ok := k.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("key of type %T cannot sign", k)
	}
	if pub, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !pub.Equal(cert.PublicKey) {
		return nil, errors.New("the key is not that of the authority's certificate")
	}
	return &Authority{cert.URIs[0].Host, cert, signer}, nil
}

// Issue makes a certificate and its key, PEM. Hosts are DNS names and addresses that users
// without an identity may call the process by. A certificate does not outlive its authority.
func (a *Authority) Issue(role Role, name string, hosts []string, valid time.Duration) (cert, key []byte, err error) {
	id, err := New(a.Cluster, role, name)
	if err != nil {
		return nil, nil, err
	}
	k, keyPEM, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	now := time.Now()
	t := &x509.Certificate{
		Subject: pkix.Name{CommonName: name, OrganizationalUnit: []string{string(role)}}, URIs: []*url.URL{id.uri()},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(valid), KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if t.NotAfter.After(a.cert.NotAfter) {
		t.NotAfter = a.cert.NotAfter
	}
	if role == Controller || role == Node || role == Gateway { // those that serve
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	for _, h := range hosts {
		ip := net.ParseIP(h)
		switch {
		case ip != nil:
			t.IPAddresses = append(t.IPAddresses, ip)
		case strings.EqualFold(h, PeerName(a.Cluster)):
			return nil, nil, fmt.Errorf("host %q: the certificates of controllers have that name, and no others", h)
		case h == "" || strings.ContainsAny(h, "*:/ ,"):
			return nil, nil, fmt.Errorf("host %q: want a name or an address, without port and wildcard", h)
		default:
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	if role == Controller {
		t.DNSNames = append(t.DNSNames, PeerName(a.Cluster))
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, k.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), keyPEM, nil
}

// Serve is the configuration of a port, with a certificate that is in memory alone; callers show none.
func (a *Authority) Serve(role Role, name string, hosts []string, valid time.Duration) (*tls.Config, error) {
	cert, key, err := a.Issue(role, name, hosts, valid)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, SessionTicketsDisabled: true, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2", "http/1.1"}}, nil
}

// ParsePEM reads all certificates of a file.
func ParsePEM(b []byte) (out []*x509.Certificate, err error) {
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			if len(out) == 0 {
				return nil, errors.New("no PEM certificate in it")
			}
			return out, nil
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
}

package client

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// DefaultController is the address on which `quarry dev`, and a controller without options, listens.
const DefaultController = "http://127.0.0.1:7420"

// ConfigFromEnvironment returns a Config from the variables that the command quarry reads:
//
//	QUARRY_CONTROLLER    comma-separated URLs; default DefaultController
//	QUARRY_TOKEN         token of the cluster
//	QUARRY_TENANT        tenant that sessions are opened in
//	QUARRY_TLS_CERT      file of this program's certificate, PEM; with QUARRY_TLS_KEY
//	QUARRY_TLS_KEY       file of the certificate's key, PEM
//	QUARRY_TLS_CA        file of the certificate authorities of controllers, PEM
//	QUARRY_KEY_FILE      KeyFile of payloads; default none: they are clear
//	QUARRY_ALLOW_CLEAR   true or false
//	QUARRY_FABRIC        auto, verbs, shm or tcp
//	QUARRY_FABRIC_TLS    off, on or required; default on with a certificate, else off
//	QUARRY_RAIL          comma-separated rails that this program is on: NAME or NAME=ADDRESS
//	QUARRY_RAILS         warn or strict, for nodes on none of them
//	QUARRY_REQUIRE_RDMA  true or false
//	QUARRY_RDMA_DEVICE   DEVICE[/PORT][@ADDRESS]
func ConfigFromEnvironment() (Config, error) {
	c := Config{
		Controllers: []string{DefaultController},
		Token:       os.Getenv("QUARRY_TOKEN"),
		Tenant:      os.Getenv("QUARRY_TENANT"),
		Transport:   os.Getenv("QUARRY_FABRIC"),
		RDMADevice:  os.Getenv("QUARRY_RDMA_DEVICE"),
		RailPolicy:  os.Getenv("QUARRY_RAILS"),
	}
	if urls := os.Getenv("QUARRY_CONTROLLER"); urls != "" {
		c.Controllers = strings.Split(urls, ",")
	}
	if rails := os.Getenv("QUARRY_RAIL"); rails != "" {
		c.Rails = strings.Split(rails, ",")
	}
	for name, p := range map[string]*bool{"QUARRY_REQUIRE_RDMA": &c.RequireRDMA, "QUARRY_ALLOW_CLEAR": &c.AllowClear} {
		if s := os.Getenv(name); s != "" {
			b, err := strconv.ParseBool(s)
			if err != nil {
				return Config{}, fmt.Errorf("client: %s=%q: want true or false", name, s)
			}
			*p = b
		}
	}
	if name := os.Getenv("QUARRY_KEY_FILE"); name != "" {
		c.Keys = KeyFile(name)
	}
	f := identity.Files{Cert: os.Getenv("QUARRY_TLS_CERT"), Key: os.Getenv("QUARRY_TLS_KEY"), CA: os.Getenv("QUARRY_TLS_CA")}
	var src *identity.Source
	var err error
	if f != (identity.Files{}) {
		if src, err = open(f); err != nil {
			return Config{}, err
		}
		c.TLS = src.Client(identity.Controller)
	}
	if c.FabricTLS, err = tcp.NewTLS(os.Getenv("QUARRY_FABRIC_TLS"), src); err != nil {
		return Config{}, fmt.Errorf("client: QUARRY_FABRIC_TLS: %w", err)
	}
	return c, c.withDefaults().validate()
}

func open(f identity.Files) (*identity.Source, error) {
	src, err := identity.Open(f, slog.Default())
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	return src, nil
}

// TLSFromFiles returns a Config.TLS that trusts the controllers of a cluster and shows them this
// program's certificate, from PEM files. cert and key may be "": then the controllers want a
// token. ca may be "": the system's authorities. Files that are replaced are read again when a
// connection is made; a program without a certificate reads ca once. Errors name the file.
func TLSFromFiles(cert, key, ca string) (*tls.Config, error) {
	src, err := open(identity.Files{Cert: cert, Key: key, CA: ca})
	if err != nil {
		return nil, err
	}
	return src.Client(identity.Controller), nil
}

// FabricTLSFromFiles returns a Config.FabricTLS of one of the FabricTLS constants, from the files of
// TLSFromFiles. For FabricTLSOn and FabricTLSRequired all three are needed, and the certificate names
// the program (quarry cert client).
func FabricTLSFromFiles(mode, cert, key, ca string) (*FabricTLS, error) {
	src, err := open(identity.Files{Cert: cert, Key: key, CA: ca})
	if err != nil {
		return nil, err
	}
	t, err := tcp.NewTLS(mode, src)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	return t, nil
}

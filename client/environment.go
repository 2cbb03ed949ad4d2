package client

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// DefaultController is the address on which `quarry dev`, and a controller without options, listens.
const DefaultController = "http://127.0.0.1:7420"

// ConfigFromEnvironment returns a Config from the variables that the command quarry reads:
//
//	QUARRY_CONTROLLER    comma-separated URLs; default DefaultController
//	QUARRY_TOKEN         token of the cluster
//	QUARRY_CA            file of a certificate authority, PEM
//	QUARRY_FABRIC        auto, verbs, shm or tcp
//	QUARRY_REQUIRE_RDMA  true or false
//	QUARRY_RDMA_DEVICE   DEVICE[/PORT][@ADDRESS]
func ConfigFromEnvironment() (Config, error) {
	c := Config{
		Controllers: []string{DefaultController},
		Token:       os.Getenv("QUARRY_TOKEN"),
		Transport:   os.Getenv("QUARRY_FABRIC"),
		RDMADevice:  os.Getenv("QUARRY_RDMA_DEVICE"),
	}
	if urls := os.Getenv("QUARRY_CONTROLLER"); urls != "" {
		c.Controllers = strings.Split(urls, ",")
	}
	if s := os.Getenv("QUARRY_REQUIRE_RDMA"); s != "" {
		b, err := strconv.ParseBool(s)
		if err != nil {
			return Config{}, fmt.Errorf("client: QUARRY_REQUIRE_RDMA=%q: want true or false", s)
		}
		c.RequireRDMA = b
	}
	if file := os.Getenv("QUARRY_CA"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return Config{}, fmt.Errorf("client: QUARRY_CA: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return Config{}, fmt.Errorf("client: QUARRY_CA: no PEM certificate in %s", file)
		}
		c.TLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
	}
	return c, c.withDefaults().validate()
}

package hostile

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

func TestIdleConnectionsAtANode(t *testing.T) {
	p := start(t, "dev", "--nodes", "1", "--listen", "127.0.0.1:0")
	var fabric string
	for _, e := range p.status().Table.Nodes[0].Endpoints {
		if e.Provider == quarrypb.Provider_PROVIDER_TCP {
			fabric = e.Address
		}
	}
	for name, greeting := range map[string]string{"silent": "", "half a hello": "QRYH", "rubbish": strings.Repeat("x", 4096)} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			require.Less(t, p.growth(func() {
				crowd(t, fabric, connections, greeting)
				p.run("slab", "alloc", "-C", p.url(), "--transport", "tcp", "--data", "well behaved")
			}), most)
		})
	}
}

func TestIdleConnectionsAtAGateway(t *testing.T) {
	dev := start(t, "dev", "--nodes", "1", "--listen", "127.0.0.1:0")
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("open sesame\n"), 0o600))
	p := start(t, "gateway", "redis", "-C", dev.url(), "--listen", "127.0.0.1:0", "--tree", "attacked", "--create", "--password-file", password)
	address := p.ready["address"]
	for name, greeting := range map[string]string{
		"silent": "", "a long command": "*10\r\n$16000\r\n" + strings.Repeat("x", 15000), "an endless line": strings.Repeat("x", 20_000),
	} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			require.Less(t, p.growth(func() {
				crowd(t, address, connections, greeting)
				c, err := net.Dial("tcp", address)
				require.NoError(t, err)
				defer c.Close()
				require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
				_, err = fmt.Fprint(c, "AUTH \"open sesame\"\r\nSET k v\r\n")
				require.NoError(t, err)
				r := bufio.NewReader(c)
				for range 2 {
					line, err := r.ReadString('\n')
					require.NoError(t, err)
					require.Equal(t, "+OK\r\n", line)
				}
			}), most)
		})
	}
}

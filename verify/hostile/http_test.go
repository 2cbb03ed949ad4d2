package hostile

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// bomb is 16 KB of gzip that decode to a list of millions of empty messages.
func bomb(t *testing.T) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write(bytes.Repeat([]byte{3<<3 | 2, 0}, 15<<20/2)) // RegisterNodeRequest.found, NodeHeartbeatRequest.connected
	require.NoError(t, err)
	require.NoError(t, z.Close())
	require.Less(t, b.Len(), 17<<10)
	return b.Bytes()
}

// bombard sends the bomb to a procedure, without token, and wants refusals.
func bombard(t *testing.T, url string) {
	body := bomb(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			r, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(body))
			if err != nil {
				panic(err)
			}
			r.Header.Set("Content-Type", "application/proto")
			r.Header.Set("Content-Encoding", "gzip")
			res, err := http.DefaultClient.Do(r)
			if err == nil { // or the connection was closed on it
				_, _ = io.Copy(io.Discard, res.Body)
				res.Body.Close()
			}
		})
	}
	wg.Wait()
}

func TestCompressedRequestsBeforeAuth(t *testing.T) {
	p := start(t, "dev", "--nodes", "1", "--listen", "127.0.0.1:0")
	agent := p.status().Table.Nodes[0].AgentUrl
	require.Less(t, p.growth(func() { bombard(t, p.url()+quarrypbconnect.ControllerRegisterNodeProcedure) }), most, "controller")
	require.Less(t, p.growth(func() { bombard(t, agent+quarrypbconnect.AgentWorkProcedure) }), most, "agent")
	p.status()
}

func TestIdleConnectionsAtHTTPPorts(t *testing.T) {
	p := start(t, "dev", "--nodes", "1", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
	agent := p.status().Table.Nodes[0].AgentUrl
	for name, c := range map[string]struct{ address, greeting string }{
		"silent at a controller":            {hostOf(p.url()), ""},
		"an endless body at a controller":   {hostOf(p.url()), "POST " + quarrypbconnect.ControllerRegisterNodeProcedure + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/proto\r\nContent-Length: 1000000\r\n\r\n"},
		"an endless header at an agent":     {hostOf(agent), "POST / HTTP/1.1\r\nHost: localhost\r\nX: "},
		"an HTTP/2 preface at a controller": {hostOf(p.url()), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			require.Less(t, p.growth(func() {
				crowd(t, c.address, connections, c.greeting)
				p.status()
			}), most)
		})
	}
}

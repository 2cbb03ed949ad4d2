package redis_test

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
)

var connections = flag.Int("connections", 1, "connections of BenchmarkGateway for each processor")

// BenchmarkGateway sends prepared bytes and throws the answers away, so that the
// time is the gateway's.
func BenchmarkGateway(b *testing.B) {
	addr := gateway(b, redis.Config{})
	const keys = 50_000
	value := make([]byte, 128)
	fill := dial(b, addr)
	for i := 0; i < keys; i += 100 {
		var out []byte
		for j := range 100 {
			out = append(out, frame("SET", fmt.Sprintf("key:%012d", i+j), string(value))...)
		}
		fill.send(out)
		_, err := io.CopyN(io.Discard, fill.r, 500)
		require.NoError(b, err)
	}
	for _, depth := range []int{1, 32} {
		for _, op := range []string{"GET", "SET", "INCR"} {
			b.Run(fmt.Sprintf("%s/%d", op, depth), func(b *testing.B) {
				var batches [][]byte
				answer := map[string]int{"GET": len("$128\r\n") + 130, "SET": len("+OK\r\n"), "INCR": len(":1\r\n")}[op] * depth
				n := 0
				for range 4000 / depth {
					var out []byte
					for range depth {
						n += 7919
						switch key := fmt.Sprintf("key:%012d", n%keys); op {
						case "GET":
							out = append(out, frame(op, key)...)
						case "SET":
							out = append(out, frame(op, key, string(value))...)
						default:
							out = append(out, frame("EXISTS", "n"+key)...)
						}
					}
					batches = append(batches, out)
				}
				b.ReportAllocs()
				b.SetParallelism(*connections)
				b.RunParallel(func(pb *testing.PB) {
					c, err := net.Dial("tcp", addr)
					if err != nil {
						b.Error(err)
						return
					}
					defer c.Close()
					buf := make([]byte, answer)
					for i := rand.IntN(1000); pb.Next(); i++ {
						_, err := c.Write(batches[i%len(batches)])
						if err == nil {
							_, err = io.ReadFull(c, buf)
						}
						if err != nil {
							b.Error(err)
							return
						}
					}
				})
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*depth), "ns/command")
			})
		}
	}
}

package bench

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
)

// YCSB is the operation that runs the workloads of the Yahoo! Cloud Serving Benchmark (Cooper and others, SoCC 2010) against
// a Redis gateway, a process of its own, beside a redis-server. Records are 10 fields of 100 bytes, as hashes or as one string,
// and an index, a sorted set, for scans, as YCSB's own Redis client has them. Each command waits for its answer.
const YCSB = "ycsb"

const (
	ycsbFields     = 10
	ycsbFieldBytes = 100
	ycsbRecords    = 100_000 // where --objects names no number
	ycsbLongScan   = 100     // records of a scan: 1 to this many, uniformly
)

// ycsbThreads are the numbers of connections.
var ycsbThreads = []int{1, 16}

// ycsbMix is a workload: hundredths of each operation.
type ycsbMix struct {
	name                            string
	update, insert, scan, rewritten int // the rest reads; rewritten: a record is read and then changed
	latest                          bool
}

// D and E insert records, so they come last.
var ycsbMixes = []ycsbMix{
	{name: "a", update: 50},
	{name: "b", update: 5},
	{name: "c"},
	{name: "f", rewritten: 50},
	{name: "d", insert: 5, latest: true},
	{name: "e", insert: 5, scan: 95},
}

// ycsbSet is the records of one server.
type ycsbSet struct {
	hash    bool
	initial int // loaded before the workloads
	zipf    *zipf

	mu      sync.Mutex
	given   int // next record to insert
	present int // all records below are there
	done    map[int]bool
}

// take gives out a record to insert.
func (s *ycsbSet) take() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.given++
	return s.given - 1
}

// inserted notes that a record is there.
func (s *ycsbSet) inserted(i int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.done[i] = true; s.done[s.present]; s.present++ {
		delete(s.done, s.present)
	}
}

func (s *ycsbSet) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.present
}

func ycsbRun(ctx context.Context, cfg Config, cc client.Config, tell func(Row)) error {
	records := cfg.Job.Objects
	if records == 0 {
		records = ycsbRecords
	}
	for _, kind := range []string{"hash", "string"} {
		if err := ycsbKind(ctx, cfg, cc, kind, records, tell); err != nil {
			return err
		}
	}
	return nil
}

// ycsbKind loads records of a kind into fresh servers, and runs all workloads.
func ycsbKind(ctx context.Context, cfg Config, cc client.Config, kind string, records int, tell func(Row)) error {
	servers, stop, err := gatewayAndRedis(ctx, cfg, cc)
	if err != nil {
		return err
	}
	defer stop()
	sets := make([]*ycsbSet, len(servers))
	popular := newZipf(records)
	for i := range sets {
		sets[i] = &ycsbSet{hash: kind == "hash", initial: records, zipf: popular, done: map[int]bool{}}
	}
	row := func(op string, threads int) Row {
		return Row{Op: op + " " + kind, Bytes: ycsbFields * ycsbFieldBytes, Clients: threads, Processes: 1}
	}
	for t, threads := range ycsbThreads {
		// One connection loads the first half, 16 the rest.
		from, to := t*records/len(ycsbThreads), (t+1)*records/len(ycsbThreads)
		err := inTurns(servers, row("load", threads), func(slice, i int) (*outcome, error) {
			end := from + (slice+1)*(to-from)/gatewaySlices
			return clients(threads, func(id int) (*outcome, error) {
				return ycsbLoop(ctx, servers[i], sets[i], ycsbSeed(slice, id), func(c *ycsbClient, _ time.Duration) (bool, error) {
					n := sets[i].take()
					if n >= end {
						sets[i].giveBack()
						return false, nil
					}
					return true, c.insert(n)
				})
			})
		}, tell)
		if err != nil {
			return fmt.Errorf("load %s: %w", kind, err)
		}
	}
	for _, mix := range ycsbMixes {
		for _, threads := range ycsbThreads {
			err := inTurns(servers, row("ycsb-"+mix.name, threads), func(slice, i int) (*outcome, error) {
				return clients(threads, func(id int) (*outcome, error) {
					return ycsbLoop(ctx, servers[i], sets[i], ycsbSeed(slice, id), func(c *ycsbClient, since time.Duration) (bool, error) {
						if since >= cfg.Job.Duration/gatewaySlices {
							return false, nil
						}
						return true, c.work(mix)
					})
				})
			}, tell)
			if err != nil {
				return fmt.Errorf("workload %s, %s: %w", mix.name, kind, err)
			}
		}
	}
	for i, s := range servers {
		if err := ycsbCount(s, sets[i].count()); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}

func (s *ycsbSet) giveBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.given--
}

func ycsbSeed(slice, id int) uint64 { return uint64(slice*64 + id + 1) }

// ycsbCount fails if a server has other keys than the records and the index.
func ycsbCount(s redisServer, records int) error {
	c, err := dialYCSB(s, nil, 0)
	if err != nil {
		return err
	}
	defer c.conn.Close()
	n, err := c.ask("DBSIZE")
	if err == nil && n != records+1 {
		err = fmt.Errorf("%d keys, and there should be %d records and an index", n, records)
	}
	return err
}

// ycsbClient is one connection.
type ycsbClient struct {
	conn  net.Conn
	r     *bufio.Reader
	out   []byte
	rng   *rand.Rand
	set   *ycsbSet
	value [ycsbFields * ycsbFieldBytes]byte
	found []string // keys that the last scan found
}

func dialYCSB(s redisServer, set *ycsbSet, seed uint64) (*ycsbClient, error) {
	conn, err := net.Dial(s.network, s.addr)
	if err != nil {
		return nil, err
	}
	c := &ycsbClient{conn: conn, r: bufio.NewReaderSize(conn, 64<<10), rng: rand.New(rand.NewPCG(seed, 7)), set: set}
	for i := range c.value {
		c.value[i] = 'q'
	}
	return c, nil
}

// ycsbLoop is one client: step does one operation, false when there is nothing left to do.
func ycsbLoop(ctx context.Context, s redisServer, set *ycsbSet, seed uint64, step func(c *ycsbClient, since time.Duration) (more bool, err error)) (*outcome, error) {
	c, err := dialYCSB(s, set, seed)
	if err != nil {
		return nil, err
	}
	defer c.conn.Close()
	o := &outcome{hist: newHist()}
	start := time.Now()
	last := start
	for ctx.Err() == nil {
		more, err := step(c, last.Sub(start))
		if err != nil {
			return nil, err
		}
		if !more {
			break
		}
		now := time.Now()
		record(o.hist, int64(now.Sub(last)))
		last = now
		o.Calls++
		o.Ops++
	}
	o.Elapsed = last.Sub(start)
	return o, ctx.Err()
}

// work does one operation of a workload.
func (c *ycsbClient) work(mix ycsbMix) error {
	p := c.rng.IntN(100)
	at := func(share int) bool { p -= share; return p < 0 }
	switch {
	case at(mix.insert):
		return c.insert(c.set.take())
	case at(mix.update):
		return c.update(c.record(mix))
	case at(mix.scan):
		return c.scan(c.record(mix), 1+c.rng.IntN(ycsbLongScan))
	case at(mix.rewritten):
		n := c.record(mix)
		if err := c.read(ycsbKey(n)); err != nil {
			return err
		}
		return c.update(n)
	}
	return c.read(ycsbKey(c.record(mix)))
}

// record draws a record: the latest are the most popular, or popular ones are anywhere.
func (c *ycsbClient) record(mix ycsbMix) int {
	rank := c.set.zipf.rank(c.rng.Float64())
	if mix.latest {
		return max(0, c.set.count()-1-rank)
	}
	return int(scramble(uint64(rank)) % uint64(c.set.initial))
}

func ycsbKey(n int) string { return "user" + strconv.FormatUint(scramble(uint64(n)), 10) }

// ycsbScore is a record's place in the index.
func ycsbScore(n int) string { return strconv.FormatUint(scramble(uint64(n))>>12, 10) } // 52 bits: a double holds it

var ycsbFieldNames = func() (names [ycsbFields]string) {
	for i := range names {
		names[i] = "field" + strconv.Itoa(i)
	}
	return names
}()

// fill makes the bytes of a value differ from write to write.
func (c *ycsbClient) fill() []byte {
	strconv.AppendUint(c.value[:0], 1<<63+c.rng.Uint64()>>1, 16) // 16 digits
	return c.value[:]
}

func (c *ycsbClient) insert(n int) error {
	key, v := ycsbKey(n), c.fill()
	want := -1
	if c.set.hash {
		c.begin("HSET", 2+2*ycsbFields)
		c.add(key)
		for i, f := range ycsbFieldNames {
			c.add(f)
			c.add(string(v[i*ycsbFieldBytes : (i+1)*ycsbFieldBytes]))
		}
		want = ycsbFields
	} else {
		c.begin("SET", 3)
		c.add(key)
		c.add(string(v))
	}
	got, err := c.answer()
	if err == nil && want >= 0 && got != want {
		err = fmt.Errorf("record %d: %d new fields, want %d", n, got, want)
	}
	if err != nil {
		return err
	}
	if got, err = c.ask("ZADD", "_indices", ycsbScore(n), key); err == nil && got != 1 {
		err = fmt.Errorf("record %d was in the index", n)
	}
	if err == nil {
		c.set.inserted(n)
	}
	return err
}

func (c *ycsbClient) read(key string) error {
	op, want := "GET", len(c.value)
	if c.set.hash {
		op, want = "HGETALL", 2*ycsbFields
	}
	n, err := c.ask(op, key)
	if err == nil && n != want {
		err = fmt.Errorf("%s %s answers %d, want %d", op, key, n, want)
	}
	return err
}

func (c *ycsbClient) update(n int) error {
	key, v := ycsbKey(n), c.fill()
	if !c.set.hash {
		_, err := c.ask("SET", key, string(v))
		return err
	}
	got, err := c.ask("HSET", key, ycsbFieldNames[c.rng.IntN(ycsbFields)], string(v[:ycsbFieldBytes]))
	if err == nil && got != 0 {
		err = fmt.Errorf("HSET %s made %d fields", key, got)
	}
	return err
}

// scan reads the index, and then each record.
func (c *ycsbClient) scan(from, limit int) error {
	n, err := c.ask("ZRANGEBYSCORE", "_indices", ycsbScore(from), "+inf", "LIMIT", "0", strconv.Itoa(limit))
	if err == nil && (n < 1 || n > limit) {
		err = fmt.Errorf("a scan of at most %d records found %d", limit, n)
	}
	for _, key := range append([]string(nil), c.found...) {
		if err == nil {
			err = c.read(key)
		}
	}
	return err
}

package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/redismodel"
)

// Each client process that works is a Redis gateway too, with connections of its own to
// it. All gateways serve one tree. Commands are on the keys a, b and c of a group, and a
// group's turn is short: so that each history is one that the model can check, and faults
// fall into many of them.

const (
	// groupTime is how long commands go to one group.
	groupTime = 300 * time.Millisecond
	// commandPace is the mean time between two commands of a connection.
	commandPace = 40 * time.Millisecond
	// connections of each gateway.
	connections = 2
	// chaosOrphanAge is below the time for which clients are stopped: gateways that go on
	// find what they have begun swept.
	chaosOrphanAge = 2 * time.Second
	// groupTimeout bounds the check of one group. Running into it shows nothing, and is
	// reported as such.
	groupTimeout = 30 * time.Second
)

// families of groups take turns.
var families = []string{"strings", "counters", "hashes", "sorted sets"}

func familyOf(group int64) string { return families[group%int64(len(families))] }

// command is a line of a journal of commands: first what is asked, then what is answered.
type command struct {
	N     int      `json:"n"`
	Group int64    `json:"group,omitempty"`
	Actor int      `json:"actor,omitempty"`
	Args  []string `json:"args,omitempty"`
	Call  int64    `json:"call,omitempty"`
	Reply string   `json:"reply,omitempty"`
	Ret   int64    `json:"ret,omitempty"`
}

// commandJournal writes the commands of one process. What is asked is written before it is
// sent: a kill loses no line.
type commandJournal struct {
	mu   sync.Mutex
	f    *os.File
	next int
}

func (j *commandJournal) write(c *command) error {
	b, err := json.Marshal(c)
	if err == nil {
		_, err = j.f.Write(append(b, '\n'))
	}
	return err
}

func (j *commandJournal) begin(c *command) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.next++
	c.N, c.Call = j.next, now()
	return j.write(c)
}

func (j *commandJournal) end(n int, reply string) error {
	at := now()
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.write(&command{N: n, Reply: reply, Ret: at})
}

// gateway is that of a worker.
type gateway struct {
	w      *worker
	j      *commandJournal
	socket string
	stop   context.CancelFunc
	served chan error
}

// startGateway serves the tree on a socket beside the journal.
func (w *worker) startGateway(log *slog.Logger) (*gateway, error) {
	dir, id := filepath.Dir(w.Journal), strconv.Itoa(w.ID)
	f, err := os.OpenFile(filepath.Join(dir, "commands-"+id+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	g := &gateway{w: w, j: &commandJournal{f: f}, socket: filepath.Join(dir, "gateway-"+id), served: make(chan error, 1)}
	l, err := net.Listen("unix", g.socket)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	g.stop = cancel
	s := redis.New(redis.Config{Tree: w.tree, OrphanAge: chaosOrphanAge, Logger: log})
	go func() { g.served <- s.Serve(ctx, l) }()
	return g, nil
}

func (g *gateway) close() error {
	g.stop()
	return errors.Join(<-g.served, g.j.f.Close())
}

// peer is a connection to the gateway, 0 before the first command and after a failure.
type peer struct {
	g     *gateway
	actor int
	c     net.Conn
	r     *bufio.Reader
}

// do notes a command around its answer. The answer "" means that there is none.
func (p *peer) do(group int64, args ...string) (string, error) {
	e := &command{Group: group, Actor: p.actor, Args: args}
	if err := p.g.j.begin(e); err != nil {
		return "", err
	}
	reply, err := p.ask(group, args)
	if err != nil {
		if p.c != nil {
			p.c.Close()
		}
		p.c = nil
		return "", nil // no answer: the journal has no end of it
	}
	return reply, p.g.j.end(e.N, reply)
}

// ask sends a command with the keys of its group.
func (p *peer) ask(group int64, args []string) (string, error) {
	if p.c == nil {
		c, err := net.Dial("unix", p.g.socket)
		if err != nil {
			return "", err
		}
		p.c, p.r = c, bufio.NewReader(c)
	}
	if err := p.c.SetDeadline(time.Now().Add(3 * p.g.w.Timeout)); err != nil {
		return "", err
	}
	b := fmt.Appendf(nil, "*%d\r\n", len(args))
	for i, a := range args {
		if i == 1 || i == 2 && acrossKeys[args[0]] {
			a = fmt.Sprintf("%d:%s", group, a)
		}
		b = fmt.Appendf(b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := p.c.Write(b); err != nil {
		return "", err
	}
	var out bytes.Buffer
	err := readReply(p.r, &out)
	return out.String(), err
}

// acrossKeys are commands whose second argument is a key too.
var acrossKeys = map[string]bool{"RENAME": true, "RENAMENX": true, "COPY": true}

// readReply copies an answer as it is on the wire.
func readReply(r *bufio.Reader, out *bytes.Buffer) error {
	line, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	out.WriteString(line)
	n := int64(-1)
	if line[0] == '$' || line[0] == '*' {
		if n, err = strconv.ParseInt(strings.TrimSpace(line[1:]), 10, 32); err != nil {
			return err
		}
	}
	switch {
	case line[0] == '$' && n >= 0:
		_, err = io.CopyN(out, r, n+2)
	case line[0] == '*':
		for range n {
			if err := readReply(r, out); err != nil {
				return err
			}
		}
	}
	return err
}

// commands sends commands until the context ends.
func (g *gateway) commands(stop context.Context, t int) error {
	rng := rand.New(rand.NewPCG(uint64(g.w.ID), uint64(1000+t)))
	p := &peer{g: g, actor: connections*g.w.ID + t}
	s := &redismodel.Script{Rnd: rng, Prefix: fmt.Sprintf("w%dt%d", g.w.ID, t)}
	for stop.Err() == nil {
		group := now() / int64(groupTime)
		if _, err := p.do(group, redismodel.Families[familyOf(group)](s)...); err != nil {
			return err
		}
		select {
		case <-stop.Done():
		case <-time.After(time.Duration(rng.Int64N(int64(2*commandPace) + 1))):
		}
	}
	return nil
}

// readGroups reads all keys of groups, in the end, and compares what different commands say.
func (g *gateway) readGroups(groups []int64) error {
	p := &peer{g: g, actor: connections * g.w.ID}
	ask := func(group int64, args ...string) (string, error) {
		reply, err := p.do(group, args...)
		if err == nil && (reply == "" || reply[0] == '-') {
			err = fmt.Errorf("%s of group %d in the end: %q", args, group, reply)
		}
		return reply, err
	}
	for _, group := range groups {
		for _, key := range redismodel.Keys {
			typ, err := ask(group, "TYPE", key)
			if err != nil {
				return err
			}
			one, all := "HGET", []string{"HLEN", key}
			switch strings.TrimSpace(typ) {
			case "+zset":
				one, all = "ZSCORE", []string{"ZRANGE", key, "0", "-1", "WITHSCORES"}
			case "+hash":
			default:
				if _, err := ask(group, "GET", key); err != nil {
					return err
				}
				continue
			}
			var found []string
			for _, f := range redismodel.Fields {
				v, err := ask(group, one, key, f)
				if err != nil {
					return err
				}
				if words := strings.Fields(v); words[0] != "$-1" {
					found = append(found, f+" "+words[1])
				}
			}
			got, err := ask(group, all...)
			if err != nil {
				return err
			}
			want := fmt.Sprintf(":%d\r\n", len(found))
			if one == "ZSCORE" {
				words := strings.Fields(got)
				var pairs []string
				for i := 1; i+3 < len(words); i += 4 {
					pairs = append(pairs, words[i+1]+" "+words[i+3])
				}
				slices.Sort(pairs)
				got, want = fmt.Sprint(pairs), fmt.Sprint(found)
			}
			if got != want {
				return fmt.Errorf("key %s of group %d: %s says %s, %s %s", key, group, all[0], got, one, want)
			}
		}
	}
	return nil
}

// readCommands reads the journals of commands in a folder, by group.
func readCommands(dir string) (map[int64][]*redismodel.Event, error) {
	names, err := filepath.Glob(filepath.Join(dir, "commands-*.log"))
	if err != nil {
		return nil, err
	}
	groups := map[int64][]*redismodel.Event{}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if err := parseCommands(b, groups); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return groups, nil
}

// parseCommands adds the commands of one process. A last line without its end is of a
// process that was killed.
func parseCommands(b []byte, groups map[int64][]*redismodel.Event) error {
	open := map[int]*redismodel.Event{}
	for {
		line, rest, ok := bytes.Cut(b, []byte("\n"))
		if !ok {
			return nil
		}
		b = rest
		var c command
		if err := json.Unmarshal(line, &c); err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
		if c.Args != nil {
			e := &redismodel.Event{Actor: c.Actor, Args: c.Args, Call: c.Call, Ret: redismodel.Never, Unknown: true}
			open[c.N] = e
			groups[c.Group] = append(groups[c.Group], e)
			continue
		}
		e := open[c.N]
		if e == nil {
			return fmt.Errorf("%q: an answer to nothing", line)
		}
		// What is done in part, or fails for a reason unknown to the model, may have been done.
		e.Reply = c.Reply
		unknown := strings.HasPrefix(c.Reply, "-UNKNOWN") || strings.HasSuffix(c.Reply, "; done in part\r\n")
		if !unknown {
			e.Ret, e.Unknown = c.Ret, false
		}
	}
}

// judgeCommands compares the commands of each group with the model.
func (v *verdict) judgeCommands(groups map[int64][]*redismodel.Event) {
	var order []int64
	for group := range groups {
		order = append(order, group)
	}
	slices.Sort(order)
	for _, group := range order {
		events := groups[group]
		v.ops += len(events)
		for _, e := range events {
			switch {
			case e.Unknown:
				v.unknown++
			case !strings.HasPrefix(e.Reply, "-"):
				v.succeeded++
			}
		}
		bad, _ := redismodel.Check(events, groupTimeout)
		switch {
		case redismodel.Inconclusive(bad):
			v.undecided = append(v.undecided, fmt.Sprintf("commands of group %d (%s): %d: %s", group, familyOf(group), len(events), bad))
		case bad != "":
			v.illegal = append(v.illegal, fmt.Sprintf("commands of group %d (%s): %s\n%s", group, familyOf(group), bad, redismodel.History(events)))
		}
	}
}

package etcdembed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	"go.etcd.io/etcd/server/v3/storage/wal"

	"github.com/quarrystore/quarry/internal/identity"
)

// The first start of a member with peers.
//
// etcd derives the identity of a statically configured member from its peer URL. A
// member whose folder is empty because its disk was lost would therefore start under its
// old identity, without the log it has acknowledged and the votes it has cast: committed
// entries could be lost. etcd refuses that only if it reaches a peer that remembers the
// member. Here an empty folder starts a new cluster only if every other member of the
// initial cluster answers, and none of them has seen this member run before:
//
//   - A member that waits for its first start answers firstStartPath.
//   - A member that runs answers /members, where a member that has run before has client URLs.
//
// Everything else waits, or is refused with the command that repairs it.

const (
	firstStartPath = "/quarry/first-start"
	pollEvery      = 200 * time.Millisecond
	pollTimeout    = time.Second
	maxAnswerBytes = 1 << 20
)

// start is how etcd is to be started.
type start struct {
	existing bool   // join the cluster that runs
	cluster  string // NAME=URL,... of all members
}

// firstStart is what a member that waits for its first start tells its peers.
type firstStart struct {
	Name    string `json:"name"`
	Cluster string `json:"cluster"` // sorted NAME=URL,...
}

// hasLog reports whether the folder holds the log of a member.
func hasLog(dir string) bool { return wal.Exist(filepath.Join(dir, "member", "wal")) }

// howToStart decides how a member with peers starts, while its port tells them that it waits. It
// returns when the decision is made: at once if the folder holds a log.
func howToStart(ctx context.Context, c Config, port *peerPort) (start, error) {
	if hasLog(c.Dir) {
		return start{cluster: c.InitialCluster}, nil // etcd reads the members from its log
	}
	all, err := types.NewURLsMap(c.InitialCluster)
	if err != nil {
		return start{}, fmt.Errorf("initial cluster %q: want NAME=URL,...: %w", c.InitialCluster, err)
	}
	if urls := all[c.Name]; len(urls) != 1 || urls[0].String() != strings.TrimSuffix(c.PeerURL, "/") {
		return start{}, fmt.Errorf("initial cluster %q: want %s=%s in it, this member", c.InitialCluster, c.Name, c.PeerURL)
	}
	others := map[string]string{} // name -> URL
	for name, urls := range all {
		if name != c.Name {
			others[name] = urls[0].String()
		}
	}
	if len(others) == 0 {
		return start{cluster: c.InitialCluster}, nil
	}
	me := firstStart{Name: c.Name, Cluster: all.String()}
	port.waits(me)
	polls := c.pollClient()
	began := time.Now()
	for {
		var silent []string
		var seen []sighting
		for _, name := range sortedNames(others) {
			s := look(ctx, polls, name, others[name])
			if s.silent() {
				silent = append(silent, name+" at "+others[name])
			} else {
				seen = append(seen, s)
			}
		}
		s, done, err := judge(c, me, seen, len(silent) == 0)
		if done || err != nil {
			return s, err
		}
		c.waitingFor(began, silent)
		select {
		case <-ctx.Done():
			return start{}, fmt.Errorf("the first start needs every member of the initial cluster: no answer from %s: %w", strings.Join(silent, ", "), ctx.Err())
		case <-time.After(pollEvery):
		}
	}
}

// sighting is what one peer answered.
type sighting struct {
	name, url string
	waits     *firstStart         // it waits for its first start
	members   []membership.Member // it runs
}

func (s sighting) silent() bool { return s.waits == nil && s.members == nil }

// judge decides from what the peers answer. complete says that all have answered.
func judge(c Config, me firstStart, seen []sighting, complete bool) (s start, done bool, err error) {
	for _, p := range seen {
		switch {
		case p.waits != nil:
			if p.waits.Cluster != me.Cluster {
				return s, false, fmt.Errorf("%s at %s has the initial cluster %s, this member has %s: use the same everywhere", p.name, p.url, p.waits.Cluster, me.Cluster)
			}
			if p.waits.Name != p.name {
				return s, false, fmt.Errorf("%s says its name is %s, the initial cluster calls it %s", p.url, p.waits.Name, p.name)
			}
		default:
			i := slices.IndexFunc(p.members, func(m membership.Member) bool { return slices.Contains(m.PeerURLs, strings.TrimSuffix(c.PeerURL, "/")) })
			if i < 0 {
				return s, false, fmt.Errorf("%w: %s at %s runs and has no member at %s: on a controller's host, quarry controller add %s --etcd-peer %s", ErrNotMember, p.name, p.url, c.PeerURL, c.Name, c.PeerURL)
			}
			m := p.members[i]
			if len(m.ClientURLs) > 0 {
				return s, false, fmt.Errorf("%w: %s knows %s as a member that has run, and %s is empty: its log is lost. Put the folder back, or replace the member: quarry controller replace %s, then start it again", ErrLogLost, p.name, c.Name, c.Dir, c.Name)
			}
			if m.Name == "" { // added, and never started
				s = start{existing: true, cluster: clusterOf(p.members, c)}
			}
		}
	}
	if s.existing {
		return s, true, nil
	}
	return start{cluster: c.InitialCluster}, complete, nil
}

// Errors of a first start.
var (
	// ErrLogLost: the member has run before and its log is gone.
	ErrLogLost = errors.New("the log of this member is lost")
	// ErrNotMember: the cluster runs and has no such member.
	ErrNotMember = errors.New("not a member of the cluster")
)

// clusterOf writes a cluster's members as etcd wants them from a joining member. Members
// that have not started have no name yet.
func clusterOf(members []membership.Member, c Config) string {
	var parts []string
	for _, m := range members {
		name := m.Name
		switch {
		case slices.Contains(m.PeerURLs, strings.TrimSuffix(c.PeerURL, "/")):
			name = c.Name
		case name == "":
			name = "member-" + m.ID.String()
		}
		for _, u := range m.PeerURLs {
			parts = append(parts, name+"="+u)
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

func (c Config) pollClient() *http.Client {
	t := &http.Transport{DisableKeepAlives: true}
	if c.TLS != nil {
		t.TLSClientConfig = c.TLS.Client(identity.Controller)
	}
	return &http.Client{Timeout: pollTimeout, Transport: t}
}

// look asks one peer what it is.
func look(ctx context.Context, polls *http.Client, name, peer string) sighting {
	s := sighting{name: name, url: peer}
	var waits firstStart
	if fetch(ctx, polls, peer+firstStartPath, &waits) == nil && waits.Cluster != "" {
		s.waits = &waits
		return s
	}
	var members []membership.Member
	if fetch(ctx, polls, peer+"/members", &members) == nil && len(members) > 0 {
		s.members = members
	}
	return s
}

func fetch(ctx context.Context, polls *http.Client, url string, into any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := polls.Do(r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return errors.New(res.Status)
	}
	return json.NewDecoder(http.MaxBytesReader(nil, res.Body, maxAnswerBytes)).Decode(into)
}

func sortedNames(m map[string]string) []string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

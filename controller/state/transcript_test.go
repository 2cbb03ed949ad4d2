package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// TestTranscripts plays the files of testdata. Commands:
//
//	node NAME domain=/d/r/h inc=1 [found=1,2] [free]   register; waits for nothing
//	run              commit and answer every call with success until all is quiet
//	commit           the transaction that is out takes effect
//	lost             its outcome is not known
//	ok|error|refuse KIND   the oldest call of a kind is answered
//	pong Ping inc=1  and so, with an incarnation
//	open | beat serial=1 [rev=] [reclaim=] | close serial=1 | revoke session=1
//	certify serial=1 session=2 [wait=ms] | sessions | table [since=]
//	create replicas=2 [count=] [mib=] [unless=]
//	reclaim | scrubbed serial=1
//	mute NAME        its heartbeats stop; it answers probes
//	kill NAME        it does neither; heal NAME: both again, in the same incarnation
//	add|drain NAME | remove NAME [force] [accept] | forget NAME | remove-region region=1 [lost] | move region=1 [from=] [to=] | rebalance [dry]
//	unfit NAME       it answers probes, and says that it cannot carry out fences; fit NAME: it can again
//	scrubs           from here on fenced sessions are scrubbed
//	trouble serial=1 node=2    a heartbeat of a client that cannot work with a node
//	advance 1s       time passes
//	deposed          the leader cannot renew its lead
//	shown            the states of regions and nodes as users see them
//	restart          another controller leads
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		r := newRig(t)
		r.settle()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return r.play(t, d) })
	})
}

func (r *rig) play(t *testing.T, d *datadriven.TestData) string {
	num := func(key string) (n uint64) { d.MaybeScanArgs(t, key, &n); return n }
	arg := func(i int) string { return d.CmdArgs[i].Key }
	// call is the oldest call that is out and shows as the argument does: "Ping", "OpenRegion", ...
	call := func() uint64 {
		i := slices.IndexFunc(r.calls, func(c Call) bool { return strings.HasPrefix(showMsg(c.Msg), arg(0)) })
		if i < 0 {
			d.Fatalf(t, "no %s is out", arg(0))
		}
		return r.calls[i].ID
	}
	var log []string
	shown := func(acts []Action) {
		for _, a := range acts {
			// The heartbeats of nodes are the rig's, not the test's.
			if ans, ok := a.(Answer); ok && ans.Msg != nil {
				if _, beat := ans.Msg.(*quarrypb.NodeHeartbeatResponse); beat {
					continue
				}
			}
			log = append(log, show(a))
		}
	}
	ask := func(msg any) { r.ask(msg); shown(r.stepped) }
	switch d.Cmd {
	case "node":
		var domain string
		d.ScanArgs(t, "domain", &domain)
		n := testNode(arg(0), domain, num("inc"))
		n.Id = num32(num("id"))
		req := &quarrypb.RegisterNodeRequest{Node: n}
		if d.HasArg("foreign") {
			req.Cluster = make([]byte, 16)
		}
		if d.HasArg("found") {
			var ids []string
			d.ScanArgs(t, "found", &ids)
			for _, s := range ids {
				var id uint32
				fmt.Sscan(s, &id)
				f := &quarrypb.HostedRegion{Region: id, SizeBytes: 16 << 20, Cluster: r.m.Cluster()}
				if g := r.m.region(id); g != nil {
					f.Uuid, f.SizeBytes = g.rec.Uuid, g.rec.SizeBytes
				}
				req.Found = append(req.Found, f)
			}
		}
		if old := r.m.nodeByName[n.Name]; old != nil {
			delete(r.dead, old.rec.Id)
		}
		ask(req)
		r.beats = slices.DeleteFunc(r.beats, func(o *quarrypb.Node) bool { return o.Name == n.Name })
		r.pendingBeats = append(r.pendingBeats, n)
	case "run":
		for r.commit != nil || len(r.calls) > 0 || r.probed() {
			switch {
			case r.commit != nil:
				r.commitOne()
			case len(r.calls) > 0:
				r.reply(r.calls[0].ID, "", false)
			default:
				r.answerProbe()
			}
			shown(r.stepped)
		}
	case "commit":
		if r.commit == nil {
			d.Fatalf(t, "no transaction is out")
		}
		r.commitOne()
		shown(r.stepped)
	case "lost":
		r.commit = nil
		shown(r.step(Failed{Err: fmt.Errorf("no quorum")}))
	case "ok":
		r.reply(call(), "", false)
		shown(r.stepped)
	case "error":
		r.reply(call(), "no answer", false)
		shown(r.stepped)
	case "refuse":
		r.reply(call(), "disk full", true)
		shown(r.stepped)
	case "pong":
		id := call()
		r.calls = slices.DeleteFunc(r.calls, func(c Call) bool { return c.ID == id })
		shown(r.step(Reply{Call: id, Msg: &quarrypb.PingResponse{Incarnation: num("inc")}}))
	case "open":
		ask(&quarrypb.OpenSessionRequest{Name: "test"})
	case "beat":
		ask(&quarrypb.HeartbeatRequest{Serial: num("serial"), TableRevision: num("rev"), ReclaimEpoch: num("reclaim")})
	case "close":
		ask(&quarrypb.CloseSessionRequest{Serial: num("serial")})
	case "revoke":
		ask(&quarrypb.RevokeSessionRequest{Session: num32(num("session")), Reason: "test"})
	case "certify":
		ask(&quarrypb.CertifyFenceRequest{Serial: num("serial"), Session: num32(num("session")), WaitMs: num32(num("wait"))})
	case "sessions":
		ask(&quarrypb.ListSessionsRequest{})
	case "table":
		ask(&quarrypb.ReadTableRequest{SinceRevision: num("since")})
	case "create":
		req := &quarrypb.CreateRegionRequest{Replicas: num32(num("replicas")), Count: num32(num("count")), SizeBytes: num("mib") << 20}
		if d.HasArg("unless") {
			u := num32(num("unless"))
			req.UnlessNewerThan = &u
		}
		ask(req)
	case "add":
		ask(&quarrypb.AddNodeRequest{Name: arg(0)})
	case "drain":
		ask(&quarrypb.DrainNodeRequest{Name: arg(0)})
	case "remove":
		ask(&quarrypb.RemoveNodeRequest{Name: arg(0), Force: d.HasArg("force"), AcceptLoss: d.HasArg("accept")})
	case "forget":
		ask(&quarrypb.ForgetNodeRequest{Name: arg(0)})
	case "remove-region":
		ask(&quarrypb.RemoveRegionRequest{Region: num32(num("region")), Lost: d.HasArg("lost")})
	case "shown":
		for _, g := range r.m.statusTable().Regions {
			log = append(log, fmt.Sprintf("region %d is %s", g.Id, quarrypb.Word(g.Shown())))
		}
		for _, n := range r.m.statusTable().Nodes {
			log = append(log, fmt.Sprintf("node %s is %s", n.Name, quarrypb.Word(n.State)))
		}
	case "move":
		req := &quarrypb.MoveRegionRequest{Region: num32(num("region"))}
		d.MaybeScanArgs(t, "from", &req.From)
		d.MaybeScanArgs(t, "to", &req.To)
		ask(req)
	case "rebalance":
		ask(&quarrypb.RebalanceRequest{DryRun: d.HasArg("dry")})
	case "scrubs":
		r.scrubEvery = 2 * time.Second
		r.m.cfg.ScrubEvery = r.scrubEvery
	case "pass":
		ask(&quarrypb.PassRequest{Serial: num("serial"), Epoch: num("epoch")})
	case "reclaims":
		r.m.cfg.ReclaimEvery = 10 * time.Second
	case "scrubbed":
		ask(Scrubbed{Serials: []uint64{num("serial")}})
	case "mute":
		r.beats = slices.DeleteFunc(r.beats, func(n *quarrypb.Node) bool { return n.Name == arg(0) })
	case "kill":
		n := r.m.nodeByName[arg(0)]
		r.dead[n.rec.Id] = true
		r.beats = slices.DeleteFunc(r.beats, func(o *quarrypb.Node) bool { return o.Name == arg(0) })
	case "heal":
		n := r.m.nodeByName[arg(0)]
		delete(r.dead, n.rec.Id)
		r.beats = append(r.beats, n.rec)
	case "unfit":
		r.unfit[r.m.nodeByName[arg(0)].rec.Id] = "disk full"
	case "fit":
		delete(r.unfit, r.m.nodeByName[arg(0)].rec.Id)
	case "trouble":
		ask(&quarrypb.HeartbeatRequest{Serial: num("serial"), Troubles: []*quarrypb.NodeTrouble{{Node: num32(num("node")), BrokenRounds: 1}}})
	case "advance":
		by, err := time.ParseDuration(arg(0))
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		for end := r.now + int64(by); r.now < end; {
			r.advance(min(100*time.Millisecond, time.Duration(end-r.now)))
			shown(r.stepped) // of the tick
		}
	case "deposed":
		r.deposed = true
		r.m.lead = r.now
	case "restart":
		r.start()
		if r.commit != nil {
			log = append(log, show(*r.commit))
		}
		for _, c := range r.calls {
			log = append(log, show(c))
		}
		r.pendingBeats = nil
	default:
		d.Fatalf(t, "unknown command %s", d.Cmd)
	}
	// Nodes send heartbeats once they have been let in.
	r.pendingBeats = slices.DeleteFunc(r.pendingBeats, func(n *quarrypb.Node) bool {
		if in := r.m.nodeByName[n.Name]; in != nil && in.seen && in.rec.Incarnation == n.Incarnation {
			r.beats = append(r.beats, in.rec)
			return true
		}
		return false
	})
	if len(log) == 0 {
		return "quiet"
	}
	return strings.Join(log, "\n")
}

func num32(n uint64) uint32 { return uint32(n) }

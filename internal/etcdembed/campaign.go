package etcdembed

import (
	"context"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
)

// ID of the member.
func (s *Server) ID() uint64 { return uint64(s.etcd.Server.MemberID()) }

// Lead is the member that leads; 0 if this one knows of none.
func (s *Server) Lead() uint64 { return s.etcd.Server.Lead() }

// Voters of the cluster, as this member knows them.
func (s *Server) Voters() (ids []uint64) {
	for _, m := range s.etcd.Server.Cluster().Members() {
		if !m.IsLearner {
			ids = append(ids, uint64(m.ID))
		}
	}
	return ids
}

// Campaign has this member campaign at once, instead of when its timer runs out. One that
// leads goes on to lead.
func (s *Server) Campaign(ctx context.Context) error {
	return s.etcd.Server.Process(ctx, CampaignMessage(s.ID(), s.Lead()))
}

// CampaignMessage has a member of raft campaign, where lead is the leader that it knows of.
//
// A member with a leader gets what a leader sends that hands its place over: the others vote
// although they have heard of their leader a moment ago. Its term is 0, that of local messages:
// whatever the term is, this one is about it. A member without a leader may be a candidate,
// which ignores that message. It gets what its own timer would send; those who follow a leader
// that they have heard of refuse it, and keep their term.
func CampaignMessage(id, lead uint64) *raftpb.Message {
	if lead != 0 {
		return &raftpb.Message{Type: raftpb.MsgTimeoutNow.Enum(), To: &id, From: &lead}
	}
	local := raft.LocalAppendThread // local messages come from local threads
	return &raftpb.Message{Type: raftpb.MsgHup.Enum(), To: &id, From: &local}
}

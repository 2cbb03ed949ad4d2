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
// A member with a leader gets MsgTimeoutNow, as from a leader that transfers its leadership: then
// the others vote although they have heard of their leader a moment ago. Term 0 marks a local
// message, which raft accepts in every term. A member without a leader may be a candidate, and
// candidates ignore MsgTimeoutNow. It gets MsgHup, which its own election timer would send;
// members that have heard of a leader refuse their votes, and keep their term.
func CampaignMessage(id, lead uint64) *raftpb.Message {
	if lead != 0 {
		return &raftpb.Message{Type: raftpb.MsgTimeoutNow.Enum(), To: &id, From: &lead}
	}
	local := raft.LocalAppendThread // local messages come from local threads
	return &raftpb.Message{Type: raftpb.MsgHup.Enum(), To: &id, From: &local}
}

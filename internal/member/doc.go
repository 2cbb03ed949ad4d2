// Package member is the gossip between the processes of a cluster: each storage
// node and each controller is a member, tells the others that it is alive, in which
// failure domain it is and how much it has free, and hears who does not answer.
//
//	p, err := member.Listen(ctx, "127.0.0.1:0", "")
//	l, err := p.Join(member.Config{Cluster: uuid, Secret: key, Self: self, Changed: changed, Seeds: seeds})
//	defer l.Close()
//
// # What it is for
//
// Suspicion, and nothing else. A member that a list calls silent is one that a
// controller looks at sooner than it would have: nothing is decided by gossip, and
// what it says may be late, doubled or wrong. So its timing is that of a pulse:
// short, because a false alarm costs one probe.
//
// # Who may take part
//
// Packets are encrypted and authenticated (AES-256-GCM) under a key that only
// controllers and storage nodes can make: HKDF of the cluster's ticket key, which
// nodes learn when they register, and of the cluster's token where there is one.
// Clients know the token and not the ticket key. Every packet carries the cluster's
// uuid, so that two clusters never merge. Members whose words about themselves
// cannot be read, or are too long, are not taken in.
//
// # Names
//
// A member is one life of a process: its name carries a random number. A process
// that starts again is another member, and the news of the death of the former one
// cannot hurt it.
package member

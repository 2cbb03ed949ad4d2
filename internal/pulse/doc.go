// Package pulse detects which processes of a cluster do not answer. Each storage node
// exchanges small UDP datagrams with each controller, and the controllers with each other:
// one in each direction in two ticks of 40 ms, or in each tick while a member is late.
//
//	p, err := pulse.Listen(ctx, "127.0.0.1:0", "")
//	l, err := p.Join(pulse.Config{Cluster: uuid, Secret: key, Self: self, Changed: changed, Seeds: seeds})
//	defer l.Close()
//
// # What it is for
//
// Suspicion, and nothing else. A member that is called silent is one that a controller
// probes sooner than it would have; nothing is decided here. So the intervals are short,
// because a false alarm costs one probe.
//
// # Ages
//
// A datagram carries its sender's tick as a sequence number, and acknowledges the newest one of
// its receiver. The age of a member is the number of ticks since it last acknowledged a newer
// one: it grows when either direction is lost. A member is late at an age of 2, suspect at 3 and
// silent at 4. Ages count ticks that this process has executed, not time: a process that was
// suspended finds no member silent when it continues.
//
// Members ask each other about those that are late. A suspect that a third member has just heard is
// not silent: the link between two is lost, and not the process.
//
// # Datagrams
//
// Datagrams are encrypted and authenticated (AES-256-GCM). The key of a sender's incarnation is made by
// HKDF of the cluster's ticket key, which nodes learn when they register and clients never, and of
// the incarnation.
// The nonce is the sequence number and the number of the receiver. Each incarnation of a process
// has a random number; another one is another member. A replayed datagram is recognized by a
// window of 8 sequence numbers, and cannot make a member seem alive, because it
// acknowledges nothing new.
//
// # Wakes
//
// A timer wakes a process 12 times a second, 25 times while a member is late; datagrams do not. The socket is not registered with
// the poller of the Go runtime, and each tick reads it until it is empty.
package pulse

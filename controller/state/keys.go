package state

import (
	"crypto/hmac"
	"encoding/binary"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// KeysKey is the key of the record of the signing keys.
const KeysKey = "keys"

// RandomBytes is what New takes to make a cluster: its uuid, its signing key, and the secret
// of its pulse.
const RandomBytes = 16 + keyring.SeedBytes + pulseSecretBytes

const pulseSecretBytes = 32

// keys are the controllers' signing keys. Nodes have the public halves alone.
type keys struct {
	rec                     *quarrypb.SigningKeys // as staged
	current, next, previous *keyring.Signer       // nil: there is none
	look                    int64                 // no step of a rotation before
	given                   *Credentials          // of these keys; nil: not asked for since they changed
	renewed                 int64                 // when a session was given a ticket of current last, or may have been
}

// newKeys is the record of a cluster that has none.
func newKeys(random []byte) *quarrypb.SigningKeys {
	return &quarrypb.SigningKeys{
		Current:     &quarrypb.SigningKey{Seed: random[:keyring.SeedBytes:keyring.SeedBytes], FirstSerial: 1},
		PulseSecret: random[keyring.SeedBytes:],
	}
}

// DecodeKeys reads the record.
func DecodeKeys(b []byte) (*quarrypb.SigningKeys, error) {
	rec := &quarrypb.SigningKeys{}
	if err := proto.Unmarshal(b, rec); err != nil {
		return nil, err
	}
	for _, k := range []*quarrypb.SigningKey{rec.Current, rec.Next, rec.Previous} {
		if k != nil && len(k.Seed) != keyring.SeedBytes {
			return nil, errorf(Internal, "a signing key of %d bytes", len(k.Seed))
		}
	}
	if rec.Current == nil || len(rec.PulseSecret) != pulseSecretBytes {
		return nil, errorf(Internal, "no current signing key, or a pulse secret of %d bytes", len(rec.PulseSecret))
	}
	return rec, nil
}

// use makes the signers of a record.
func (k *keys) use(rec *quarrypb.SigningKeys) {
	k.rec, k.given = rec, nil
	k.current, k.next, k.previous = signerOf(rec.Current), signerOf(rec.Next), signerOf(rec.Previous)
}

// signerOf is a signing key of the records; nil: none.
func signerOf(k *quarrypb.SigningKey) *keyring.Signer {
	if k == nil {
		return nil
	}
	return keyring.NewSigner([keyring.SeedBytes]byte(k.Seed))
}

// change is the change to another record, which the machine uses at once.
func (k *keys) change(rec *quarrypb.SigningKeys) change {
	k.use(rec)
	return change{KeysKey, rec, nil}
}

// public are the halves that nodes verify with.
func (k *keys) public() (out [][]byte) {
	for _, s := range k.signers() {
		p := s.Public()
		out = append(out, p[:])
	}
	return out
}

// signers are those that nodes verify, at most keyring.MaxKeys.
func (k *keys) signers() []*keyring.Signer {
	return slices.DeleteFunc([]*keyring.Signer{k.current, k.next, k.previous}, func(s *keyring.Signer) bool { return s == nil })
}

// Credentials are what the keys are used for outside of the machine's turns: they sign
// commands to nodes and check the proofs of sessions. A rotation makes others; these do not change.
type Credentials struct {
	Signer      *keyring.Signer // of commands to nodes
	previous    *keyring.Signer // of the proofs of sessions before firstSerial; nil: there is none
	firstSerial uint64          // the first session whose ticket Signer has signed
	cluster     []byte          // the cluster's uuid
}

// Credentials are those of the keys that are current.
func (m *Machine) Credentials() *Credentials {
	k := &m.keys
	if k.given == nil {
		k.given = &Credentials{Signer: k.current, previous: k.previous, firstSerial: k.rec.Current.FirstSerial, cluster: m.cluster.Uuid}
	}
	return k.given
}

// issue signs a ticket of this cluster.
func (m *Machine) issue(t rdma.Ticket) *quarrypb.Ticket {
	t.Cluster = [16]byte(m.cluster.Uuid)
	m.cfg.Sign(&t, m.keys.current)
	return t.Proto()
}

// sessionLabel is what proofs of sessions are made under.
const sessionLabel = "quarry session"

// proof is the secret that a session's calls show. It is made again of the key that has signed
// the session's ticket, so that no record holds it.
func (c *Credentials) proof(serial uint64) []byte {
	if serial < c.firstSerial && c.previous != nil {
		return c.proofBy(c.previous, serial)
	}
	return c.proofBy(c.Signer, serial)
}

// proofBy is the proof of a session by one of the keys.
func (c *Credentials) proofBy(k *keyring.Signer, serial uint64) []byte {
	b := append(c.cluster[:len(c.cluster):len(c.cluster)], make([]byte, 8)...)
	binary.LittleEndian.PutUint64(b[len(c.cluster):], serial)
	return k.Proof(sessionLabel, b)
}

// Holds refuses a call in the name of a session unless it shows the session's proof. While the
// previous key is valid, a session that was opened under it may show the proof of either key.
func (c *Credentials) Holds(serial uint64, proof []byte) *Error {
	if !hmac.Equal(c.proof(serial), proof) && !hmac.Equal(c.proofBy(c.Signer, serial), proof) {
		return errorf(Denied, "the call does not show the proof that the session with serial %d was given when it was opened", serial)
	}
	return nil
}

// callOf is the live session in whose name a call is made.
func (m *Machine) callOf(serial uint64, proof []byte) (*session, *Error) {
	s, err := m.liveSession(serial)
	if err == nil {
		err = m.Credentials().Holds(serial, proof)
	}
	return s, err
}

// programSerial is the first serial in tickets for programs of nodes that have no session. It is
// above all serials that controllers give.
const programSerial = uint64(1) << 63

// reconcileTicket lets the primary's node open the replicas of a region in the epoch of a
// reconcile, which no client asks for, because no table shows it OPEN. It is good for that region
// and epoch alone.
func (m *Machine) reconcileTicket(g *region) *quarrypb.Ticket {
	n := m.node(g.rec.Replicas[0].Node)
	if len(n.rec.Key) != len(keyring.Public{}) {
		return nil // of an earlier version: it cannot be called either
	}
	return m.issue(rdma.Ticket{Serial: programSerial | uint64(g.rec.Id), Tenant: g.rec.Tenant, Rights: rdma.ReadWrite,
		Region: g.rec.Id, Epoch: g.rec.Epoch, Holder: keyring.Public(n.rec.Key)})
}

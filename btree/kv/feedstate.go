package kv

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/contexts"
	"github.com/quarrystore/quarry/proto"
)

// The state of a feed is a tree. It has an entry under each key that the receiver may have:
//
//	 0  1  format, 1
//	 1 16  root of the followed tree; zero: no entry, of the head's key alone
//	17  8  version of the key that was delivered; 0: the receiver may have any version, or none
//	25  8  position of that event
//
// The head stands behind the entry of the key "\x00", because a tree may have every key that a state can have:
//
//	33  8  position up to which the receiver has acknowledged
//	41  8  position up to which events may have been delivered
//	49 16  at most feedVoids times: positions that Feeds which have ended had, and that were not acknowledged: those behind the
//	       first one, up to the second one
//
// Numbers are little-endian.
const (
	feedFormat     = 1
	feedEntryBytes = 1 + proto.RefBytes + 8 + 8
	feedHeadBytes  = 16
	feedVoidBytes  = 16
	// feedVoids is how many spans of positions a head has: of the last Feeds that have ended. A write of an earlier one that was under way when it
	// ended has been settled by scrubs since.
	feedVoids = 8
)

var feedHeadKey = []byte{0}

// feedEntry is an entry of a state.
type feedEntry struct {
	root     btree.Ref
	version  uint64
	position uint64
}

// feedHead is the head of a state.
type feedHead struct {
	acked, reserved uint64
	void            []feedSpan // disjoint, in order
}

// feedSpan are the positions behind one, up to another one.
type feedSpan struct{ behind, to uint64 }

// unsure says whether the event with a position was not acknowledged. One of a Feed that has ended never is: its entry may come to
// light behind later acknowledgements, if the session ended in the middle of the write and a failover completes it.
func (h *feedHead) unsure(position uint64) bool {
	return position > h.acked || slices.ContainsFunc(h.void, func(s feedSpan) bool { return position > s.behind && position <= s.to })
}

// end notes that no position up to reserved is acknowledged any more that was not.
func (h *feedHead) end() {
	for len(h.void) > 0 && h.void[len(h.void)-1].behind >= h.acked {
		h.void = h.void[:len(h.void)-1] // part of the next one
	}
	if h.reserved > h.acked {
		h.void = append(h.void, feedSpan{h.acked, h.reserved})
	}
	h.void = h.void[max(0, len(h.void)-feedVoids):]
}

func (e feedEntry) append(b []byte) []byte {
	b, _ = e.root.AppendBinary(append(b, feedFormat))
	b = binary.LittleEndian.AppendUint64(b, e.version)
	return binary.LittleEndian.AppendUint64(b, e.position)
}

func (h feedHead) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, h.acked)
	b = binary.LittleEndian.AppendUint64(b, h.reserved)
	for _, s := range h.void {
		b = binary.LittleEndian.AppendUint64(b, s.behind)
		b = binary.LittleEndian.AppendUint64(b, s.to)
	}
	return b
}

// decodeFeed checks the value of a key, and returns its entry.
func decodeFeed(key, b []byte) (e feedEntry, err error) {
	ok := len(b) == feedEntryBytes
	if slices.Equal(key, feedHeadKey) {
		voids := len(b) - feedEntryBytes - feedHeadBytes
		ok = voids >= 0 && voids%feedVoidBytes == 0 && voids <= feedVoids*feedVoidBytes
	}
	if !ok || b[0] != feedFormat {
		return e, fmt.Errorf("%w: key %q has %d bytes that are no entry of format %d", ErrNotState, key, len(b), feedFormat)
	}
	e.root = proto.DecodeRef(b[1:])
	e.version = binary.LittleEndian.Uint64(b[1+proto.RefBytes:])
	e.position = binary.LittleEndian.Uint64(b[9+proto.RefBytes:])
	return e, nil
}

// decodeHead returns the head behind an entry that decodeFeed has checked.
func decodeHead(b []byte) feedHead {
	b = b[feedEntryBytes:]
	h := feedHead{acked: binary.LittleEndian.Uint64(b), reserved: binary.LittleEndian.Uint64(b[8:])}
	for b = b[feedHeadBytes:]; len(b) > 0; b = b[feedVoidBytes:] {
		h.void = append(h.void, feedSpan{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])})
	}
	return h
}

// feedNote is the note of a state's name with its owner.
const feedNote = "feed"

// feedOwner is the Feed that has a state; without a session none has.
type feedOwner struct {
	Tree    string         `json:"tree"` // whose keys the state has
	Session client.Session `json:"session"`
	Token   string         `json:"token"` // of the call, for sessions that try twice
}

// feedClaim is the ownership of a state by the session of a Client.
//
// Invariant: all writes of a Feed are bound to the session that the note names, and another session takes its place only when that
// one is fenced. So no write of a former owner reaches the state.
type feedClaim struct {
	state *Tree
	bound context.Context
	end   func()
	me    feedOwner
}

// liveClaims has the tokens of the claims of this process that have not ended. A session is of one process, so a claim of the same
// session that is not here has ended, and nothing writes under it.
var liveClaims sync.Map

// claimState makes the Client's session the owner of a state of a tree.
func claimState(ctx context.Context, state *Tree, of string) (*feedClaim, error) {
	k := &feedClaim{state: state, me: feedOwner{Tree: of, Token: strconv.FormatUint(rand.Uint64(), 36)}}
	// The caller's context bounds Follow, not the use of the Feed.
	long, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	k.end = func() { cancel(client.ErrClosed); liveClaims.Delete(k.me.Token) }
	stop := context.AfterFunc(ctx, k.end)
	var err error
	k.bound, k.me.Session, err = state.c.Bind(long)
	if !stop() {
		err = ctx.Err()
	}
	if err != nil {
		k.end()
		return nil, err
	}
	liveClaims.Store(k.me.Token, nil)
	tctx, tcancel := k.within(ctx)
	defer tcancel()
	if err = k.change(tctx, k.take); err != nil {
		// The change may have been made.
		return nil, errors.Join(k.because(err), k.release())
	}
	return k, nil
}

// take returns the next owner in the place of the present one, or why there is none.
func (k *feedClaim) take(ctx context.Context, now feedOwner) (feedOwner, error) {
	switch has := now.Session; {
	case now.Tree != "" && now.Tree != k.me.Tree:
		return now, fmt.Errorf("%w of tree %q: %v is that of tree %q; name another one, or drop it", ErrNotState, k.me.Tree, k.state, now.Tree)
	case now == k.me || has.Serial == 0:
		return k.me, nil
	case has.Serial == k.me.Session.Serial:
		if _, live := liveClaims.Load(now.Token); !live {
			return k.me, nil // its release has failed
		}
		return now, fmt.Errorf("%w: %v, by this client; Close that Feed first", ErrFeedOpen, k.state)
	case has.Number == k.me.Session.Number && has.Serial < k.me.Session.Serial:
		return k.me, nil // a number is given to a later session only when the former one is fenced
	}
	fenced, err := k.state.c.Fenced(ctx, now.Session)
	if err == nil && !fenced {
		err = fmt.Errorf("%w: %v, by session %d, until it is closed or fenced", ErrFeedOpen, k.state, now.Session.Number)
	}
	return k.me, err
}

// change makes another session the owner, in one change of the name's entry.
func (k *feedClaim) change(ctx context.Context, next func(context.Context, feedOwner) (feedOwner, error)) error {
	for t := (tries{}); ; {
		e, err := lookup(ctx, k.state.c, k.state.name.Name)
		if err != nil {
			return err
		}
		if e.Ref != k.state.Root() {
			return fmt.Errorf("%w: %v was replaced", btree.ErrNoTree, k.state)
		}
		var now feedOwner
		if note := e.Notes[feedNote]; note != "" {
			if err := json.Unmarshal([]byte(note), &now); err != nil {
				return fmt.Errorf("%v: its note %q is damaged: %w", k.state, feedNote, err)
			}
		}
		owner, err := next(ctx, now)
		if err != nil || owner == now {
			return err
		}
		b, err := json.Marshal(owner)
		if err != nil {
			return err
		}
		if e.Notes = maps.Clone(e.Notes); e.Notes == nil {
			e.Notes = map[string]string{}
		}
		e.Notes[feedNote] = string(b)
		if _, err = k.state.c.Names().Change(ctx, e); err == nil || !t.again(ctx, err) {
			return err
		}
	}
}

// releaseTime bounds a release.
const releaseTime = 10 * time.Second

// release gives the state up, if the claim has it, and ends the claim.
func (k *feedClaim) release() error {
	defer k.end()
	if k.bound.Err() != nil {
		return nil // the session is over, and so is the claim
	}
	ctx, cancel := context.WithTimeout(k.bound, releaseTime)
	defer cancel()
	err := k.change(ctx, func(_ context.Context, now feedOwner) (feedOwner, error) {
		if now == k.me {
			now = feedOwner{Tree: k.me.Tree}
		}
		return now, nil
	})
	if errors.Is(err, client.ErrNoName) || errors.Is(err, btree.ErrNoTree) {
		return nil
	}
	return k.because(err)
}

// within is ctx for calls that change memory under the claim's session alone.
func (k *feedClaim) within(ctx context.Context) (context.Context, context.CancelFunc) {
	return contexts.Both(k.bound, ctx)
}

// because names the reason for which a context of within has ended.
func (k *feedClaim) because(err error) error {
	if err != nil && k.bound.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(k.bound), err)
	}
	return err
}

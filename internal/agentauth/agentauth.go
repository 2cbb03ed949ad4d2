package agentauth

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Node is the node that a call is for.
type Node struct {
	Cluster [16]byte
	Number  uint32
}

var (
	errNoKey     = errors.New("agent: not registered with a controller yet; it obeys no command until then")
	errSignature = errors.New("agent: the call is not signed for this node by a controller of its cluster; only they may command it")
)

const callLabel = "quarry agent call 3"

// signed is what a signature covers. A missing incarnation counts as 0.
func signed(to Node, r *http.Request, digest []byte) ([]byte, error) {
	var incarnation uint64
	if h := r.Header.Get(quarrypb.IncarnationHeader); h != "" {
		var err error
		if incarnation, err = strconv.ParseUint(h, 10, 64); err != nil {
			return nil, fmt.Errorf("header %s: %w", quarrypb.IncarnationHeader, err)
		}
	}
	b := append([]byte(nil), to.Cluster[:]...)
	b = binary.LittleEndian.AppendUint32(b, to.Number)
	b = binary.LittleEndian.AppendUint64(b, incarnation)
	// How the bytes are read is part of what they say.
	what := sha256.Sum256([]byte(strings.Join([]string{r.Method, r.URL.Path, r.URL.RawQuery, r.Header.Get("Content-Type"), r.Header.Get("Content-Encoding")}, "\n")))
	return append(append(b, what[:]...), digest...), nil
}

// Client signs the calls that go over an HTTP client to a node.
func Client(over connect.HTTPClient, key *keyring.Signer, to Node) connect.HTTPClient {
	return &client{over, key, to}
}

type client struct {
	over connect.HTTPClient
	key  *keyring.Signer
	to   Node
}

func (c *client) Do(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		var err error
		body, err = io.ReadAll(r.Body)
		if err = errors.Join(err, r.Body.Close()); err != nil {
			return nil, err
		}
	}
	digest := sha256.Sum256(body)
	message, err := signed(c.to, r, digest[:])
	if err != nil {
		return nil, err
	}
	s := c.key.Sign(callLabel, message)
	r = r.Clone(r.Context())
	r.Header.Set(quarrypb.SignatureHeader, fmt.Sprintf("%016x %x %s", c.key.ID(), digest, base64.StdEncoding.EncodeToString(s[:])))
	r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	r.Body, _ = r.GetBody()
	r.ContentLength = int64(len(body))
	return c.over.Do(r)
}

// header is what SignatureHeader says.
type header struct {
	key       uint64
	digest    [sha256.Size]byte
	signature keyring.Signature
}

func parse(r *http.Request) (h header, ok bool) {
	words := strings.Split(r.Header.Get(quarrypb.SignatureHeader), " ")
	if len(words) != 3 {
		return h, false
	}
	var err error
	h.key, err = strconv.ParseUint(words[0], 16, 64)
	digest, digestErr := hex.DecodeString(words[1])
	signature, signatureErr := base64.StdEncoding.DecodeString(words[2])
	if err != nil || digestErr != nil || signatureErr != nil || len(digest) != len(h.digest) || len(signature) != len(h.signature) {
		return h, false
	}
	h.digest, h.signature = [sha256.Size]byte(digest), keyring.Signature(signature)
	return h, true
}

// Allow refuses calls that no controller has signed for this node. self is asked at every
// call; it answers false while the node is not registered. It is for httpserver.Gate, which
// asks before the body is read, and has Body compare it.
func Allow(keys *keyring.Ring, self func() (Node, bool)) func(*http.Request) error {
	return func(r *http.Request) error {
		to, ok := self()
		if !ok {
			return connect.NewError(connect.CodeUnavailable, errNoKey)
		}
		h, ok := parse(r)
		if !ok {
			return connect.NewError(connect.CodeUnauthenticated, errSignature)
		}
		message, err := signed(to, r, h.digest[:])
		if err != nil || !keys.Verify(h.key, callLabel, message, h.signature) {
			return connect.NewError(connect.CodeUnauthenticated, errSignature)
		}
		return nil
	}
}

// Body refuses a body that is not the one whose digest was signed.
// Preconditions: Allow has allowed the request.
func Body(r *http.Request, body []byte) error {
	if h, ok := parse(r); !ok || h.digest != sha256.Sum256(body) {
		return connect.NewError(connect.CodeUnauthenticated, errSignature)
	}
	return nil
}

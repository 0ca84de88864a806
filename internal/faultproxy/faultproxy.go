// Package faultproxy is a TCP proxy that speaks the PostgreSQL protocol and stands between a client and its server, to
// bring about for tests what a database on one machine never shows: a CockroachDB that wants a transaction restarted, a
// COMMIT whose outcome is unknown, a connection lost at the worst moment, a gateway whose clock is off.
//
// A Fault is armed for one point of one transaction, the next that reaches it: before its n-th statement, or at COMMIT.
// Hold stops a transaction at such a point until the test lets it go. Watch shows a test all transactions with their
// statements, and cuts a client off where the test says so: a process that is killed there has got exactly as far. All
// know what pgx sends: BEGIN, COMMIT and ROLLBACK as simple queries, each alone in flight, and statements as
// extended-protocol messages, perhaps many in a pipeline. Everything else passes unchanged; nothing is made up that a
// server could not have sent:
//
//   - An error of the n-th statement is one that the server itself raised (it is asked for a portal that does not exist),
//     with another code: the transaction is aborted on the server, the rest of the pipeline skipped.
//   - A COMMIT that failed was a ROLLBACK on the server, one that succeeded a COMMIT.
//
// Not promised: TLS, replication, COPY.
package faultproxy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
)

// Points of a transaction besides its statements, which are 1, 2, …
const (
	Commit = 0  // its COMMIT
	Single = -1 // a statement outside of any transaction
)

// Kind is what goes wrong.
type Kind int

// The kinds.
const (
	// Restart answers 40001 and aborts: before the statement, or instead of COMMIT.
	Restart Kind = iota + 1
	// UnknownApplied commits, and answers 40003.
	UnknownApplied
	// UnknownDropped rolls back, and answers 40003.
	UnknownDropped
	// CutBefore closes both connections instead of forwarding.
	CutBefore
	// CutDuring forwards, lets the server do it, and closes instead of answering.
	CutDuring
	// CutAfter closes right behind the answer.
	CutAfter
	// Late closes the client's connection at once, and forwards COMMIT only when another transaction has sent its first
	// statement: the old commit is in flight while the client tries again.
	Late
	// Stall forwards COMMIT only when the client has given up waiting for its answer.
	Stall
	// Delay waits for Fault.Delay, then forwards.
	Delay
)

var names = map[Kind]string{
	Restart: "40001", UnknownApplied: "40003 applied", UnknownDropped: "40003 not applied", CutBefore: "cut before",
	CutDuring: "cut during", CutAfter: "cut after", Late: "late", Stall: "stalled", Delay: "delayed",
}

func (k Kind) String() string { return names[k] }

// Fault is one thing that goes wrong, once.
type Fault struct {
	Kind  Kind
	At    int           // Commit, Single, or a statement from 1
	Delay time.Duration // of kind Delay
}

func (f Fault) String() string {
	switch f.At {
	case Commit:
		return f.Kind.String() + " at COMMIT"
	case Single:
		return f.Kind.String() + " at a single statement"
	default:
		return fmt.Sprintf("%s at statement %d", f.Kind, f.At)
	}
}

// Moment is a place in a transaction that a watcher sees.
type Moment int

// The moments.
const (
	// BeforeStatement: the last statement is about to be sent on. Those before it were sent on, answered or not.
	BeforeStatement Moment = iota + 1
	// BeforeCommit: COMMIT is about to be sent on.
	BeforeCommit
	// AfterCommit: the server has committed, and its answer is about to be sent on.
	AfterCommit
)

// Statement is one that a client has executed.
type Statement struct {
	SQL  string
	Args [][]byte // as they were bound; nil is NULL
}

// Watcher sees a transaction at a moment, with its statements so far, which it must not change; a statement outside of
// any transaction is alone. Where it returns false, its client is cut off: what the moment is before is never sent on.
// It is called from many goroutines, and holds up only the connection in question.
type Watcher func(at Moment, tx []Statement) bool

// Gate is a point where a transaction waits.
type Gate struct {
	reached, open chan struct{}
	once          sync.Once
}

// Reached is closed when a transaction waits at the gate.
func (g *Gate) Reached() <-chan struct{} { return g.reached }

// Release lets it go on.
func (g *Gate) Release() { g.once.Do(func() { close(g.open) }) }

// Stats is what a proxy has seen.
type Stats struct {
	Commits    int // COMMITs that the server confirmed to the client
	Statements int // outside of transactions too; not BEGIN, COMMIT, ROLLBACK
	Last       int // statements of the last transaction that sent COMMIT
}

// rule is an armed fault or gate.
type rule struct {
	fault Fault
	gate  *Gate
	after bool // the gate is behind the answer of COMMIT
}

// Proxy is a proxy for one server.
type Proxy struct {
	listener net.Listener
	upstream string
	url      url.URL
	skew     time.Duration
	watcher  Watcher // nil: nobody watches

	mu     sync.Mutex // guards all below
	rules  []*rule
	fired  int
	stats  Stats
	late   []chan struct{} // held COMMITs that wait for another transaction
	gates  []*Gate
	conns  map[net.Conn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// New starts a proxy on a free port of 127.0.0.1 for the server of a database URL. With skew, what the server calls
// statement_timestamp() is off by it for the prepared statements of whoever connects through this proxy.
func New(databaseURL string, skew time.Duration) (*Proxy, error) {
	u, err := url.Parse(databaseURL)
	if err != nil {
		return nil, fmt.Errorf("faultproxy: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("faultproxy: %w", err)
	}
	p := &Proxy{listener: l, upstream: u.Host, url: *u, skew: skew, conns: map[net.Conn]struct{}{}}
	p.url.Host = l.Addr().String()
	p.wg.Go(p.serve)
	return p, nil
}

// URL is the database's URL through the proxy.
func (p *Proxy) URL() string { return p.url.String() }

// Close cuts all connections and waits for all that the proxy started.
func (p *Proxy) Close() {
	_ = p.listener.Close() // it can only say that it was closed before
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		_ = c.Close() // of a connection that is of no more use
	}
	for _, g := range p.gates {
		g.Release()
	}
	p.releaseLate()
	p.mu.Unlock()
	p.wg.Wait()
}

// Arm lets a fault happen to the next transaction that reaches its point.
func (p *Proxy) Arm(f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, &rule{fault: f})
}

// Hold stops the next transaction that reaches a point, before it is sent on.
func (p *Proxy) Hold(at int) *Gate { return p.hold(at, false) }

// HoldCommitted stops the next transaction that commits, between the server's answer and the client.
func (p *Proxy) HoldCommitted() *Gate { return p.hold(Commit, true) }

func (p *Proxy) hold(at int, after bool) *Gate {
	g := &Gate{reached: make(chan struct{}), open: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gates = append(p.gates, g)
	p.rules = append(p.rules, &rule{fault: Fault{At: at}, gate: g, after: after})
	return g
}

// Watch has a watcher see whatever goes through the proxy. It is called before the first client connects.
func (p *Proxy) Watch(w Watcher) {
	p.mu.Lock() // which each connection takes before it looks
	defer p.mu.Unlock()
	p.watcher = w
}

// Disarm forgets what has not happened, and tells how many faults did since the last call.
func (p *Proxy) Disarm() (fired int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fired, p.fired, p.rules = p.fired, 0, nil
	return fired
}

// Stats tells what the proxy has seen so far.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

// take consumes the oldest rule for a point.
func (p *Proxy) take(at int) *rule {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, r := range p.rules {
		if r.fault.At == at {
			p.rules = append(p.rules[:i:i], p.rules[i+1:]...)
			if r.gate == nil {
				p.fired++
			}
			return r
		}
	}
	return nil
}

// releaseLate lets held COMMITs go. The caller holds the lock.
func (p *Proxy) releaseLate() {
	for _, c := range p.late {
		close(c)
	}
	p.late = nil
}

func (p *Proxy) serve() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		if p.track(c) {
			p.wg.Go(func() { p.connection(c) })
		}
	}
}

// track registers a connection for Close; it reports false, and closes it, where Close was first.
func (p *Proxy) track(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *Proxy) untrack(c net.Conn) {
	_ = c.Close() // it may be cut already
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// Codes of a first message that is no start-up.
const (
	codeCancel = 80877102
	codeSSL    = 80877103
	codeGSS    = 80877104
)

// connection serves one client.
func (p *Proxy) connection(client net.Conn) {
	defer p.untrack(client)
	in := bufio.NewReader(client)
	var first []byte
	for {
		var head [8]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return
		}
		rest := make([]byte, max(0, int(binary.BigEndian.Uint32(head[:4]))-8))
		if _, err := io.ReadFull(in, rest); err != nil {
			return
		}
		first = append(head[:], rest...)
		code := binary.BigEndian.Uint32(head[4:])
		if code != codeSSL && code != codeGSS {
			break
		}
		if _, err := client.Write([]byte{'N'}); err != nil {
			return
		}
	}
	server, err := net.Dial("tcp", p.upstream)
	if err != nil {
		return
	}
	if !p.track(server) {
		return
	}
	defer p.untrack(server)
	if _, err := server.Write(first); err != nil {
		return
	}
	if binary.BigEndian.Uint32(first[4:]) == codeCancel {
		_, _ = io.Copy(io.Discard, server) // the server closes when it has heard
		return
	}
	c := &conn{
		p: p, client: client, server: server, in: in, served: make(chan struct{}),
		prepared: map[string]string{}, portals: map[string]Statement{},
	}
	p.wg.Go(func() {
		defer close(c.served)
		c.fromServer()
	})
	c.fromClient()
	<-c.served
}

// conn is one client's connection and its connection to the server.
type conn struct {
	p              *Proxy
	client, server net.Conn
	in             *bufio.Reader
	served         chan struct{} // closed when nothing comes from the server any more

	// Of fromClient alone.
	inTx       bool
	statements int
	prepared   map[string]string    // SQL by the statement's name
	portals    map[string]Statement // by name
	tx         []Statement          // for the watcher

	mu    sync.Mutex // guards reply
	reply reply
}

// reply is what happens to what the server answers next.
type reply struct {
	instead *pgproto3.ErrorResponse // of an error, or of COMMIT's completion
	commit  bool                    // a COMMIT is in flight
	tx      []Statement             // that it commits, where somebody watches
	gate    *Gate                   // before its answer
	mute    bool                    // nothing more is passed on
	cut     bool                    // close when the server is ready for the next
}

func (c *conn) set(r reply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reply = r
}

// close cuts both sides.
func (c *conn) close() {
	_ = c.client.Close()
	_ = c.server.Close()
}

// frame reads one message with its type.
func frame(r *bufio.Reader) (typ byte, raw []byte, err error) {
	head, err := r.Peek(5)
	if err != nil {
		return 0, nil, err
	}
	raw = make([]byte, 1+int(binary.BigEndian.Uint32(head[1:])))
	if len(raw) < 5 {
		return 0, nil, errors.New("message is shorter than its head")
	}
	_, err = io.ReadFull(r, raw)
	return raw[0], raw, err
}

func encode(m interface{ Encode([]byte) ([]byte, error) }) []byte {
	raw, err := m.Encode(nil)
	if err != nil {
		panic(fmt.Sprintf("faultproxy: %T does not encode: %v", m, err)) // ours, and small
	}
	return raw
}

// fromClient passes on what the client sends until one side is gone.
func (c *conn) fromClient() {
	defer c.close()
	out := bufio.NewWriter(c.server)
	for {
		typ, raw, err := frame(c.in)
		if err != nil {
			return
		}
		forward := true
		switch typ {
		case 'Q':
			raw, forward = c.query(raw)
		case 'P':
			raw = c.parse(raw)
		case 'B':
			c.bind(raw)
		case 'E':
			if err := out.Flush(); err != nil { // what came before a gate must not wait at it
				return
			}
			raw, forward = c.statement(raw, c.executed(raw), &pgproto3.Execute{Portal: "faultproxy"})
		}
		if !forward {
			return
		}
		_, _ = out.Write(raw) // Flush answers its error too
		if c.in.Buffered() > 0 {
			continue
		}
		if err := out.Flush(); err != nil {
			return
		}
		if typ == 'S' && c.inTx && c.statements > 0 {
			c.p.mu.Lock()
			c.p.releaseLate()
			c.p.mu.Unlock()
		}
	}
}

// query handles a simple query. It returns what to forward, or that the connection is over.
func (c *conn) query(raw []byte) ([]byte, bool) {
	sql := strings.ToLower(strings.Trim(string(raw[5:]), " \x00"))
	switch {
	case strings.HasPrefix(sql, "begin"):
		c.inTx, c.statements, c.tx = true, 0, nil
	case strings.HasPrefix(sql, "rollback"):
		c.inTx = false
	case strings.HasPrefix(sql, "commit"):
		c.inTx = false
		return c.commit(raw)
	case strings.HasPrefix(sql, "--"): // pgx's ping
	default:
		return c.statement(raw, Statement{SQL: strings.Trim(string(raw[5:]), "\x00")}, &pgproto3.Query{String: "SELECT faultproxy"})
	}
	return raw, true
}

// parse applies the skew, and for a watcher notes what the statement's name stands for.
func (c *conn) parse(raw []byte) []byte {
	var m pgproto3.Parse
	if c.p.skew == 0 && c.p.watcher == nil || m.Decode(raw[5:]) != nil {
		return raw
	}
	c.prepared[m.Name] = m.Query
	if c.p.skew == 0 {
		return raw
	}
	const now = "statement_timestamp()"
	m.Query = strings.ReplaceAll(m.Query, now, fmt.Sprintf("(%s + %d * INTERVAL '1 microsecond')", now, c.p.skew.Microseconds()))
	return encode(&m)
}

// bind notes for a watcher what a portal executes.
func (c *conn) bind(raw []byte) {
	var m pgproto3.Bind
	if c.p.watcher == nil || m.Decode(raw[5:]) != nil {
		return
	}
	c.portals[m.DestinationPortal] = Statement{SQL: c.prepared[m.PreparedStatement], Args: m.Parameters}
}

// executed is the statement of an Execute.
func (c *conn) executed(raw []byte) Statement {
	var m pgproto3.Execute
	if c.p.watcher == nil || m.Decode(raw[5:]) != nil {
		return Statement{}
	}
	return c.portals[m.Portal]
}

// watched asks the watcher, if there is one, whether it goes on.
func (c *conn) watched(at Moment, tx []Statement) bool {
	return c.p.watcher == nil || c.p.watcher(at, tx)
}

// statement handles a statement; bad is one that the server refuses.
func (c *conn) statement(raw []byte, st Statement, bad interface {
	Encode(dst []byte) ([]byte, error)
},
) ([]byte, bool) {
	at := Single
	if c.inTx {
		c.statements++
		at = c.statements
	} else {
		c.tx = nil
	}
	if c.p.watcher != nil {
		c.tx = append(c.tx, st)
	}
	if !c.watched(BeforeStatement, c.tx) {
		return nil, false
	}
	c.p.mu.Lock()
	c.p.stats.Statements++
	c.p.mu.Unlock()
	r := c.p.take(at)
	if r == nil {
		return raw, true
	}
	if r.gate != nil {
		r.gate.wait()
		return raw, true
	}
	switch r.fault.Kind {
	case Restart:
		c.set(reply{instead: serverError("40001", "restart transaction: TransactionRetryWithProtoRefreshError")})
		return encode(bad), true
	case CutBefore:
		return nil, false
	case CutDuring:
		c.set(reply{mute: true, cut: true})
	case CutAfter:
		c.set(reply{cut: true})
	case Delay:
		time.Sleep(r.fault.Delay)
	default:
		panic("faultproxy: no such fault: " + r.fault.String())
	}
	return raw, true
}

// commit handles COMMIT.
func (c *conn) commit(raw []byte) ([]byte, bool) {
	c.p.mu.Lock()
	c.p.stats.Last = c.statements
	c.p.mu.Unlock()
	if !c.watched(BeforeCommit, c.tx) {
		return nil, false
	}
	r := c.p.take(Commit)
	rep := reply{commit: true, tx: c.tx}
	rollback := encode(&pgproto3.Query{String: "rollback"})
	unknown := serverError("40003", "result is ambiguous")
	switch {
	case r == nil:
	case r.gate != nil && r.after:
		rep.gate = r.gate
	case r.gate != nil:
		r.gate.wait()
	case r.fault.Kind == Restart:
		raw, rep.instead = rollback, serverError("40001", "restart transaction: TransactionRetryWithProtoRefreshError")
	case r.fault.Kind == UnknownApplied:
		rep.instead = unknown
	case r.fault.Kind == UnknownDropped:
		raw, rep.instead = rollback, unknown
	case r.fault.Kind == CutBefore:
		return nil, false
	case r.fault.Kind == CutDuring:
		rep.mute, rep.cut = true, true
	case r.fault.Kind == CutAfter:
		rep.cut = true
	case r.fault.Kind == Late:
		_ = c.client.Close()
		c.waitForAnother()
		rep.mute, rep.cut = true, true
	case r.fault.Kind == Stall:
		c.waitForGivenUp()
		rep.mute, rep.cut = true, true
	case r.fault.Kind == Delay:
		time.Sleep(r.fault.Delay)
	}
	c.set(rep)
	if !rep.mute || r.fault.Kind == CutDuring {
		return raw, true
	}
	// The client is gone: only the server's answer is waited for.
	if _, err := c.server.Write(raw); err == nil {
		<-c.served
	}
	return nil, false
}

// waitForAnother returns when another transaction has sent its first statement.
func (c *conn) waitForAnother() {
	proceed := make(chan struct{})
	c.p.mu.Lock()
	if c.p.closed {
		close(proceed)
	} else {
		c.p.late = append(c.p.late, proceed)
	}
	c.p.mu.Unlock()
	<-proceed
}

// waitForGivenUp returns when the client has closed its connection.
func (c *conn) waitForGivenUp() {
	for {
		typ, _, err := frame(c.in)
		if err != nil || typ == 'X' {
			return
		}
	}
}

func (g *Gate) wait() {
	close(g.reached)
	<-g.open
}

func serverError(code, message string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message}
}

// fromServer passes on what the server sends until one side is gone.
func (c *conn) fromServer() {
	defer c.close()
	in, out := bufio.NewReader(c.server), bufio.NewWriter(c.client)
	for {
		typ, raw, err := frame(in)
		if err != nil {
			return
		}
		c.mu.Lock()
		r := c.reply
		if typ == 'Z' {
			c.reply = reply{}
		}
		c.mu.Unlock()
		switch {
		case typ == 'E' && r.instead != nil && !r.commit, typ == 'C' && r.instead != nil && r.commit:
			raw = encode(r.instead)
		case typ == 'C' && r.commit:
			if !c.committed(r, raw) {
				return
			}
		}
		if !r.mute {
			_, _ = out.Write(raw) // Flush answers its error too
			if in.Buffered() == 0 {
				if err := out.Flush(); err != nil {
					return
				}
			}
		}
		if typ == 'Z' && r.cut {
			return
		}
	}
}

// committed handles the completion of a COMMIT that goes to the client as it is, or, where it reports false, does not.
func (c *conn) committed(r reply, raw []byte) bool {
	if r.gate != nil {
		r.gate.wait()
	}
	if !strings.HasPrefix(string(raw[5:]), "COMMIT") {
		return true
	}
	if !c.watched(AfterCommit, r.tx) {
		return false
	}
	if !r.mute {
		c.p.mu.Lock()
		c.p.stats.Commits++
		c.p.mu.Unlock()
	}
	return true
}

package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"reveille/claims"
)

// What follows looks at a server for reveille doctor. Nothing of it changes
// anything: no message is stored or taken, no stream or durable made or edited.

// Why a question got no answer.
var (
	// ErrDenied: the permissions of this connection's user forbid it.
	ErrDenied = errors.New("denied")
	// ErrNobody: the server knows nobody who would answer.
	ErrNobody = errors.New("nobody answers")
	// ErrNoAnswer: nothing was denied, and nothing came in time.
	ErrNoAnswer = errors.New("no answer")
	// ErrNoInbox: the user may not subscribe where its answers come, so that
	// nothing can be asked.
	ErrNoInbox = errors.New("no inbox")
)

// Inspection is what the server has of the streams and durables of a namespace.
type Inspection struct {
	Streams  []StreamFound  // in the order of Configs
	Durables []DurableFound // of the streams that are there
}

// StreamFound is one stream beside what Ensure would make.
type StreamFound struct {
	Want        jetstream.StreamConfig
	Info        *jetstream.StreamInfo // nil where Err says why
	Err         error                 // jetstream.ErrStreamNotFound, ErrDenied, ErrNobody, ErrNoAnswer, or what the server said
	Differences []Difference
	OwnID       bool // its id was made with it; else its creation time stands in (I18)
}

// DurableFound is one durable beside what Ensure would make.
type DurableFound struct {
	Stream      string
	Want        jetstream.ConsumerConfig
	Info        *jetstream.ConsumerInfo // nil where Err says why
	Err         error                   // jetstream.ErrConsumerNotFound, and those of a stream
	Differences []Difference            // but max_ack_pending: what is enough follows from the workers' slots
}

// Missing reports whether the server says that there is no such stream.
func (s StreamFound) Missing() bool { return errors.Is(s.Err, jetstream.ErrStreamNotFound) }

// stream is what was found of a stream, or nil.
func (in *Inspection) stream(name string) *StreamFound {
	for i := range in.Streams {
		if in.Streams[i].Want.Name == name {
			return &in.Streams[i]
		}
	}
	return nil
}

// Inspect looks at the streams and durables of the connection's namespace. ctx
// bounds it and needs a deadline. Errors: ErrNoInbox, or of the connection.
func (c *Conn) Inspect(ctx context.Context, o StreamOptions) (*Inspection, error) {
	o = o.withDefaults()
	a, err := c.newAsker(ctx)
	if err != nil {
		return nil, err
	}
	defer a.close()
	in := &Inspection{}
	var questions []*nats.Msg
	for _, cfg := range Configs(c.ns, o) {
		in.Streams = append(in.Streams, StreamFound{Want: cfg})
		questions = append(questions, nats.NewMsg(apiPrefix+"STREAM.INFO."+cfg.Name))
	}
	ids := &Streams{}
	for i, answer := range a.ask(ctx, questions) {
		s := &in.Streams[i]
		if s.Info, s.Err = decodeAnswer[jetstream.StreamInfo](answer); s.Err != nil {
			continue
		}
		s.Differences = differences(s.Info.Config, s.Want)
		var id string
		id, s.OwnID = streamID(s.Info)
		switch s.Want.Name {
		case c.ns.CommandStream():
			ids.CommandsID = id
		case c.ns.ReadyStream():
			ids.ReadyID = id
		}
	}
	c.inspectDurables(ctx, a, in, ids.consumers(c.ns, o))
	return in, nil
}

func (c *Conn) inspectDurables(ctx context.Context, a *asker, in *Inspection, want []consumerOf) {
	var questions []*nats.Msg
	for _, w := range want {
		if s := in.stream(w.stream); s == nil || s.Info == nil { // then its name is not known either
			continue
		}
		in.Durables = append(in.Durables, DurableFound{Stream: w.stream, Want: w.ConsumerConfig})
		questions = append(questions, nats.NewMsg(apiPrefix+"CONSUMER.INFO."+w.stream+"."+w.Durable))
	}
	for i, answer := range a.ask(ctx, questions) {
		d := &in.Durables[i]
		if d.Info, d.Err = decodeAnswer[jetstream.ConsumerInfo](answer); d.Err != nil {
			continue
		}
		as := d.Want
		as.MaxAckPending = d.Info.Config.MaxAckPending
		d.Differences = durableDifferences(d.Info.Config, as)
	}
}

// StreamTime is the clock of a stream's leader, which stamps its messages.
func (c *Conn) StreamTime(ctx context.Context, stream string) (time.Time, error) {
	info, err := streamInfo(ctx, c.js, stream)
	if err != nil {
		return time.Time{}, err
	}
	return info.TimeStamp, nil
}

// CheckServer is Ensure's check of the server's version: ErrServerTooOld.
func (c *Conn) CheckServer() error { return checkVersion(c.nc.ConnectedServerVersion()) }

// CheckJetStream asks whether this user's account has JetStream. ErrDenied says
// only that the user may not ask; ErrNobody that the server has none. Other
// errors are ErrNoInbox, ErrNoAnswer, of the connection, or what the server says.
func (c *Conn) CheckJetStream(ctx context.Context) error {
	a, err := c.newAsker(ctx)
	if err != nil {
		return err
	}
	defer a.close()
	_, err = decodeAnswer[jetstream.AccountInfo](a.ask(ctx, []*nats.Msg{nats.NewMsg(apiPrefix + "INFO")})[0])
	return err
}

// Role is a way to use NATS; deploy/nats has a user for each.
type Role string

// The roles.
const (
	RolePublisher Role = "publisher" // of commands
	RoleObserver  Role = "observer"  // of events and live text
	RoleWorker    Role = "worker"
	RoleScanner   Role = "scanner"
	RoleOperator  Role = "operator"
)

// Roles are all of them.
func Roles() []Role {
	return []Role{RolePublisher, RoleObserver, RoleWorker, RoleScanner, RoleOperator}
}

// Lack is something that roles need and this connection's user can't do.
type Lack struct {
	Need  string // as a permission would say it: publish rv.wake.*
	Roles []Role // who needs it
	Err   error  // ErrDenied, ErrNobody, ErrNoAnswer, or what the server said
}

// Permissions tries what roles need and returns what can't be done. It takes
// what Inspect found: what is missing is not missed again. ctx bounds it and
// needs a deadline. Not tried is CONSUMER.MSG.NEXT, since it would take a
// message. The server logs each try that it denies; who subscribes to a subject
// sees a message of the session reveille-doctor, which no stream stores. Errors
// are those of Inspect.
func (c *Conn) Permissions(ctx context.Context, roles []Role, in *Inspection) ([]Lack, error) {
	a, err := c.newAsker(ctx)
	if err != nil {
		return nil, err
	}
	defer a.close()
	needs := slices.DeleteFunc(c.needs(in), func(n need) bool {
		return !slices.ContainsFunc(n.roles, func(r Role) bool { return slices.Contains(roles, r) })
	})
	errs := make([]error, len(needs))
	var asked []int
	var questions []*nats.Msg
	for i, n := range needs {
		switch {
		case n.subscribe:
			errs[i] = a.subscribe(ctx, n.msg)
		case n.fine == nil:
			errs[i] = a.send(ctx, n.msg)
		default:
			asked, questions = append(asked, i), append(questions, n.msg)
		}
	}
	for k, answer := range a.ask(ctx, questions) {
		errs[asked[k]] = needs[asked[k]].judge(answer)
	}
	var lacks []Lack
	for i, err := range errs {
		if err != nil {
			lacks = append(lacks, Lack{needs[i].what, needs[i].roles, err})
		}
	}
	return lacks, nil
}

// probeSession is the session of what is tried. Nothing of it is ever stored.
const probeSession claims.SessionID = "reveille-doctor"

// probe is in place of a name, a body or a stream that is not there.
const probe = "reveille-doctor"

// need is one thing that roles do, and how to try it harmlessly.
type need struct {
	what      string
	roles     []Role
	msg       *nats.Msg
	subscribe bool // to msg's subject
	// fine are the errors that the answer has where it is allowed; without any,
	// no answer is expected, and only a denial says something.
	fine []jetstream.ErrorCode
	// excused: nobody answers, for a reason that was found elsewhere.
	excused bool
}

// Codes of the server's refusals that a try aims at.
const (
	errExpectedStream jetstream.ErrorCode = 10060 // the message expects another stream
	errOtherStream    jetstream.ErrorCode = 10056 // the request's subject and body name different streams
	// directStatus stands for the status in the header of a direct get's answer.
	directStatus = jetstream.JSErrCodeMessageNotFound
)

// judge says what an answer means: nil is allowed.
func (n need) judge(a answer) error {
	if a.err != nil {
		if n.excused && errors.Is(a.err, ErrNobody) {
			return nil
		}
		return a.err
	}
	if status := a.msg.Header.Get("Status"); status != "" {
		if status == "404" && slices.Contains(n.fine, directStatus) {
			return nil
		}
		return fmt.Errorf("status %s %s", status, a.msg.Header.Get("Description"))
	}
	var answered struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(a.msg.Data, &answered); err != nil {
		return fmt.Errorf("an answer that does not decode: %w", err)
	}
	if e := answered.Error; e != nil && !slices.Contains(n.fine, e.ErrorCode) {
		return e
	}
	return nil
}

// needs are all needs of all roles. subjects.md says who publishes what; the
// rest is what the parts of this package ask the server for.
func (c *Conn) needs(in *Inspection) []need {
	const pub, obs, wrk, scn, opr = RolePublisher, RoleObserver, RoleWorker, RoleScanner, RoleOperator
	ns, t := c.ns, tries{ns: c.ns, in: in}
	for _, kind := range []claims.CommandKind{claims.Admit, claims.Wake, claims.Interrupt} {
		t.store(ns.CommandStream(), func(s claims.SessionID) string { return ns.Command(kind, s) }, pub, opr)
	}
	t.store(ns.EventStream(), ns.Event, wrk, scn, opr)
	t.store(ns.QuarantineStream(), ns.Quarantine, wrk, scn, opr)
	t.store(ns.RejectedStream(), func(s claims.SessionID) string { return ns.Rejected(claims.CommandKind(s)) }, wrk)
	t.store(ns.ReadyStream(), ns.ReadySubject, wrk, scn)
	t.publish(ns.LiveSubject, wrk)
	notice := func(s claims.SessionID) string { return ns.Notice(claims.HolderID(s)) }
	t.publish(notice, wrk)
	t.listen(notice, wrk)
	t.listen(ns.LiveSubject, obs, opr)

	for _, s := range []string{ns.CommandStream(), ns.ReadyStream(), ns.EventStream(), ns.QuarantineStream(), ns.RejectedStream()} {
		roles := []Role{wrk, scn, opr}
		if s == ns.EventStream() || s == ns.QuarantineStream() {
			roles = append(roles, obs)
		}
		t.api(s, "STREAM.INFO", "", nil, nil, roles...)
		t.api(s, "STREAM.CREATE", "", map[string]any{"name": probe}, codes(errOtherStream), opr)
		t.api(s, "STREAM.UPDATE", "", map[string]any{"name": probe}, codes(errOtherStream), opr)
	}
	other := map[string]any{"stream_name": probe, "config": map[string]any{"name": probe}}
	for _, d := range t.durables() {
		t.api(d.Stream, "CONSUMER.INFO", d.Want.Durable, nil, codes(jetstream.JSErrCodeConsumerNotFound), wrk, scn, opr)
		t.api(d.Stream, "CONSUMER.CREATE", d.Want.Durable, other, codes(errOtherStream), opr)
		t.ack(d.Stream, d.Want.Durable, wrk)
	}
	last := func(subject string) any { return getRequest{LastBy: subject} }
	gone := codes(jetstream.JSErrCodeMessageNotFound)
	command, event := ns.Command(claims.Wake, probeSession), ns.Event(probeSession)
	t.api(ns.CommandStream(), "DIRECT.GET", "", last(command), gone, wrk)
	t.api(ns.CommandStream(), "STREAM.MSG.GET", "", last(command), gone, wrk)
	t.api(ns.EventStream(), "DIRECT.GET", "", last(event), gone, wrk, scn, opr)
	t.api(ns.EventStream(), "STREAM.MSG.GET", "", last(event), gone, wrk, scn, opr)
	// Of one subject that nobody has, up to before the first message.
	t.api(ns.ReadyStream(), "STREAM.PURGE", "", map[string]any{"filter": ns.ReadySubject(probeSession), "seq": 1}, nil, scn, opr)
	t.api(ns.EventStream(), "CONSUMER.CREATE", probe+"."+event, other, codes(errOtherStream), obs, opr)
	t.api(ns.EventStream(), "DIRECT.GET", event, nil, gone, obs, opr)
	t.api(ns.QuarantineStream(), "DIRECT.GET", ns.Quarantine(probeSession), nil, gone, obs, opr)
	return t.needs
}

func codes(c ...jetstream.ErrorCode) []jetstream.ErrorCode { return c }

// tries collects needs.
type tries struct {
	ns    Namespace
	in    *Inspection
	needs []need
}

// durables are those that were found, or where their stream could not be looked
// at, others of it: a permission that is not for one durable is for all.
func (t *tries) durables() []DurableFound {
	out := slices.Clone(t.in.Durables)
	for _, w := range (&Streams{CommandsID: probe, ReadyID: probe}).consumers(t.ns, StreamOptions{}) {
		if !slices.ContainsFunc(t.in.Durables, func(d DurableFound) bool { return d.Stream == w.stream }) {
			out = append(out, DurableFound{Stream: w.stream, Want: w.ConsumerConfig})
		}
	}
	return out
}

// store tries to publish into a stream, expecting another one: that is refused
// by the stream, and by nobody else, before anything is stored.
func (t *tries) store(stream string, subject func(claims.SessionID) string, roles ...Role) {
	m := nats.NewMsg(subject(probeSession))
	m.Header.Set(nats.ExpectedStreamHdr, probe)
	n := need{what: "publish " + subject("*"), roles: roles, msg: m, fine: codes(errExpectedStream)}
	if found := t.in.stream(stream); found != nil {
		n.excused = found.Missing() || slices.ContainsFunc(found.Differences, func(d Difference) bool { return d.Setting == "subjects" })
		if found.Info != nil && found.Info.Config.NoAck {
			n.fine = nil // it refuses without a word
		}
	}
	t.needs = append(t.needs, n)
}

// publish tries a subject that no stream has: to nobody, since no session and no
// holder has this name.
func (t *tries) publish(subject func(claims.SessionID) string, roles ...Role) {
	t.needs = append(t.needs, need{what: "publish " + subject("*"), roles: roles, msg: nats.NewMsg(subject(probeSession))})
}

func (t *tries) listen(subject func(claims.SessionID) string, roles ...Role) {
	t.needs = append(t.needs, need{what: "subscribe to " + subject("*"), roles: roles, msg: nats.NewMsg(subject(probeSession)), subscribe: true})
}

// api tries a request of the JetStream API that finds nothing, or contradicts
// itself and is refused for that.
func (t *tries) api(stream, verb, suffix string, body any, fine []jetstream.ErrorCode, roles ...Role) {
	subject := apiPrefix + verb + "." + stream
	what := subject
	if suffix != "" {
		subject += "." + suffix
		name, filter, found := strings.Cut(suffix, ".")
		switch {
		case !found: // the name of a durable
			what += ".*"
		case name == probe: // a consumer's, and its filter
			what += ".*." + strings.Replace(filter, probe, "*", 1)
		default: // a message's subject
			what += "." + strings.Replace(suffix, probe, "*", 1)
		}
	}
	m := nats.NewMsg(subject)
	if body != nil {
		m.Data, _ = json.Marshal(body) // maps and structs of strings
	}
	found := t.in.stream(stream)
	t.needs = append(t.needs, need{
		what: "publish " + what, roles: roles, msg: m, fine: append(fine, jetstream.JSErrCodeStreamNotFound),
		excused: verb == "DIRECT.GET" && found != nil && (found.Missing() || found.Info != nil && !found.Info.Config.AllowDirect),
	})
}

// ack tries to acknowledge: no message has sequence 0, and the body says nothing
// that a consumer knows. The tokens are as many as an acknowledgement has.
func (t *tries) ack(stream, durable string, roles ...Role) {
	m := nats.NewMsg("$JS.ACK." + stream + "." + durable + ".0.0.0.0.0")
	m.Data = []byte(probe)
	t.needs = append(t.needs, need{what: "publish $JS.ACK." + stream + "." + durable + ".>", roles: roles, msg: m})
}

// asker asks many questions at once, and hears of a denial at once: the server
// reports it before it answers the ping that follows.
type asker struct {
	nc      *nats.Conn
	inbox   string
	answers chan *nats.Msg
	sub     *nats.Subscription
	rounds  int
}

// answer is what came of one question.
type answer struct {
	msg *nats.Msg
	err error
}

// askerAnswers bounds the answers that wait to be read; of a cluster, a question
// may have one a server.
const askerAnswers = 1024

func (c *Conn) newAsker(ctx context.Context) (*asker, error) {
	a := &asker{nc: c.nc, inbox: c.nc.NewInbox(), answers: make(chan *nats.Msg, askerAnswers)}
	subject := a.inbox + ".*"
	var err error
	if a.sub, err = c.nc.ChanSubscribe(subject, a.answers); err != nil {
		return nil, fmt.Errorf("subscribing to the inbox: %w", err)
	}
	if err := a.flush(ctx, "Subscription", subject); err != nil {
		a.close()
		if errors.Is(err, ErrDenied) {
			err = fmt.Errorf("%w: subscribing to %s is %w", ErrNoInbox, subject, err)
		}
		return nil, err
	}
	return a, nil
}

func (a *asker) close() {
	_ = a.sub.Unsubscribe() // fails where the connection is gone, and the subscription with it
}

// flush waits until the server has taken what was sent. Errors: ErrDenied,
// ErrNoAnswer where the server is silent, or of the connection.
func (a *asker) flush(ctx context.Context, what, subject string) error {
	if err := a.nc.FlushWithContext(ctx); err != nil {
		if ctx.Err() != nil {
			return ErrNoAnswer
		}
		return err
	}
	// The last error may be of another subject, or of this one as it was asked before.
	err := a.nc.LastError()
	if errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), what+` to "`+subject+`"`) {
		return ErrDenied
	}
	return nil
}

func (a *asker) send(ctx context.Context, m *nats.Msg) error {
	if err := a.nc.PublishMsg(m); err != nil {
		return err
	}
	return a.flush(ctx, "Publish", m.Subject)
}

func (a *asker) subscribe(ctx context.Context, m *nats.Msg) error {
	sub, err := a.nc.ChanSubscribe(m.Subject, make(chan *nats.Msg, 1))
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // as in close
	return a.flush(ctx, "Subscription", m.Subject)
}

// ask sends all questions and waits for their answers until ctx ends.
func (a *asker) ask(ctx context.Context, questions []*nats.Msg) []answer {
	out := make([]answer, len(questions))
	open := map[string]int{}
	a.rounds++
	for i, q := range questions {
		q.Reply = a.inbox + "." + strconv.Itoa(a.rounds) + "-" + strconv.Itoa(i)
		if out[i].err = a.send(ctx, q); out[i].err == nil {
			open[q.Reply] = i
		}
	}
	for len(open) > 0 {
		select {
		case m := <-a.answers:
			i, ok := open[m.Subject]
			if !ok { // a second answer, or of a question that nobody waits for any more
				continue
			}
			delete(open, m.Subject)
			if m.Header.Get("Status") == "503" && len(m.Data) == 0 {
				out[i].err = ErrNobody
			} else {
				out[i].msg = m
			}
		case <-ctx.Done():
			for _, i := range open {
				out[i].err = ErrNoAnswer
			}
			return out
		}
	}
	return out
}

// decodeAnswer decodes an answer of the JetStream API, or returns its error.
func decodeAnswer[T any](a answer) (*T, error) {
	if a.err != nil {
		return nil, a.err
	}
	var failed struct {
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(a.msg.Data, &failed); err != nil {
		return nil, fmt.Errorf("an answer that does not decode: %w", err)
	}
	if failed.Error != nil {
		return nil, failed.Error
	}
	var v T
	if err := json.Unmarshal(a.msg.Data, &v); err != nil {
		return nil, fmt.Errorf("an answer that does not decode: %w", err)
	}
	return &v, nil
}

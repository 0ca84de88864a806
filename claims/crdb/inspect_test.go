package crdb_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

// shown is a database in which sessions of every state stand.
type shown struct {
	t      *testing.T
	store  *crdb.Store
	holder claims.HolderID
	seq    int64
}

func newShown(t *testing.T) *shown {
	t.Helper()
	url := dbtest.New(t)
	s, err := crdb.Open(t.Context(), url, crdb.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	v := &shown{t: t, store: s, holder: claims.HolderID(uuid.NewString())}
	lease := claims.Lease{Holder: v.holder, Kind: "worker", Name: "worker-1", Version: "v1", Slots: 8}
	if err := s.OpenLease(t.Context(), lease, time.Hour); err != nil {
		t.Fatal(err)
	}
	v.quarantined(url, "broken")
	return v
}

func (v *shown) apply(cmd claims.Command, acquire claims.HolderID) claims.Outcome {
	v.t.Helper()
	v.seq++
	cmd.Sequence, cmd.Time = v.seq, v.seq
	var acq *claims.Acquisition
	if acquire != "" {
		acq = &claims.Acquisition{
			Holder: acquire, Worker: "worker-1",
			Execution: claims.ExecutionID(uuid.NewString()), Step: claims.StepID(uuid.NewString()),
		}
	}
	out, err := v.store.Apply(v.t.Context(), cmd, acq)
	if err != nil {
		v.t.Fatal(err)
	}
	return out
}

func wake(session claims.SessionID, id string) claims.Command {
	return claims.Command{
		Kind: claims.Wake, Session: session,
		Input: &claims.Input{ID: id, Delivery: claims.Queue, Body: json.RawMessage(`{"n":1}`)},
	}
}

// quarantined makes a session whose worker was lost while it cancelled.
func (v *shown) quarantined(url string, session claims.SessionID) {
	v.t.Helper()
	ctx := v.t.Context()
	lost := claims.HolderID(uuid.NewString())
	if err := v.store.OpenLease(ctx, claims.Lease{Holder: lost, Kind: "worker", Name: "lost"}, time.Hour); err != nil {
		v.t.Fatal(err)
	}
	started := v.apply(wake(session, "in"), lost).Started
	v.apply(claims.Command{Kind: claims.Interrupt, Session: session, Reason: "stop"}, "")
	db, err := pgx.Connect(ctx, url)
	if err != nil {
		v.t.Fatal(err)
	}
	defer db.Close(ctx)
	if _, err := db.Exec(ctx, "UPDATE leases SET expires_at = statement_timestamp() - INTERVAL '1 second' WHERE holder = $1", string(lost)); err != nil {
		v.t.Fatal(err)
	}
	candidate := claims.Candidate{Session: session, Execution: started.Claim.Execution, Phase: claims.Cancelling}
	if _, err := v.store.EndExpired(ctx, candidate, false, &claims.Token{ID: uuid.NewString()}); err != nil {
		v.t.Fatal(err)
	}
}

// list reads a list to its end in pages, as "session state" of each.
func (v *shown) list(state crdb.SessionState, page int) []string {
	v.t.Helper()
	var got []string
	for after := (crdb.Cursor{}); ; {
		sessions, next, err := v.store.Sessions(v.t.Context(), state, after, page)
		if err != nil {
			v.t.Fatal(err)
		}
		if len(sessions) > page {
			v.t.Fatalf("page of %d sessions, want at most %d", len(sessions), page)
		}
		for _, s := range sessions {
			got = append(got, fmt.Sprintf("%s %s", s.Session, s.State))
			if s.Since.IsZero() {
				v.t.Errorf("session %s is %s since never", s.Session, s.State)
			}
		}
		if next == nil {
			return got
		}
		after = *next
	}
}

func TestSessionsByState(t *testing.T) {
	t.Parallel()
	v := newShown(t)
	for _, session := range []claims.SessionID{"z-ready", "a-ready", "m-ready"} {
		v.apply(wake(session, "in"), "")
	}
	later := wake("waiting", "in")
	later.NotBefore = time.Now().Add(time.Hour)
	v.apply(later, "")
	v.apply(wake("running", "in"), v.holder)
	v.apply(wake("stopping", "in"), v.holder)
	v.apply(claims.Command{Kind: claims.Interrupt, Session: "stopping"}, "")
	v.apply(claims.Command{Kind: claims.Admit, Session: "idle", Input: wake("", "in").Input}, "")

	for _, tc := range []struct {
		state crdb.SessionState
		want  []string
	}{
		{crdb.StateReady, []string{"z-ready ready", "a-ready ready", "m-ready ready"}}, // oldest first
		{crdb.StateRunning, []string{"running running"}},
		{crdb.StateCancelling, []string{"stopping cancelling"}},
		{crdb.StateQuarantined, []string{"broken quarantined"}},
		{"", []string{
			"a-ready ready", "broken quarantined", "idle idle", "m-ready ready", "running running",
			"stopping cancelling", "waiting waiting", "z-ready ready",
		}},
	} {
		for _, page := range []int{1, 2, 3, 100} {
			if got := v.list(tc.state, page); !slices.Equal(got, tc.want) {
				t.Errorf("state %q in pages of %d: %q, want %q", tc.state, page, got, tc.want)
			}
		}
	}
	if _, _, err := v.store.Sessions(t.Context(), "nonsense", crdb.Cursor{}, 10); err == nil {
		t.Error("a state that there is not has a list")
	}
}

func TestSessionWhole(t *testing.T) {
	t.Parallel()
	v := newShown(t)
	ctx := t.Context()
	out := v.apply(wake("s1", "in_1"), v.holder)
	v.apply(wake("s1", "in_2"), "")
	big := wake("s1", "in_3")
	big.Input.Body, _ = json.Marshal(string(make([]byte, 2000))) // six bytes each, as JSON
	v.apply(big, "")
	v.apply(claims.Command{Kind: claims.Wake, Session: "s1", NotBefore: time.Now().Add(time.Hour)}, "")

	d, err := v.store.Session(ctx, "s1")
	if err != nil {
		t.Fatal(err)
	}
	c := d.Claim
	if c == nil || c.Execution != out.Started.Claim.Execution || c.Step != out.Started.Step.ID || c.Worker != "worker-1" || !c.LeaseLive {
		t.Errorf("claim is %+v, want that of %+v", c, out.Started)
	}
	if d.State != crdb.StateRunning || d.LeaseLive == nil || !*d.LeaseLive || d.Pending() != 3 {
		t.Errorf("session is %+v, want running with three that wait", d.SessionSummary)
	}
	if len(d.Inputs) != 2 || d.Inputs[0].ID != "in_2" || string(d.Inputs[0].Body) != `{"n":1}` || d.Inputs[1].Body != nil || d.Inputs[1].Bytes < 4096 {
		t.Errorf("pending inputs are %+v, want in_2 with its body, in_3 without", d.Inputs)
	}
	if len(d.Wakes) != 1 || len(d.Promised) != 0 || len(d.Steps) != 0 || d.Quarantine != nil {
		t.Errorf("got wakes %v, continuations %v, steps %v, quarantine %v", d.Wakes, d.Promised, d.Steps, d.Quarantine)
	}

	hour := time.Hour
	_, err = v.store.Finish(ctx, out.Started.Claim, claims.Ending{
		Step: out.Started.Step, Tail: []claims.Content{{Type: claims.TextEvent, Data: claims.TextData{Text: "hi"}}},
		Failure: &claims.Failure{Code: claims.CodeExit, Retryable: true}, Retry: &hour,
	}, &claims.Token{ID: uuid.NewString()})
	if err != nil {
		t.Fatal(err)
	}
	if d, err = v.store.Session(ctx, "s1"); err != nil {
		t.Fatal(err)
	}
	if d.Claim != nil || d.State != crdb.StateReady {
		t.Errorf("session is %s with claim %+v, want ready without", d.State, d.Claim)
	}
	if len(d.Promised) != 1 || d.Promised[0].Kind != claims.KindRetry || d.Promised[0].Step != out.Started.Step.ID || d.Promised[0].Attempt != 1 {
		t.Errorf("continuations are %+v, want the retry", d.Promised)
	}
	if len(d.Steps) != 1 || d.Steps[0].Text != "hi" || d.Steps[0].Status != claims.StepFailed {
		t.Errorf("closed steps are %+v, want the failed one", d.Steps)
	}

	d, err = v.store.Session(ctx, "broken")
	if err != nil {
		t.Fatal(err)
	}
	q := d.Quarantine
	if q == nil || q.Reason != claims.ReasonOutcomeUnknown || q.Lane != "claims" || !json.Valid(q.Evidence) || d.Reason != q.Reason {
		t.Errorf("quarantine is %+v", q)
	}
	if _, err := v.store.Session(ctx, "nobody"); !errors.Is(err, crdb.ErrNoSession) {
		t.Errorf("a session that there is not: %v, want ErrNoSession", err)
	}
}

func TestLeasesPaged(t *testing.T) {
	t.Parallel()
	v := newShown(t)
	v.apply(wake("s1", "in"), v.holder)
	got := map[string]crdb.LeaseDetail{}
	var after claims.HolderID
	for range 3 { // two leases, then nothing
		page, err := v.store.Leases(t.Context(), after, 1)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range page {
			got[l.Name], after = l, l.Holder
		}
	}
	if len(got) != 2 {
		t.Fatalf("leases are %+v, want two", got)
	}
	if l := got["worker-1"]; !l.Live || l.Claims != 1 || l.Slots != 8 || l.Kind != "worker" || l.Version != "v1" || l.Holder != v.holder {
		t.Errorf("lease is %+v, want live with one claim", l)
	}
	if l := got["lost"]; l.Live || l.Claims != 0 {
		t.Errorf("lease is %+v, want expired", l)
	}
}

package scantest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"reveille/claims"
	"reveille/claims/crdb"
	"reveille/internal/faultproxy"
	"reveille/recovery"
)

// S10: three scanners at once over a thousand expired claims. They begin with
// the same rows; each claim is ended once, and counted once.
func TestS10I31ThreeScannersOverAThousandClaims(t *testing.T) {
	const all, scanners = 1000, 3
	e := newEnv(t)
	worker := e.lease("worker")
	e.many("s", all, func(id claims.SessionID) { e.wake(id, worker) })
	e.expire(worker)
	var read, ended sync.WaitGroup
	read.Add(scanners)
	var handled atomic.Int64
	for range scanners {
		p := e.parts()
		p.Claims = readTogether{e.store, &read, &sync.Once{}}
		s := e.scanner(p, recovery.Options{Batch: batch})
		ended.Go(func() {
			for range 10 * all / batch {
				r := s.Pass(t.Context()).Lanes[recovery.LaneClaims]
				if handled.Add(int64(r.Done)); r.Failed+r.Quarantined+r.Skipped != 0 || r.Err != nil {
					t.Errorf("%+v", r)
				}
				if r.Seen == 0 && handled.Load() >= all {
					return
				}
			}
			t.Errorf("%d of %d claims are ended after many passes", handled.Load(), all)
		})
	}
	ended.Wait()
	if n := handled.Load(); n != all {
		t.Errorf("%d counted as done, of %d", n, all)
	}
	for what, statement := range map[string]string{
		"claims": "SELECT count(*) FROM claims", "quarantines": "SELECT count(*) FROM quarantines",
		"sessions without one continuation": `SELECT count(*) FROM sessions s WHERE (SELECT count(*) FROM continuations c WHERE c.session_id = s.session_id) <> 1`,
		"sessions whose execution did not end once": `SELECT count(*) FROM sessions s
			WHERE (SELECT count(*) FROM events v, unnest(string_to_array(v.lines, E'\n')) l
				WHERE v.session_id = s.session_id AND l LIKE '%"type":"execution.ended"%"outcome":"recovered"%') <> 1`,
		"sessions whose step did not fail once": `SELECT count(*) FROM sessions s
			WHERE (SELECT count(*) FROM events v, unnest(string_to_array(v.lines, E'\n')) l
				WHERE v.session_id = s.session_id AND l LIKE '%"type":"step.failed"%') <> 1`,
	} {
		if n := e.row(statement); n != int64(0) {
			t.Errorf("%v %s", n, what)
		}
	}
	if n := e.row("SELECT count(*) FROM sessions"); n != int64(all) {
		t.Errorf("%v sessions", n)
	}
}

// readTogether lets some scanners read the same rows before any touches them.
type readTogether struct {
	*crdb.Store
	read  *sync.WaitGroup
	first *sync.Once
}

func (s readTogether) ExpiredClaims(ctx context.Context, limit int) ([]claims.Candidate, error) {
	found, err := s.Store.ExpiredClaims(ctx, limit)
	s.first.Do(func() {
		s.read.Done()
		s.read.Wait()
	})
	return found, err
}

// childURL names the environment variable that makes this test binary a
// scanner process of one pass over the database at its value.
const childURL = "SCANTEST_SCANNER_URL"

// childTimeout bounds an attempt of a transaction of such a process.
const childTimeout = 2 * time.Second

// said is a line of the process on standard output.
type said struct {
	Holder claims.HolderID  // once, when it has its lease
	At     claims.SessionID // it waits for a line on standard input, before the conversion
	Ended  *recovery.Result // its pass, in the claims lane
}

// scannerProcess makes a pass whose conversions each wait until they are told to
// go on. It trusts its lease whatever happens, as a process does that was stopped
// right behind the look at its clock: only the database's fences are left.
func scannerProcess(url string, in io.Reader, out io.Writer) error {
	ctx := context.Background()
	o := storeOptions()
	o.Timeout = childTimeout
	store, err := crdb.Open(ctx, url, o)
	if err != nil {
		return err
	}
	defer store.Close()
	holder := acquisition("").Execution // any UUID
	lease := claims.Lease{Holder: claims.HolderID(holder), Kind: "scanner", Name: "process", Version: "test"}
	if err := store.OpenLease(ctx, lease, time.Hour); err != nil {
		return err
	}
	say, lines := json.NewEncoder(out), bufio.NewScanner(in)
	if err := say.Encode(said{Holder: lease.Holder}); err != nil {
		return err
	}
	b := &bus{}
	g := gates{store, func(op operation, id claims.SessionID) {
		if op == converting {
			_ = say.Encode(said{At: id}) // the parent waits for it, and fails
			lines.Scan()
		}
	}}
	s, err := recovery.New(recovery.Parts{
		Claims: g, Conversions: g, Held: store, Continuations: g, Sessions: store, Relays: store, Retentions: store, Database: store, Announcer: b, Relayer: b, Copies: b,
		Holder: func() (claims.HolderID, bool) { return lease.Holder, true },
	}, recovery.Options{TimeBox: 10 * time.Minute, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	r := s.Pass(ctx).Lanes[recovery.LaneClaims]
	return say.Encode(said{Ended: &r})
}

// child is such a process, seen from the test.
type child struct {
	*env
	cmd    *exec.Cmd
	in     io.Writer
	said   chan said
	holder claims.HolderID
}

func (e *env) startScanner(url string) *child {
	e.Helper()
	exe, err := os.Executable()
	if err != nil {
		e.Fatal(err)
	}
	c := &child{env: e, cmd: exec.Command(exe), said: make(chan said)}
	c.cmd.Env = append(os.Environ(), childURL+"="+url)
	var log strings.Builder
	c.cmd.Stderr = &log
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		e.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		e.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		e.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for dec := json.NewDecoder(out); ; {
			var s said
			if err := dec.Decode(&s); err != nil {
				return
			}
			select {
			case c.said <- s:
			case <-e.Context().Done():
				return
			}
		}
	}()
	e.Cleanup(func() {
		_ = c.cmd.Process.Kill() // it may have ended, or be stopped
		<-read
		_ = c.cmd.Wait() // killed, or it has said what there was to say
		if e.Failed() {
			e.Logf("log of the scanner process:\n%s", log.String())
		}
	})
	c.holder = wait(e, "the scanner process has its lease", c.said).Holder
	return c
}

func (c *child) goOn() {
	c.Helper()
	if _, err := fmt.Fprintln(c.in); err != nil {
		c.Fatal(err)
	}
}

func (c *child) signal(s syscall.Signal) {
	c.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.Fatal(err)
	}
}

// endsPass lets the process go on until its pass is over.
func (c *child) endsPass() recovery.Result {
	c.Helper()
	for {
		s := wait(c.env, "the pass of the process ends", c.said)
		if s.Ended != nil {
			return *s.Ended
		}
		c.goOn()
	}
}

// S10: a scanner process is stopped in mid-pass, for longer than its lease,
// between the takeover of one claim and its conversion and with others before
// it. Another scanner goes by. Woken, it changes nothing that is not its own any
// more, and counts nothing of that.
func TestS10I31StoppedInMidPass(t *testing.T) {
	const all, before = 20, 4
	e := newEnv(t)
	worker := e.lease("worker")
	e.many("s", all, func(id claims.SessionID) { e.wake(id, worker) })
	e.expire(worker)
	c := e.startScanner(e.url)
	for range before {
		wait(e, "the process has taken a claim over", c.said)
		c.goOn()
	}
	at := wait(e, "the process has taken one more over", c.said).At
	c.signal(syscall.SIGSTOP)
	e.expire(c.holder)
	if n := e.row("SELECT count(*) FROM claims WHERE holder = $1::UUID", string(c.holder)); n != int64(1) {
		t.Fatalf("the process holds %v claims", n)
	}
	if r := e.pass(recovery.Options{}); r.Done != all-before || r.Left+r.Failed+r.Quarantined != 0 {
		t.Errorf("the other scanner: %+v", r)
	}
	rows := e.rows()
	c.signal(syscall.SIGCONT)
	c.goOn()
	if r := c.endsPass(); r.Done != before || r.Left != all-before || r.Quarantined+r.Failed+r.Skipped != 0 {
		t.Errorf("the process, stopped at %s: %+v", at, r)
	}
	e.unchanged(rows)
	if n := e.row("SELECT count(*) FROM continuations"); n != int64(all) {
		t.Errorf("%v continuations", n)
	}
}

// S10: it is stopped in the middle of a conversion's transaction, where it has
// the session's row. That keeps the session from everybody else no longer than
// a transaction may be idle.
func TestS10I32StoppedInATransaction(t *testing.T) {
	e := newEnv(t)
	worker := e.lease("worker")
	e.wake("s", worker)
	e.expire(worker)
	proxy, err := faultproxy.New(e.url, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	c := e.startScanner(proxy.URL())
	wait(e, "the process has taken the claim over", c.said)
	held := proxy.Hold(firstWrite)
	c.goOn()
	wait(e, "its transaction has the session's row", held.Reached())
	c.signal(syscall.SIGSTOP)
	held.Release()
	e.expire(c.holder)
	if r := e.pass(recovery.Options{}); r.Done != 1 {
		t.Errorf("the other scanner: %+v", r)
	}
	rows := e.rows()
	c.signal(syscall.SIGCONT)
	if r := c.endsPass(); r.Left != 1 || r.Done+r.Quarantined+r.Failed != 0 {
		t.Errorf("the process: %+v", r)
	}
	e.unchanged(rows)
	e.tail("s", `step.failed {"code":"worker_lost","message":"the worker was lost","retryable":true}`, `execution.ended {"outcome":"recovered"}`)
}

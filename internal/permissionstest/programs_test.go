package permissionstest

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"reveille/internal/dbtest"
)

// programs are the built programs and where they find their servers.
type programs struct {
	t     testing.TB
	dir   string
	nats  *natsServer
	creds map[string]string
	db    string
}

func buildPrograms(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.Command("go", "build", "-ldflags=-w", "-o", dir+"/", "reveille/cmd/worker", "reveille/cmd/scanner", "reveille/cmd/reveille").CombinedOutput()
	if err != nil {
		t.Fatalf("building the programs: %v\n%s", err, out)
	}
	return dir
}

// process is one of the programs, as a role.
type process struct {
	t              testing.TB
	name           string
	cmd            *exec.Cmd
	stdout, stderr output
	done           chan struct{}
}

// output is what a process wrote so far.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// start starts a program; the end of the test kills what is left of it.
func (p *programs) start(program, creds, ca string, args ...string) *process {
	p.t.Helper()
	cmd := exec.Command(filepath.Join(p.dir, program), append(args, "--nats-url", p.nats.url("", ""), "--nats-creds", creds, "--nats-ca", ca)...)
	r := &process{t: p.t, name: program + " " + args[0], cmd: cmd, done: make(chan struct{})}
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.t.TempDir(), &r.stdout, &r.stderr
	cmd.WaitDelay = patience // a step's command may hold the output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	for _, kv := range os.Environ() { // nothing of the machine's settings
		if !strings.HasPrefix(kv, "RV_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(cmd.Env, "RV_DATABASE_URL="+p.db)
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait() // its exit code is in ProcessState
		close(r.done)
	}()
	p.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may be gone already
		<-r.done
		if p.t.Failed() {
			p.t.Logf("%s wrote:\n%s\n%s", r.name, r.stdout.String(), r.stderr.String())
		}
	})
	return r
}

// as starts a program as a role of the namespace rv.
func (p *programs) as(role, program string, args ...string) *process {
	p.t.Helper()
	return p.start(program, p.creds["rv-"+role], p.nats.ca, args...)
}

// ends waits for the end of a process, which must be with an exit code.
func (r *process) ends(code int) {
	r.t.Helper()
	receive(r.t, r.name+" ends", r.done)
	if got := r.cmd.ProcessState.ExitCode(); got != code {
		r.t.Errorf("%s: exit %d, want %d: %s", r.name, got, code, r.stderr.String())
	}
}

// stop interrupts a process, which then must end well.
func (r *process) stop(sig syscall.Signal) {
	r.t.Helper()
	if err := r.cmd.Process.Signal(sig); err != nil {
		r.t.Fatal(err)
	}
	r.ends(0)
}

// says waits until a process wrote a text.
func (r *process) says(o *output, text string) {
	r.t.Helper()
	eventually(r.t, r.name+" says "+text, func() bool {
		select {
		case <-r.done:
			if !strings.Contains(o.String(), text) {
				r.t.Fatalf("%s ended and did not say %q: %s", r.name, text, r.stderr.String())
			}
		default:
		}
		return strings.Contains(o.String(), text)
	})
}

// serve starts a worker or a scanner, and waits until it is ready.
func (p *programs) serve(program string, args ...string) *process {
	p.t.Helper()
	addr := fmt.Sprintf("127.0.0.1:%d", freePort(p.t))
	r := p.as(program, program, append([]string{"--http", addr}, args...)...)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	eventually(p.t, program+" is ready", func() bool {
		select {
		case <-r.done:
			p.t.Fatalf("%s ended while it started: %s", program, r.stderr.String())
		default:
		}
		resp, err := client.Get("http://" + addr + "/readyz")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return r
}

// TestProgramsUseTLSAndCreds: each of the programs connects with a credentials
// file to a server whose certificate an authority of its own has signed, as the
// role that it has, and nothing of what it does is denied.
func TestProgramsUseTLSAndCreds(t *testing.T) {
	dir := buildPrograms(t)
	s, creds := startWithCreds(t)
	p := &programs{t: t, dir: dir, nats: s, creds: creds, db: dbtest.New(t)}
	p.as("operator", "reveille", "relay", "--rebuild").ends(0) // makes the streams
	worker := p.serve("worker", "--exec", "cat >/dev/null; echo hello")
	scanner := p.serve("scanner")

	wait := p.as("operator", "reveille", "wake", "s1", "--input", `"x"`, "--wait", "--timeout", patience.String())
	wait.ends(0)
	if got := wait.stdout.String(); got != "hello\n" {
		t.Errorf("the step of a wake that waits says %q, want hello", got)
	}
	p.as("publisher", "reveille", "wake", "s2", "--input", `"x"`, "--timeout", patience.String()).ends(0)
	watch := p.as("observer", "reveille", "watch", "s2", "--json", "--timeout", patience.String())
	watch.says(&watch.stdout, `"type":"execution.ended"`)
	watch.stop(syscall.SIGINT)
	worker.stop(syscall.SIGTERM)
	scanner.stop(syscall.SIGTERM)
	s.noViolations()

	// A server that the authority of the flag has not signed is told nothing.
	untrusting := p.start("worker", creds["rv-worker"], newCertificates(t).ca, "--exec", "true", "--http", "127.0.0.1:0")
	untrusting.says(&untrusting.stderr, "certificate signed by unknown authority")
	if err := untrusting.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	untrusting.ends(1)
}

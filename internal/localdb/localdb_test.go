package localdb

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"
)

// helperEnv makes this test binary a parent that can be killed: it starts a server in the folder that it names.
const helperEnv = "LOCALDB_TEST_PARENT_OF"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperEnv); dir != "" {
		os.Exit(helper(dir))
	}
	goleak.VerifyTestMain(m)
}

func helper(dir string) int {
	if _, err := Start(context.Background(), Options{Dir: dir, Ephemeral: true}); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	select {}
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// stateDir is a folder that any user can pass through, so the data stay in it.
func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(tempBase, "reveille-localdb-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

func mustStart(t *testing.T, o Options) *Server {
	t.Helper()
	s, err := Start(deadline(t), o)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	t.Cleanup(func() { s.Stop(deadline(t)) })
	return s
}

func mustStop(t *testing.T, s *Server) {
	t.Helper()
	if err := s.Stop(deadline(t)); err != nil {
		t.Fatalf("Stop: %v", err)
	}
}

func mustExec(t *testing.T, url, statement string) {
	t.Helper()
	if err := execute(deadline(t), url, statement); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func query(t *testing.T, url, statement string) string {
	t.Helper()
	ctx := deadline(t)
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	var text string
	if err := conn.QueryRow(ctx, statement).Scan(&text); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
	return text
}

func mustGone(t *testing.T, s *Server) {
	t.Helper()
	if pids := serverProcesses(s.engine, s.state.data); len(pids) > 0 {
		t.Errorf("processes %v are left of the server in %s", pids, s.state.data)
	}
}

// waitGone polls: processes that are not ours to wait for send no signal when they end.
func waitGone(t *testing.T, engine, data string) {
	t.Helper()
	ctx := deadline(t)
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		pids := serverProcesses(engine, data)
		if len(pids) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("processes %v of %s do not end", pids, data)
		}
	}
}

func oneLineText(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
	return err.Error()
}

func TestSecondStartFindsData(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	s := mustStart(t, Options{Dir: dir}) // durable, as in `reveille dev`
	mustExec(t, s.URL(), "CREATE TABLE kept (n INT8 PRIMARY KEY)")
	if s.Engine() == EnginePostgres {
		if got := query(t, s.URL(), "SHOW fsync"); got != "on" {
			t.Errorf("fsync = %s in a durable server", got)
		}
		for setting, want := range map[string]string{"TimeZone": "UTC", "server_encoding": "UTF8", "lc_collate": "C", "autovacuum": "on"} {
			if got := query(t, s.URL(), "SHOW "+setting); got != want {
				t.Errorf("%s = %s, want %s", setting, got, want)
			}
		}
	}
	if syscall.Kill(s.Pid(), 0) != nil {
		t.Errorf("Pid() = %d is no process", s.Pid())
	}
	if d := s.Describe(); !strings.Contains(d, strconv.Itoa(s.Pid())) || !strings.Contains(d, s.state.data) || strings.Contains(d, s.state.read("password")) {
		t.Errorf("Describe() = %q", d)
	}
	mustStop(t, s)
	mustStop(t, s)
	mustGone(t, s)
	select {
	case <-s.Done():
		t.Error("Done is closed after Stop")
	default:
	}

	again := mustStart(t, Options{Dir: dir})
	if got := query(t, again.URL(), "SELECT count(*)::TEXT FROM kept"); got != "0" {
		t.Errorf("count = %s", got)
	}
	if again.URL() != s.URL() {
		t.Error("a restart changed the port or the password")
	}
	mustStop(t, again)
}

func TestCrashAndStartAgain(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	s := mustStart(t, Options{Dir: dir})
	mustExec(t, s.URL(), "CREATE TABLE kept (n INT8 PRIMARY KEY)")
	if err := syscall.Kill(s.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Done():
	case <-deadline(t).Done():
		t.Fatal("Done is not closed after the server was killed")
	}
	if got := oneLineText(t, s.Err()); !strings.Contains(got, "killed") {
		t.Errorf("Err() = %q", got)
	}
	mustStop(t, s)
	again := mustStart(t, Options{Dir: dir})
	query(t, again.URL(), "SELECT count(*)::TEXT FROM kept")
	mustStop(t, again)
	mustGone(t, again)
}

func TestStopKillsWhenContextEnds(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	s := mustStart(t, Options{Dir: dir, Ephemeral: true})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	// A stopped process takes no other signal: the fast shutdown can't win.
	if err := syscall.Kill(s.Pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Stop = %v", err)
	}
	waitGone(t, s.engine, s.state.data)
	mustStop(t, mustStart(t, Options{Dir: dir, Ephemeral: true})) // recovers, and frees the shared memory
}

func TestParentKilled(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), helperEnv+"="+dir)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		t.Fatalf("the parent says %q, %v", line, err)
	}
	if _, err := Start(deadline(t), Options{Dir: dir}); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), strconv.Itoa(parent.Process.Pid)) {
		t.Errorf("Start beside a living parent: %v", err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	parent.Wait()
	if runtime.GOOS == "linux" { // elsewhere the next start stops it
		data := filepath.Join(dir, "database", dataName(EnginePostgres))
		if findCockroach() != "" {
			data = filepath.Join(dir, "database", dataName(EngineCockroach))
		}
		waitGone(t, EnginePostgres, data)
		waitGone(t, EngineCockroach, data)
	}
	mustStop(t, mustStart(t, Options{Dir: dir, Ephemeral: true}))
}

func TestLeftoverIsStopped(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	s := mustStart(t, Options{Dir: dir, Ephemeral: true})
	// As if its parent had died: nobody holds the lock.
	if err := s.state.close(); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	again := mustStart(t, Options{Dir: dir, Ephemeral: true, Log: &log})
	select {
	case <-s.Done():
	default:
		t.Error("the leftover was not ended before the next start")
	}
	if again.Pid() == s.Pid() || !strings.Contains(log.String(), strconv.Itoa(s.Pid())) {
		t.Errorf("pid %d after %d, log %q", again.Pid(), s.Pid(), &log)
	}
	mustStop(t, again)
}

func TestStalePidFileOfAnotherProcess(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	s := mustStart(t, Options{Dir: dir, Ephemeral: true})
	mustStop(t, s)
	if s.Engine() != EnginePostgres {
		return // CockroachDB's pid file locks nothing
	}
	// A process of the server's own user: PostgreSQL takes it for a server, others it ignores.
	other := exec.Command("/bin/sh", "-c", "read end")
	if info, err := os.Stat(s.state.data); err != nil {
		t.Fatal(err)
	} else if st := info.Sys().(*syscall.Stat_t); os.Geteuid() == 0 {
		other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: st.Uid, Gid: st.Gid}}
	}
	in, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer other.Wait()
	defer in.Close()
	stale := fmt.Sprintf("%d\n%s\n1\n1\n\n127.0.0.1\n\nready\n", other.Process.Pid, s.state.data)
	if err := os.WriteFile(filepath.Join(s.state.data, "postmaster.pid"), []byte(stale), 0o644); err != nil {
		t.Fatal(err)
	}
	mustStop(t, mustStart(t, Options{Dir: dir, Ephemeral: true}))
}

func TestTwoAtOnce(t *testing.T) {
	t.Parallel()
	a := mustStart(t, Options{Dir: stateDir(t), Ephemeral: true})
	b := mustStart(t, Options{Dir: stateDir(t), Ephemeral: true})
	if a.URL() == b.URL() {
		t.Fatal("the same server")
	}
	mustExec(t, a.URL(), "CREATE TABLE mine (n INT8 PRIMARY KEY)")
	mustExec(t, b.URL(), "CREATE TABLE mine (n INT8 PRIMARY KEY)")
	if _, err := Start(deadline(t), Options{Dir: filepath.Dir(a.state.dir)}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second start in one folder: %v", err)
	}
	mustStop(t, a)
	query(t, b.URL(), "SELECT count(*)::TEXT FROM mine")
	mustStop(t, b)
}

// TestFolderOnlyRootCanEnter: as root the data go to /var/tmp and are found again; as another user they stay.
func TestFolderOnlyRootCanEnter(t *testing.T) {
	t.Parallel()
	parent := t.TempDir() // below a folder of mode 0700
	if err := os.Chmod(parent, 0o700); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(parent, "state")
	s := mustStart(t, Options{Dir: dir, Ephemeral: true})
	mustExec(t, s.URL(), "CREATE TABLE kept (n INT8 PRIMARY KEY)")
	if os.Geteuid() != 0 || s.Engine() != EnginePostgres {
		if !strings.HasPrefix(s.state.data, s.state.dir) {
			t.Errorf("data in %s", s.state.data)
		}
		return
	}
	elsewhere := filepath.Dir(s.state.data)
	t.Cleanup(func() {
		os.RemoveAll(elsewhere)
		os.RemoveAll(elsewhere + ".old")
	})
	if !strings.HasPrefix(elsewhere, tempBase+"/reveille-") || !strings.Contains(s.Describe(), elsewhere) || !strings.Contains(s.Describe(), s.state.dir) {
		t.Errorf("Describe() = %q, data in %s", s.Describe(), s.state.data)
	}
	mustStop(t, s)

	// Passable since: the data are where they were.
	for _, d := range []string{filepath.Dir(parent), parent} {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	s = mustStart(t, Options{Dir: dir, Ephemeral: true})
	query(t, s.URL(), "SELECT count(*)::TEXT FROM kept")
	mustStop(t, s)

	// The state removed: a fresh start, and the old data put aside.
	if err := os.Chmod(parent, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	s = mustStart(t, Options{Dir: dir, Ephemeral: true})
	if got := query(t, s.URL(), "SELECT count(*)::TEXT FROM pg_tables WHERE tablename = 'kept'"); got != "0" {
		t.Error("a removed state folder came back with its data")
	}
	if !exists(filepath.Join(elsewhere+".old", dataName(EnginePostgres))) {
		t.Error("the old data were not kept")
	}
	mustStop(t, s)
}

func TestOtherUsersAreKeptOut(t *testing.T) {
	t.Parallel()
	s := mustStart(t, Options{Dir: stateDir(t), Ephemeral: true})
	if s.Engine() != EnginePostgres {
		return // --insecure: not promised
	}
	password := s.state.read("password")
	if err := ping(deadline(t), strings.Replace(s.URL(), password, "guess", 1)); err == nil {
		t.Error("a wrong password gets in")
	}
	for path, want := range map[string]fs.FileMode{s.state.path("password"): 0o600, s.state.path("server.log"): 0o600, s.state.data: 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: mode %v, %v", path, info.Mode(), err)
		}
	}
	if exists(filepath.Join(s.state.dir, "initdb-password")) {
		t.Error("initdb's copy of the password is left")
	}
	mustStop(t, s)
}

func TestPortTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	dir := stateDir(t)
	_, err = Start(deadline(t), Options{Dir: dir, Ephemeral: true, Port: port})
	if got := oneLineText(t, err); !strings.Contains(got, strconv.Itoa(port)) || !strings.Contains(got, "taken") {
		t.Errorf("Start = %q", got)
	}
	// A remembered port that is taken now is let go.
	st, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.write("port", strconv.Itoa(port)); err != nil {
		t.Fatal(err)
	}
	if err := st.close(); err != nil {
		t.Fatal(err)
	}
	mustStop(t, mustStart(t, Options{Dir: dir, Ephemeral: true}))
}

func TestStartIsBoundedAndLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	dir := stateDir(t)
	_, err := Start(ctx, Options{Dir: dir, Ephemeral: true})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Start = %v", err)
	}
	mustStop(t, mustStart(t, Options{Dir: dir, Ephemeral: true})) // the lock is free
}

func TestExternal(t *testing.T) {
	t.Parallel()
	s := mustStart(t, Options{Dir: stateDir(t), Ephemeral: true})
	other, err := WithDatabase(s.URL(), "made by need")
	if err != nil {
		t.Fatal(err)
	}
	e := mustStart(t, Options{URL: other})
	if e.Engine() != EngineExternal || e.Pid() != 0 || e.URL() != other || strings.Contains(e.Describe(), s.state.read("password")) {
		t.Errorf("%s %d %s", e.Engine(), e.Pid(), e.Describe())
	}
	mustExec(t, e.URL(), "CREATE TABLE mine (n INT8 PRIMARY KEY)")
	mustStop(t, e)
	query(t, s.URL(), "SELECT 'still there'")
	mustStop(t, s)
	_, err = Start(deadline(t), Options{URL: other})
	oneLineText(t, err)
	_, err = Start(deadline(t), Options{URL: "host=127.0.0.1 password=secret"})
	if got := oneLineText(t, err); strings.Contains(got, "secret") {
		t.Errorf("Start = %q", got)
	}
}

func TestStartTemp(t *testing.T) {
	t.Parallel()
	orphan, held := filepath.Join(tempBase, tempPrefix+randomHex(6)), filepath.Join(tempBase, tempPrefix+randomHex(6))
	for _, dir := range []string{orphan, held} {
		t.Cleanup(func() { os.RemoveAll(dir) })
		st, err := openState(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer st.lock.Close()
		if dir == orphan {
			if err := st.close(); err != nil {
				t.Fatal(err)
			}
		}
		old := time.Now().Add(-2 * sweepAge)
		if err := os.Chtimes(dir, old, old); err != nil {
			t.Fatal(err)
		}
	}
	s, err := StartTemp(deadline(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	if exists(orphan) || !exists(held) {
		t.Errorf("after the sweep: orphan there %v, held there %v", exists(orphan), exists(held))
	}
	query(t, s.URL(), "SELECT 'x'")
	mustStop(t, s)
	if exists(s.temp) {
		t.Errorf("%s is left", s.temp)
	}
}

func TestNoDatabase(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, _, err := findPostgres(deadline(t), nil, 0, "")
	if !errors.Is(err, ErrNoDatabase) {
		t.Fatalf("findPostgres = %v", err)
	}
	oneLineText(t, err)
}

// script puts an executable into a folder.
func script(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestChoiceOfPostgres(t *testing.T) {
	root := t.TempDir()
	for _, v := range []string{"9.6.24", "14.11", "15.2", "17.1", "18beta1"} {
		dir := filepath.Join(root, v, "bin")
		script(t, dir, "postgres", "echo 'postgres (PostgreSQL) "+v+" (a distribution)'")
		script(t, dir, "initdb", "exit 1")
	}
	script(t, filepath.Join(root, "no-initdb", "bin"), "postgres", "echo 'postgres (PostgreSQL) 19.1'")
	places := []string{filepath.Join(root, "*", "bin")}
	for _, tc := range []struct {
		name, path string
		major      int
		want       string
	}{
		{"the newest", "none", 0, "18beta1"},
		{"PATH first", "15.2", 0, "15.2"},
		{"PATH too old", "14.11", 0, "18beta1"},
		{"bound to the data", "17.1", 15, "15.2"},
		{"data of a version that is gone", "17.1", 16, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv("PATH", filepath.Join(root, tc.path, "bin"))
			bin, version, err := findPostgres(deadline(t), places, tc.major, "/state")
			if version != tc.want || (err == nil) != (tc.want != "") || (err == nil && bin != filepath.Join(root, tc.want, "bin")) {
				t.Errorf("findPostgres = %q, %q, %v", bin, version, err)
			}
		})
	}
}

// TestCockroachThatFails runs the way to CockroachDB with a stand-in: the choice, the arguments, the error.
func TestCockroachThatFails(t *testing.T) {
	bin := t.TempDir()
	script(t, bin, "cockroach", `echo "args: $*" >&2; echo "ERROR: no licence to start" >&2; exit 7`)
	t.Setenv("PATH", bin)
	dir := stateDir(t)
	_, err := Start(deadline(t), Options{Dir: dir, Port: 26999})
	if got := oneLineText(t, err); !strings.Contains(got, "no licence to start") || !strings.Contains(got, "exit status 7") {
		t.Errorf("Start = %q", got)
	}
	log, err := os.ReadFile(filepath.Join(dir, "database", "server.log"))
	want := "args: start-single-node --insecure --store=" + filepath.Join(dir, "database", "cockroach-data") +
		" --listen-addr=127.0.0.1:26999 --http-addr=127.0.0.1:0 "
	if err != nil || !strings.HasPrefix(string(log), want) {
		t.Errorf("log %q, %v", log, err)
	}
	// Its data are not PostgreSQL's.
	t.Setenv("PATH", t.TempDir())
	_, err = Start(deadline(t), Options{Dir: dir})
	if got := oneLineText(t, err); !strings.Contains(got, "cockroach") {
		t.Errorf("Start = %q", got)
	}
}

func TestServerProcessIsToldFromOthers(t *testing.T) {
	t.Parallel()
	const data = "/s/database/postgres-data"
	for _, tc := range []struct {
		engine, line string
		want         bool
	}{
		{EnginePostgres, "/usr/lib/postgresql/15/bin/postgres\x00-D\x00" + data + "\x00-c\x00port=1\x00", true},
		{EnginePostgres, "/usr/lib/postgresql/15/bin/postgres -D " + data + " -c port=1", true},
		{EnginePostgres, "postgres: " + clusterName(data) + ": checkpointer ", true},
		{EnginePostgres, "postgres: " + clusterName("/other") + ": checkpointer ", false},
		{EnginePostgres, "/usr/lib/postgresql/15/bin/postgres\x00-D\x00" + data + ".new\x00", false},
		{EnginePostgres, "/usr/lib/postgresql/15/bin/postgres\x00-D\x00/other\x00", false},
		{EnginePostgres, "vi\x00-D\x00" + data + "\x00", false},
		{EnginePostgres, "", false},
		{EngineCockroach, "/bin/cockroach\x00start-single-node\x00--pid-file=" + data + "/cockroach.pid\x00", true},
		{EngineCockroach, "/bin/cockroach\x00start-single-node\x00--pid-file=/other/cockroach.pid\x00", false},
		{EngineCockroach, "/usr/bin/postgres\x00-D\x00" + data + "\x00", false},
	} {
		if got := isServer(tc.engine, data, tc.line); got != tc.want {
			t.Errorf("isServer(%s, %q) = %v", tc.engine, tc.line, got)
		}
	}
}

func TestTail(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                             "nothing",
		"a\n\nb\nc\nd\n":               "b | c | d",
		"LOG: x\nFATAL:\tno\nLOG: y\n": "FATAL: no",
	} {
		if got := tailOf(text); got != want {
			t.Errorf("tailOf(%q) = %q, want %q", text, got, want)
		}
	}
}

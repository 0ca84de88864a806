package localdb

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// oldestPostgres is the oldest major version that Reveille runs on.
const oldestPostgres = 15

// superuser is the name of the one user of a private PostgreSQL.
const superuser = "reveille"

// postgresPlaces are where distributions put binaries that they keep off PATH.
func postgresPlaces() []string {
	return []string{
		"/usr/lib/postgresql/*/bin",
		"/usr/pgsql-*/bin",
		"/opt/homebrew/opt/postgresql@*/bin",
		"/usr/local/opt/postgresql@*/bin",
	}
}

type postgres struct {
	state     *state
	home      string // of data; the server's user can get there
	bin       string // folder of initdb and postgres
	version   string
	cred      *syscall.Credential // nil: this process's user
	password  string
	ephemeral bool
}

// newPostgres chooses binaries, user and place.
func newPostgres(ctx context.Context, o Options, st *state) (*postgres, error) {
	p := &postgres{state: st, home: st.dir, ephemeral: o.Ephemeral}
	other := st.read("home")
	if other != "" {
		p.home = other
	}
	major := 0
	if v, err := os.ReadFile(p.data() + "/PG_VERSION"); err == nil {
		major, _ = strconv.Atoi(strings.TrimSpace(string(v)))
	}
	var err error
	if p.bin, p.version, err = findPostgres(ctx, postgresPlaces(), major, st.dir); err != nil {
		return nil, err
	}
	if p.cred, err = serverUser(p.data()); err != nil {
		return nil, err
	}
	if p.cred != nil {
		if err := p.findHome(ctx, other != ""); err != nil {
			return nil, err
		}
	}
	if p.home != st.dir {
		st.moved = fmt.Sprintf("not in %s: PostgreSQL can't run as root, and the user it runs as can't get there", st.dir)
		fmt.Fprintf(o.Log, "the database's data are in %s (%s)\n", p.data(), st.moved)
	}
	if other != "" && !exists(p.data()) {
		fmt.Fprintf(o.Log, "the database's data are gone from %s, beginning anew\n", other)
	}
	st.data = p.data()
	return p, nil
}

// findHome puts the data where the server's user can get to: the state folder, or one that stands in for it. Once
// there, they stay there, also where the state folder has become passable since.
func (p *postgres) findHome(ctx context.Context, moved bool) error {
	if !moved {
		err := p.probe(ctx)
		if err == nil {
			return nil
		}
		if !errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("uid %d can't run PostgreSQL in %s: %w", p.cred.Uid, p.home, err)
		}
		if exists(p.data()) {
			return fmt.Errorf("the database's user (uid %d) can't get to %s any more: let others pass through the folders above it (chmod o+x)", p.cred.Uid, p.home)
		}
	}
	var err error
	if p.home, err = p.state.elsewhere(); err != nil {
		return err
	}
	if err := p.probe(ctx); err != nil {
		return fmt.Errorf("uid %d can't run PostgreSQL in %s: %w", p.cred.Uid, p.home, err)
	}
	return nil
}

func (p *postgres) name() string { return EnginePostgres }

func (p *postgres) data() string { return filepath.Join(p.home, dataName(EnginePostgres)) }

func dataName(engine string) string { return engine + "-data" }

// probe runs the server's binary as its user in its place: modes, access lists and what else may be in the way all
// count, so nothing less than trying tells.
func (p *postgres) probe(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "postgres"), "--version")
	cmd.Dir = p.home
	cmd.Env = serverEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.cred}
	return cmd.Run()
}

// prepare makes the data directory under another name and then renames it: if it is there, it is whole.
func (p *postgres) prepare(ctx context.Context) error {
	fresh := !exists(p.data())
	if !fresh && p.state.read("password") == "" {
		return fmt.Errorf("the password of the database is gone from %s: remove that folder to begin anew", p.state.dir)
	}
	var err error
	if p.password, err = p.state.password(); err != nil {
		return err
	}
	if !fresh {
		return p.clearPidFile()
	}
	if err := p.state.write("engine", EnginePostgres+"\n"); err != nil {
		return err
	}
	if p.home != p.state.dir {
		if err := p.state.write("home", p.home+"\n"); err != nil {
			return err
		}
	}
	if err := p.initdb(ctx, p.data()+".new"); err != nil {
		return err
	}
	if err := os.Rename(p.data()+".new", p.data()); err != nil {
		return fmt.Errorf("can't put the new data directory in place: %w", err)
	}
	return nil
}

func (p *postgres) initdb(ctx context.Context, dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("can't remove a half-made data directory: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("can't make the data directory: %w", err)
	}
	pwfile := filepath.Join(p.home, "initdb-password")
	defer os.Remove(pwfile)
	if err := os.WriteFile(pwfile, []byte(p.password+"\n"), 0o600); err != nil {
		return fmt.Errorf("can't write the database's password: %w", err)
	}
	if p.cred != nil {
		for _, path := range []string{dir, pwfile} {
			if err := os.Chown(path, int(p.cred.Uid), int(p.cred.Gid)); err != nil {
				return fmt.Errorf("can't give the data directory to the database's user: %w", err)
			}
		}
	}
	args := []string{
		"-D", dir, "-U", superuser, "--auth=scram-sha-256", "--pwfile=" + pwfile,
		"--encoding=UTF8", "--locale=C", "--no-instructions",
	}
	if p.ephemeral {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "initdb"), args...)
	cmd.Dir = p.home
	cmd.Env = serverEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: p.cred}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = abandonTimeout
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("initdb failed in %s: %w (%s)", p.home, err, tailOf(out.String()))
	}
	return nil
}

// clearPidFile removes postmaster.pid where its pid now belongs to another process: the server would take that for
// a server of these data and refuse to start. Otherwise the file stays, the server checks with it that nobody uses its
// old shared memory. Real leftovers were stopped before.
func (p *postgres) clearPidFile() error {
	pid := p.pidFile(0)
	if n, err := strconv.Atoi(pid); err == nil && n > 0 && syscall.Kill(n, 0) == nil {
		if err := os.Remove(filepath.Join(p.data(), "postmaster.pid")); err != nil {
			return fmt.Errorf("can't remove a stale postmaster.pid: %w", err)
		}
	}
	return nil
}

// pidFile returns a line of postmaster.pid: 0 is the pid, 7 the server's status.
func (p *postgres) pidFile(line int) string { return pidFileLine(p.data(), line) }

func pidFileLine(data string, line int) string {
	b, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return ""
	}
	lines := strings.Split(string(b), "\n")
	if line >= len(lines) {
		return ""
	}
	return strings.TrimSpace(lines[line])
}

// mainProcess picks the one among a server's processes that takes signals for all, or 0 where it is gone.
func mainProcess(engine, data string, pids []int) int {
	if engine != EnginePostgres {
		return pids[0]
	}
	if pid, err := strconv.Atoi(pidFileLine(data, 0)); err == nil && slices.Contains(pids, pid) {
		return pid
	}
	return 0
}

func (p *postgres) command(port int) command {
	settings := []string{
		"listen_addresses=127.0.0.1",
		"port=" + strconv.Itoa(port),
		"unix_socket_directories=",
		"cluster_name=" + clusterName(p.data()),
		"timezone=UTC",
		"log_timezone=UTC",
		"lc_messages=C",
		"logging_collector=off",
		"log_destination=stderr",
		"shared_buffers=128MB",
	}
	if p.ephemeral {
		settings = append(settings, "max_connections=400", "fsync=off", "synchronous_commit=off", "full_page_writes=off")
	} else {
		settings = append(settings, "max_connections=200")
	}
	args := []string{"-D", p.data()}
	for _, s := range settings {
		args = append(args, "-c", s)
	}
	return command{
		title: "PostgreSQL " + p.version, path: filepath.Join(p.bin, "postgres"), args: args,
		dir: p.home, cred: p.cred,
	}
}

// clusterName stands in the titles of the server's processes: it tells ours from others.
func clusterName(data string) string {
	sum := sha256.Sum256([]byte(data))
	return "reveille-" + hex.EncodeToString(sum[:6])
}

// ready reads what pg_ctl reads. A connection would not do: another server may have taken the port.
func (p *postgres) ready(_ context.Context, proc *process, _ int) bool {
	return p.pidFile(0) == strconv.Itoa(proc.pid) && p.pidFile(7) == "ready"
}

func (p *postgres) url(port int, database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(superuser, p.password),
		Host: "127.0.0.1:" + strconv.Itoa(port), Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

// findPostgres returns the folder of the binaries: the ones on PATH where they are new enough, else the newest. Data
// that are there already bind it to their major version.
func findPostgres(ctx context.Context, patterns []string, major int, dir string) (bin, version string, err error) {
	var places []string
	if path, err := exec.LookPath("postgres"); err == nil {
		if path, err = filepath.Abs(path); err == nil {
			places = append(places, filepath.Dir(path))
		}
	}
	onPath := len(places)
	for _, pattern := range patterns {
		found, _ := filepath.Glob(pattern)
		places = append(places, found...)
	}
	best := 0
	for i, place := range places {
		v, n := postgresVersion(ctx, place)
		if n < oldestPostgres || n <= best || (major != 0 && n != major) {
			continue
		}
		bin, version, best = place, v, n
		if i < onPath {
			break
		}
	}
	switch {
	case best != 0:
		return bin, version, nil
	case ctx.Err() != nil:
		return "", "", fmt.Errorf("looking for PostgreSQL: %w", ctx.Err())
	case major != 0:
		return "", "", fmt.Errorf("the data of %s are PostgreSQL %d's, which is not installed: install it, or remove that folder to begin anew", dir, major)
	default:
		return "", "", ErrNoDatabase
	}
}

// postgresVersion of the binaries in a folder, or 0 where they are not all there.
func postgresVersion(ctx context.Context, dir string) (text string, major int) {
	if !exists(filepath.Join(dir, "initdb")) {
		return "", 0
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return "", 0
	}
	// postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
	fields := strings.Fields(string(out))
	if len(fields) < 3 {
		return "", 0
	}
	// "19beta1" has no dot.
	digits := strings.IndexFunc(fields[2]+".", func(r rune) bool { return r < '0' || r > '9' })
	major, _ = strconv.Atoi(fields[2][:digits])
	return fields[2], major
}

// serverUser is whom the server runs as: this user, or where that is root, whom PostgreSQL refuses to run as, the
// owner of the data that are there, else postgres, else nobody.
func serverUser(data string) (*syscall.Credential, error) {
	var owner *syscall.Stat_t
	if info, err := os.Stat(data); err == nil {
		owner, _ = info.Sys().(*syscall.Stat_t)
	}
	if euid := os.Geteuid(); euid != 0 {
		if owner != nil && int(owner.Uid) != euid {
			return nil, fmt.Errorf("%s belongs to uid %d, from a run as another user: run as that user (or root) again, or remove it to begin anew", data, owner.Uid)
		}
		return nil, nil
	}
	if owner != nil && owner.Uid != 0 {
		return &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		// Signed, as macOS writes nobody's as -2.
		uid, err1 := strconv.ParseInt(u.Uid, 10, 64)
		gid, err2 := strconv.ParseInt(u.Gid, 10, 64)
		if err1 == nil && err2 == nil && uid != 0 {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody: run as another user")
}

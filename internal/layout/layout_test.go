// Package layout holds the repository to what docs/design.md, section 8, says about who imports whom, and keeps names of
// one machine out of it.
package layout

import (
	"bytes"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "reveille"

// rule is what the packages of a folder and below it may import; the longest folder that fits a package counts.
type rule struct {
	folder string
	// project lists the folders of this project that it may import, each with all below it; its own it always may.
	// "*" is all but the commands, which nobody imports.
	project []string
	// tests lists what its _test.go files may import besides.
	tests []string
	// stdlibOnly: nothing of others.
	stdlibOnly bool
	// why it is so, for the message.
	why string
}

// rules are docs/design.md's table.
var rules = []rule{
	{folder: "claims", stdlibOnly: true, why: "the domain does no I/O"},
	{folder: "claims/crdb", project: []string{"claims", "sql"}, tests: []string{"internal"}, why: "the store knows the domain and its statements"},
	{folder: "sql", tests: []string{"internal"}, why: "statements are files"},
	{folder: "bus", project: []string{"claims"}, tests: []string{"internal"}, why: "siblings don't import each other"},
	{folder: "runner", project: []string{"claims"}, tests: []string{"internal", "worker"}, why: "siblings don't import each other"},
	{folder: "recovery", project: []string{"claims"}, tests: []string{"internal"}, why: "siblings don't import each other"},
	{folder: "spec", project: []string{"claims"}, stdlibOnly: true, why: "the model says what the rest has to do, and knows none of it"},
	{folder: "internal", project: []string{"*"}, why: "nobody imports a command"},
	{folder: "cmd", project: []string{"*"}, why: "a command imports no other"},
	// What programs of others import to be a worker. Its wiring is shared by the commands: below cmd.
	{folder: "worker", project: []string{"runner", "cmd/worker/app"}, why: "it is the door to a worker, and no more"},
	// Whatever is not named above.
	{folder: "", project: []string{"*"}, why: "nobody imports a command"},
}

// restricted are modules of others that only some folders may see, tests included.
var restricted = []struct {
	prefix  string
	folders []string
}{
	{"github.com/jackc/", []string{"claims/crdb", "cmd", "internal"}},
	{"database/sql", []string{"claims/crdb", "cmd", "internal"}},
	{"github.com/cockroachdb/", []string{"claims/crdb", "cmd", "internal"}},
	{"github.com/pressly/goose/", []string{"claims/crdb", "cmd", "internal"}},
	{"github.com/nats-io/", []string{"bus", "cmd", "internal"}},
}

// topCommand is the command that a folder below cmd belongs to.
func topCommand(folder string) string {
	parts := strings.SplitN(folder, "/", 3)
	return strings.Join(parts[:min(2, len(parts))], "/")
}

// violation says what is wrong with a file of folder importing imported, or nothing.
func violation(folder string, test bool, imported string) string {
	r := ruleFor(folder)
	if own, ok := projectFolder(imported); ok {
		allowed := r.project
		if test {
			allowed = append(slices.Clone(allowed), r.tests...)
		}
		switch {
		case own == folder || slices.Contains(r.project, own):
			return ""
		case ruleFor(own).folder == r.folder && r.folder != "cmd":
			return ""
		case within(own, "cmd"):
			// What the commands share is below cmd/internal; what is one command's own,
			// below it.
			if r.folder == "cmd" && (within(own, folder) || within(own, "cmd/internal")) {
				return ""
			}
			if r.folder == "cmd" && strings.HasPrefix(own, topCommand(folder)+"/internal/") {
				return ""
			}
			return fmt.Sprintf("%s may not import %s: nobody imports a command", name(folder), own)
		case slices.Contains(allowed, "*"):
			return ""
		case slices.ContainsFunc(allowed, func(a string) bool { return ruleFor(own).folder == a }):
			return ""
		}
		return fmt.Sprintf("%s may not import %s: %s", name(folder), own, r.why)
	}
	if r.stdlibOnly && !standard(imported) {
		return fmt.Sprintf("%s may import the standard library only, not %s: %s", name(folder), imported, r.why)
	}
	for _, m := range restricted {
		if strings.HasPrefix(imported+"/", strings.TrimSuffix(m.prefix, "/")+"/") &&
			!slices.ContainsFunc(m.folders, func(f string) bool { return within(folder, f) }) {
			return fmt.Sprintf("%s may not import %s: only %s may", name(folder), imported, strings.Join(m.folders, ", "))
		}
	}
	return ""
}

func name(folder string) string {
	if folder == "" {
		return "the root folder"
	}
	return folder
}

func ruleFor(folder string) rule {
	best := rule{}
	for _, r := range rules {
		if within(folder, r.folder) && len(r.folder) >= len(best.folder) {
			best = r
		}
	}
	return best
}

// within says whether a folder is another or below it; everything is below the root.
func within(folder, parent string) bool {
	return parent == "" || folder == parent || strings.HasPrefix(folder, parent+"/")
}

func projectFolder(imported string) (string, bool) {
	if imported == module {
		return "", true
	}
	return strings.CutPrefix(imported, module+"/")
}

// standard: the first element of every other module's path has a dot.
func standard(imported string) bool {
	first, _, _ := strings.Cut(imported, "/")
	return !strings.Contains(first, ".")
}

func TestImportDirections(t *testing.T) {
	t.Parallel()
	files := 0
	for _, file := range repositoryFiles(t) {
		if path.Ext(file) != ".go" || within(file, "tools") || strings.Contains("/"+file, "/testdata/") {
			continue
		}
		files++
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root(t), file), nil, parser.ImportsOnly)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		folder := path.Dir(file)
		if folder == "." {
			folder = ""
		}
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Errorf("%s: %v", file, err)
				continue
			}
			if v := violation(folder, strings.HasSuffix(file, "_test.go"), imported); v != "" {
				t.Errorf("%s: %s", file, v)
			}
		}
	}
	if files == 0 {
		t.Error("no Go files were found")
	}
}

// TestRulesCatch holds the judge itself.
func TestRulesCatch(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		folder   string
		test     bool
		imported string
		ok       bool
	}{
		{"claims", false, "context", true},
		{"claims", true, "reveille/claims", true},
		{"claims", false, "github.com/google/uuid", false},
		{"claims", false, "reveille/claims/crdb", false},
		{"claims", true, "reveille/internal/dbtest", false},
		{"claims/crdb", false, "reveille/claims", true},
		{"claims/crdb", false, "reveille/sql", true},
		{"claims/crdb", false, "github.com/jackc/pgx/v5", true},
		{"claims/crdb", false, "github.com/nats-io/nats.go", false},
		{"claims/crdb", false, "reveille/bus", false},
		{"claims/crdb", true, "reveille/runner", false},
		{"claims/crdb", false, "reveille/internal/dbtest", false},
		{"claims/crdb", true, "reveille/internal/dbtest", true},
		{"sql", false, "embed", true},
		{"sql", false, "reveille/claims", false},
		{"sql", true, "reveille/claims", false},
		{"bus", false, "github.com/nats-io/nats.go/jetstream", true},
		{"bus", false, "github.com/jackc/pgx/v5", false},
		{"bus", true, "github.com/jackc/pgx/v5", false},
		{"bus", true, "reveille/runner", false},
		{"bus", false, "reveille/claims/crdb", false},
		{"runner", false, "reveille/runner/handlers", true},
		{"runner/handlers", false, "reveille/runner", true},
		{"runner/handlers", false, "reveille/recovery", false},
		{"runner", false, "github.com/nats-io/nats.go", false},
		{"runner", false, "database/sql", false},
		{"recovery", true, "reveille/runner", false},
		{"recovery", true, "reveille/internal/localdb", true},
		{"recovery", false, "reveille/cmd/worker", false},
		{"runner", true, "reveille/worker", true},
		{"runner", false, "reveille/worker", false},
		{"runner", true, "reveille/cmd/worker/app", false},
		{"worker", false, "reveille/cmd/worker/app", true},
		{"worker", false, "reveille/cmd/internal/process", false},
		{"worker", false, "reveille/bus", false},
		{"internal/localdb", false, "github.com/jackc/pgx/v5/pgconn", true},
		{"internal/app", false, "reveille/bus", true},
		{"internal/app", true, "reveille/cmd/worker", false},
		{"cmd/worker", false, "reveille/runner", true},
		{"cmd/worker", false, "reveille/cmd/worker/flags", true},
		{"cmd/worker", false, "reveille/cmd/scanner", false},
		{"cmd/worker", false, "github.com/nats-io/nats.go", true},
		{"spec", true, "reveille/claims", true},
		{"spec", true, "reveille/claims/crdb", false},
		{"spec", false, "github.com/nats-io/nats.go", false},
		{"dashboards", true, "reveille/runner", true},
		{"dashboards", true, "github.com/jackc/pgx/v5", false},
		{"", true, "reveille/bus", true},
		{"", true, "github.com/nats-io/nats.go", false},
	} {
		if got := violation(tc.folder, tc.test, tc.imported); (got == "") != tc.ok {
			t.Errorf("%s (test %v) importing %s: %q", tc.folder, tc.test, tc.imported, got)
		}
	}
}

// TestNoMachineNames: nothing in the repository depends on the machine that it was written on, nor on where that gets
// its packages from. The names are put together here so that this file holds none.
func TestNoMachineNames(t *testing.T) {
	t.Parallel()
	names := []string{
		"/work/" + "main", "/work/" + "shared",
		"proxy.golang" + ".org", "sum.golang" + ".org",
		"registry.npmjs" + ".org", "registry.yarnpkg" + ".com",
		"files.pythonhosted" + ".org", "//pypi" + ".org", "//crates" + ".io", "//rubygems" + ".org",
		"deb.debian" + ".org", "archive.ubuntu" + ".com",
	}
	names = append(names, ownRegistries(t)...)
	for _, file := range repositoryFiles(t) {
		text, err := os.ReadFile(filepath.Join(root(t), file))
		if errors.Is(err, fs.ErrNotExist) { // removed, not yet committed
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		for _, n := range names {
			if bytes.Contains(text, []byte(n)) {
				t.Errorf("%s names %q", file, n)
			}
		}
	}
}

// ownRegistries are the hosts that this machine's Go gets modules from.
func ownRegistries(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOPROXY", "GOSUMDB").Output()
	if err != nil {
		t.Fatalf("go env: %v", err)
	}
	var hosts []string
	for _, field := range strings.FieldsFunc(string(out), func(r rune) bool { return strings.ContainsRune(",| \n", r) }) {
		u, err := url.Parse(field)
		// A bare name or a loopback address stands in many files for other reasons.
		if err == nil && strings.Contains(u.Hostname(), ".") && !strings.HasPrefix(u.Hostname(), "127.") {
			hosts = append(hosts, u.Host)
		}
	}
	return hosts
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// repositoryFiles lists what is committed or could be, relative to the root, slashes forward; all files where this is
// no clone.
func repositoryFiles(t *testing.T) []string {
	t.Helper()
	if _, err := os.Stat(filepath.Join(root(t), ".git")); err != nil {
		return allFiles(t)
	}
	// safe.directory: the clone may be another user's, as in a container.
	cmd := exec.Command("git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = root(t)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	files := strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
	return slices.DeleteFunc(files, func(file string) bool {
		info, err := os.Stat(filepath.Join(root(t), file))
		return err != nil || info.IsDir()
	})
}

func allFiles(t *testing.T) []string {
	t.Helper()
	var files []string
	err := fs.WalkDir(os.DirFS(root(t)), ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && slices.Contains([]string{".git", ".reveille", "bin"}, d.Name()) {
			return fs.SkipDir
		}
		if d.Type().IsRegular() {
			files = append(files, file)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

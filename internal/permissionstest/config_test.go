package permissionstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"reveille/bus"
)

// readme is a part of the folder's README.
func readme(t testing.TB, heading string) string {
	t.Helper()
	_, rest, ok := strings.Cut(text(t, "README.md"), heading+"\n")
	if !ok {
		t.Fatalf("README.md has no heading %q", heading)
	}
	part, _, _ := strings.Cut(rest, "\n## ")
	return part
}

func text(t testing.TB, file string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(deployed, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// TestSecondTenantIsACopy: what is shown of one namespace holds for the other.
func TestSecondTenantIsACopy(t *testing.T) {
	const command = `perl -pe 's/\bRV/ACME/g; s/\brv\b/acme/g' rv.conf > acme.conf`
	if !strings.Contains(readme(t, "## Another tenant"), "\n"+command+"\n") {
		t.Errorf("README.md does not say that acme.conf is made by: %s", command)
	}
	want := regexp.MustCompile(`\bRV`).ReplaceAllString(text(t, "rv.conf"), "ACME")
	want = regexp.MustCompile(`\brv\b`).ReplaceAllString(want, "acme")
	if text(t, "acme.conf") != want {
		t.Errorf("acme.conf is not what README.md says; in that folder, type: %s", command)
	}
}

// TestVariablesAreListed: README.md names whatever the configuration takes from
// the environment.
func TestVariablesAreListed(t *testing.T) {
	listed := readme(t, "## Use it")
	for _, file := range []string{"nats-server.conf", "rv.conf", "acme.conf"} {
		var names []string
		for line := range strings.Lines(text(t, file)) {
			code, _, _ := strings.Cut(line, "#")
			for _, m := range regexp.MustCompile(`[^"]\$([A-Z_]+)`).FindAllStringSubmatch(code, -1) {
				names = append(names, m[1])
			}
		}
		if len(names) == 0 {
			t.Errorf("%s has no variables", file)
		}
		for _, name := range names {
			if !strings.Contains(listed, "`"+name+"`") {
				t.Errorf("README.md does not list %s of %s", name, file)
			}
		}
	}
}

// TestUsersAreConfined: there is nobody but the roles of the namespaces, each has
// permissions, and hears answers to itself only.
func TestUsersAreConfined(t *testing.T) {
	o := deployedOptions(t, newCertificates(t))
	if o.NoAuthUser != "" || len(o.Nkeys) > 0 || o.Username != "" || o.Authorization != "" || o.AllowNonTLS || o.TLSConfig == nil {
		t.Error("somebody gets in without a password of a role, or without TLS")
	}
	var want, got []string
	for _, ns := range namespaces {
		for _, role := range roles {
			want = append(want, string(ns)+"-"+role)
		}
	}
	for _, u := range o.Users {
		got = append(got, u.Username)
		p := u.Permissions
		if p == nil || p.Publish == nil || p.Subscribe == nil || len(p.Publish.Allow) == 0 || len(p.Subscribe.Allow) == 0 || p.Response != nil {
			t.Errorf("%s is not confined: %+v", u.Username, p)
			continue
		}
		for _, subject := range p.Subscribe.Allow {
			if strings.HasPrefix(subject, "_") && subject != "_INBOX."+u.Username+".>" || strings.HasPrefix(subject, ">") || strings.HasPrefix(subject, "*") {
				t.Errorf("%s may hear %s", u.Username, subject)
			}
		}
		for _, subject := range p.Publish.Allow {
			if strings.HasPrefix(subject, ">") || strings.HasPrefix(subject, "*") || strings.HasPrefix(subject, "_INBOX") {
				t.Errorf("%s may publish %s", u.Username, subject)
			}
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("users are %q, want %q", got, want)
	}
}

// TestWorkersMayMakeStreams: the lines that README.md offers for that are enough,
// and no more.
func TestWorkersMayMakeStreams(t *testing.T) {
	for _, role := range []string{"worker", "scanner"} {
		t.Run(role, func(t *testing.T) {
			var more []string
			for _, m := range regexp.MustCompile(`(?m)"(\$JS\.API\.[^"]+)"`).FindAllStringSubmatch(readme(t, "## Who makes the streams"), -1) {
				more = append(more, m[1])
			}
			s := startDeployed(t, func(o *server.Options) {
				for _, u := range o.Users {
					if u.Username == "rv-"+role {
						u.Permissions.Publish.Allow = append(u.Permissions.Publish.Allow, more...)
					}
				}
			})
			conn := s.connect("rv", role)
			if _, err := conn.Ensure(testContext(t), bus.StreamOptions{}); err != nil {
				t.Fatal(err)
			}
			s.noViolations()
			for _, stream := range streamsOf("rv") {
				for _, request := range []string{"UPDATE", "DELETE", "PURGE", "MSG.DELETE"} {
					if role == "scanner" && stream == "RV_READY" && request == "PURGE" { // it sweeps the queue
						continue
					}
					denied(t, conn, attempt{subject: "$JS.API.STREAM." + request + "." + stream})
				}
			}
		})
	}
}

// TestStartWantsEachVariable: no role is left without its password, not even by a
// variable that is there and empty.
func TestStartWantsEachVariable(t *testing.T) {
	deployedOptions(t, newCertificates(t))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nats-server"), []byte("#!/bin/sh\necho started \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	begin := func(env ...string) string {
		cmd := exec.Command(filepath.Join(deployed, "start.sh"), "-D")
		cmd.Env = append(os.Environ(), env...)
		out, _ := cmd.CombinedOutput() // what it says tells how it ended
		return string(out)
	}
	if said := begin(); said != "started -c nats-server.conf -D\n" {
		t.Errorf("with all variables, start.sh says %q", said)
	}
	names := []string{"RV_NATS_CERT", "RV_NATS_KEY"}
	for _, ns := range namespaces {
		for _, role := range roles {
			names = append(names, passwordVariable(string(ns)+"-"+role))
		}
	}
	for _, name := range names {
		if said := begin(name + "="); strings.Contains(said, "started") || !strings.Contains(said, name) {
			t.Errorf("with an empty %s, start.sh says %q", name, said)
		}
	}
	if err := os.Unsetenv("RV_OPERATOR_PASSWORD"); err != nil { // t.Setenv brings back what was there before
		t.Fatal(err)
	}
	if said := begin(); strings.Contains(said, "started") || !strings.Contains(said, "RV_OPERATOR_PASSWORD") {
		t.Errorf("without a variable, start.sh says %q", said)
	}
}

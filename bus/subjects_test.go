package bus

import (
	"os"
	"strings"
	"testing"

	"reveille/claims"
)

func TestNamespace(t *testing.T) {
	for _, ok := range []string{"rv", "a", "0", "prod-eu-1", strings.Repeat("x", 32)} {
		if ns, err := ParseNamespace(ok); err != nil || string(ns) != ok {
			t.Errorf("ParseNamespace(%q) = %q, %v", ok, ns, err)
		}
	}
	for _, bad := range []string{"", "RV", "a.b", "a*", ">", "a b", "ä", "a_b", strings.Repeat("x", 33)} {
		if _, err := ParseNamespace(bad); err == nil {
			t.Errorf("ParseNamespace(%q) is nil", bad)
		}
	}
	if got := Namespace("prod-eu").CommandStream(); got != "PROD_EU_COMMANDS" {
		t.Errorf("stream is %s", got)
	}
	if got := Namespace("rv").Notice("h1"); got != "rv.worker.h1.notice" {
		t.Errorf("notice is %s", got)
	}
}

func TestCommandSubjects(t *testing.T) {
	ns := Namespace("rv")
	for _, kind := range []claims.CommandKind{claims.Admit, claims.Wake, claims.Interrupt} {
		k, s, err := ns.parseCommandSubject(ns.Command(kind, "ses_1"))
		if k != kind || s != "ses_1" || err != nil {
			t.Errorf("%s: %s %s %v", kind, k, s, err)
		}
	}
	for _, bad := range []string{"rv.wake.*", "rv.wake.>", "rv.wake.a\x7f", "rv.wake.a.b", "rv.wake", "rv.event.a", "xx.wake.a", "rv.wake."} {
		if _, _, err := ns.parseCommandSubject(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestSubjectsPage holds subjects.md against the code's table, row by row.
func TestSubjectsPage(t *testing.T) {
	page, err := os.ReadFile("../subjects.md")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "| `rv.") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	var want []string
	for _, r := range SubjectTable() {
		cells := []string{r.Subject, r.Stream, r.Publisher, r.Consumer, r.Body, r.Headers, r.Ack, r.Retention, r.Version}
		want = append(want, "| "+strings.Join(cells, " | ")+" |")
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("subjects.md and SubjectTable differ; the page should have\n%s", w)
	}
}

// TestSubjectTableIsWhole holds the table against the streams that are made
// and the subjects that the code publishes on.
func TestSubjectTableIsWhole(t *testing.T) {
	ns := DefaultNamespace
	streamOf := map[string]string{}
	for _, r := range SubjectTable() {
		streamOf[strings.Trim(r.Subject, "`")] = strings.Trim(r.Stream, "`")
	}
	n := 0
	for _, cfg := range Configs(ns, StreamOptions{}) {
		for _, s := range cfg.Subjects {
			token := "<session>"
			if cfg.Name == ns.RejectedStream() {
				token = "<kind>"
			}
			if subject := strings.Replace(s, "*", token, 1); streamOf[subject] != cfg.Name {
				t.Errorf("%s of %s is in the table as of %q", subject, cfg.Name, streamOf[subject])
			}
			n++
		}
	}
	for _, core := range []string{ns.LiveSubject("<session>"), ns.Notice("<holder>")} {
		if streamOf[core] != "none" {
			t.Errorf("%s is in the table as of %q", core, streamOf[core])
		}
		n++
	}
	if n != len(streamOf) {
		t.Errorf("the table has %d subjects, the code %d", len(streamOf), n)
	}
}

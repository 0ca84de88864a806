package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// mutant is a rule that is broken on purpose, to see whether the checker finds it. It is edits of the source that stand
// nowhere but here: the programs are built with them by go build -overlay, so the code that is released holds no switch
// that could be thrown. An edit that does not apply any more is an error.
type mutant struct {
	name  string
	rule  string
	finds []string // it is found by a violation with one of them
	// faults are kinds that come more often than others, since the rule is about them.
	faults []string
	edits  []edit
}

// found counts the violations that a mutant is found by.
func (m mutant) found(violations []string) (n int) {
	for _, text := range violations {
		if slices.ContainsFunc(m.finds, func(f string) bool { return strings.Contains(text, f) }) {
			n++
		}
	}
	return n
}

// edit replaces the one place in a file where old stands.
type edit struct{ file, old, new string }

// mutants break one rule each. Where a second line holds the same rule, it is broken too.
var mutants = []mutant{
	{"fence", "I5, I6: what an owner writes names its execution", []string{"(I10)", "(I1,", "(I1)", "(I6", "(I7)", "while \"\" is open"}, []string{"stop worker"}, []edit{
		{"claims/transition.go", "if !s.Own {", "if false {"},
		{"claims/crdb/owner.go", "if t.c.stepID == nil || *t.c.stepID != string(step.ID) {", "if t.c.stepID == nil {"},
	}},
	{"revive", "I4, I7: an expired lease stays so, and its process stops", []string{"(I1,", "(I1)", "(I6", "worker_lost of step"}, []string{"cut database"}, []edit{
		{"sql/statements/heartbeat.sql", " AND expires_at > statement_timestamp()", ""},
		{"runner/lease.go", "stop := kill - t.opts.StopMargin", "kill += time.Hour\n\tstop := kill"},
		{"runner/lease.go", "return t.sent.Add(t.opts.Lease - t.opts.MaxClockSkew)", "return t.sent.Add(time.Hour)"},
	}},
	{"guard", "I7: a command is gone by the deadline, also where its worker stands still", []string{"(I1, I7)", "(I10)"}, []string{"stop worker"}, []edit{
		{"runner/exec/watch.go", "return d.left(now), ok && s.clear < guardClear", "return time.Hour, d.left(now) < 0 && false"},
	}},
	{"join", "I10: a step is settled when all of it has joined", []string{"(I10)", "(I1,"}, nil, []edit{
		{"runner/run.go", "	case <-out.joined:\n		return true\n	case <-e.killed:\n	}\n", "	case <-out.joined:\n		return true\n	case <-ctx.Done():\n		return true\n	case <-e.killed:\n	}\n"},
		{"runner/run.go", "		<-returned\n", "		select {\n		case <-returned:\n		case <-ctx.Done():\n			end.err = context.Cause(ctx)\n			return end\n		}\n"},
	}},
	{"cancelling", "I26: an expired cancellation is never recovered", []string{"(I9)"}, []string{"kill worker"}, []edit{
		{"claims/transition.go", "return ToQuarantine // I26: its outcome is unknown", "return TakeOver"},
		{"sql/statements/claim_take_over.sql", "phase = 'running'", "phase <> 'cancelled'"},
		{"sql/statements/remove_recovery_claim.sql", "phase = 'running'", "phase <> 'cancelled'"},
	}},
	{"expect", "I25: an event is published behind the one that the subject ends with", []string{"(I25)"}, nil, []edit{
		{"bus/copy.go", "	m.Header.Set(nats.ExpectedLastSubjSeqHdr, strconv.FormatUint(last, 10))\n", "	_ = last\n	m.Header.Del(nats.MsgIdHdr)\n"},
	}},
	{"ack", "I19: a command is acknowledged when it is committed", []string{"(I18)"}, []string{"kill worker"}, []edit{
		{"bus/intake.go", "	result, err := in.bring(ctx, ln, h)\n", "	_ = h.msg.Ack()\n	result, err := in.bring(ctx, ln, h)\n"},
	}},
	{"acquire", "section 3: a wake and its acquisition are one transaction", []string{"(I32)"}, []string{"kill worker", "ambiguous commits"}, []edit{
		{"claims/crdb/store.go", "func newPool(", "var outside *pgxpool.Pool\n\nfunc newPool("},
		{"claims/crdb/store.go", "	if s.beat, err = newPool(", "	outside = s.pool\n	if s.beat, err = newPool("},
		{
			"claims/crdb/commands.go", "	t.queue(errNoLease, sql.InsertClaims, []string{string(t.id)}",
			"	_, _ = outside.Exec(ctx, sql.InsertClaims, []string{string(t.id)}",
		},
	}},
	{"order", "I18: a session's commands are applied in stream order", []string{"(I18)"}, nil, []edit{
		{"bus/intake.go", "m, err := next(ctx, in.src, h.cmd.Session, h.place(), from)", "_ = from\n\t\tm, err := h.Raw, error(nil)"},
	}},
}

// overlay writes the edited files of a mutant into a folder, and returns the file for go build -overlay.
func (m mutant) overlay(dir string) (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("mutant %s: where the module is: %w", m.name, err)
	}
	root := strings.TrimSpace(string(out))
	texts := map[string]string{}
	for _, e := range m.edits {
		path := filepath.Join(root, filepath.FromSlash(e.file))
		text, ok := texts[path]
		if !ok {
			raw, err := os.ReadFile(path)
			if err != nil {
				return "", fmt.Errorf("mutant %s: %w", m.name, err)
			}
			text = string(raw)
		}
		if n := strings.Count(text, e.old); n != 1 {
			return "", fmt.Errorf("mutant %s: %q stands %d times in %s, want once", m.name, e.old, n, e.file)
		}
		texts[path] = strings.Replace(text, e.old, e.new, 1)
	}
	replace := map[string]string{}
	for path, text := range texts {
		to := filepath.Join(dir, strings.ReplaceAll(strings.TrimPrefix(path, root+"/"), "/", "__"))
		if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
			return "", err
		}
		replace[path] = to
	}
	raw, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, raw, 0o600)
}

// findMutant finds a mutant by its name; without one it is none.
func findMutant(name string) (mutant, error) {
	if name == "" {
		return mutant{}, nil
	}
	var names []string
	for _, m := range mutants {
		if m.name == name {
			return m, nil
		}
		names = append(names, m.name)
	}
	return mutant{}, fmt.Errorf("there is no mutant %q: want one of %s", name, strings.Join(names, ", "))
}

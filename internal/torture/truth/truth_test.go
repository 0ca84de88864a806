package truth

import (
	"os/exec"
	"testing"
	"time"
)

func begin(t *testing.T, d Dir, session, step string) *Call {
	t.Helper()
	c, err := d.Begin(Line{Kind: Exec, Worker: "w", Session: session, Step: step})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func end(t *testing.T, c *Call) {
	t.Helper()
	if err := c.End(); err != nil {
		t.Fatal(err)
	}
}

func lives(t *testing.T, d Dir, step string, want bool) {
	t.Helper()
	if got, err := d.Lives(step); got != want || err != nil {
		t.Errorf("step %s lives: %v, %v, want %v", step, got, err, want)
	}
}

func whats(t *testing.T, d Dir) (out []string) {
	t.Helper()
	lines, err := d.Lines()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range lines {
		out = append(out, l.What+" "+l.Step)
	}
	return out
}

func TestOneAfterTheOther(t *testing.T) {
	d := Dir(t.TempDir())
	lives(t, d, "1", false)
	for _, step := range []string{"1", "2"} {
		c := begin(t, d, "s", step)
		lives(t, d, step, true)
		end(t, c)
		lives(t, d, step, false)
	}
	if got, want := len(whats(t, d)), 4; got != want {
		t.Errorf("%q, want %d lines", whats(t, d), want)
	}
	if _, err := d.Begin(Line{Session: "s", Step: "3"}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Begin(Line{Session: "other", Step: "3"}); err == nil {
		t.Error("a step is called twice at once, without an error")
	}
}

func TestOverlap(t *testing.T) {
	d := Dir(t.TempDir())
	first := begin(t, d, "s", "1")
	second := begin(t, d, "s", "2")
	end(t, second)
	end(t, first)
	second.waiting.Wait()
	lines, err := d.Lines()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]Line{}
	for _, l := range lines {
		found[l.What+l.Step] = l
	}
	overlap, over := found[Overlap+"2"], found[Over+"2"]
	if overlap.Holder == nil || overlap.Holder.Step != "1" || overlap.Holder.Worker != "w" {
		t.Errorf("the overlap is %+v, want one with step 1", overlap)
	}
	if over.Held <= 0 || over.At.Before(found[End+"1"].At) {
		t.Errorf("it is over %+v, want it after the end of step 1", over)
	}
}

// What a call starts keeps its locks until it is gone, and not a moment longer.
func TestChildKeepsTheLocks(t *testing.T) {
	d := Dir(t.TempDir())
	c := begin(t, d, "s", "1")
	child := exec.Command("sleep", "100")
	child.ExtraFiles = c.Inherit()
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	end(t, c)
	lives(t, d, "1", true)
	_ = child.Process.Kill() // it is ours, and not waited for yet
	_ = child.Wait()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) { // the kernel says no when
		if alive, err := d.Lives("1"); err != nil || !alive || time.Now().After(deadline) {
			break
		}
	}
	lives(t, d, "1", false)
}

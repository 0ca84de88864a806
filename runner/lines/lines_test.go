package lines

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"

	"reveille/claims"
	"reveille/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// recorder is the log of a step.
type recorder struct {
	mu      sync.Mutex
	content []claims.Content
	reasons []string
	fail    func() error // before anything is recorded; may block
}

func (r *recorder) output() *runner.Output {
	return runner.NewOutput(func(c claims.Content) error {
		if r.fail != nil {
			if err := r.fail(); err != nil {
				return err
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.content = append(r.content, c)
		return nil
	}, func(reason string) error {
		if r.fail != nil {
			if err := r.fail(); err != nil {
				return err
			}
		}
		r.reasons = append(r.reasons, reason)
		return nil
	})
}

// parse says all of text at once, and closes.
func (r *recorder) parse(t *testing.T, text string) Said {
	t.Helper()
	p := New(r.output(), DefaultMax)
	if n, err := io.WriteString(p, text); !errors.Is(err, ErrDeclined) && (n != len(text) || err != nil) {
		t.Errorf("Write = %d, %v, want all %d", n, err, len(text))
	}
	return p.Close()
}

func (r *recorder) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	for _, c := range r.content {
		if d, ok := c.Data.(claims.TextData); ok {
			b.WriteString(d.Text)
		}
	}
	return b.String()
}

// events are type and data, one a line.
func (r *recorder) events() string {
	var b strings.Builder
	for _, c := range r.content {
		data, err := json.Marshal(c.Data)
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(&b, "%s %s\n", c.Type, data)
	}
	return b.String()
}

func TestLines(t *testing.T) {
	deep := `{"type":"ended","result":` + strings.Repeat("[", 2000) + strings.Repeat("]", 2000) + "}"
	for line, event := range map[string]bool{
		`{"type":"text","text":"x"}`:                     true,
		` 	{"type":"text","text":""} ` + "\r":            true,
		`{"type":"tool.called","call":"c","name":"n"}`:   true,
		`{"type":"tool.succeeded","call":"c"}`:           true,
		`{"type":"tool.failed","call":"c"}`:              true,
		`{"type":"ended"}`:                               true,
		`{"type":"ended","result":null,"continue":true}`: true,
		`{"type":"declined"}`:                            true,
		``:                                               false,
		`x`:                                              false,
		`{`:                                              false,
		`{}`:                                             false,
		`[{"type":"text","text":"x"}]`:                   false,
		`{"type":"text","text":"x"} {"type":"text","text":"x"}`: false,
		`{"type":"text"}`:                                        false,
		`{"type":"text","text":"x","call":7}`:                    false, // a call is nothing of a text
		`{"type":"ended","result":7,"contnue":true}`:             false, // or the session would stop for a misspelling
		`{"Type":"ended","result":7}`:                            false,
		`{"type":"ended","Result":7}`:                            false,
		`{"type":"text","text":null}`:                            false,
		`{"type":"text","text":7}`:                               false,
		`{"type":7}`:                                             false,
		`{"type":"step.ended"}`:                                  false,
		`{"type":"tool.called","call":"c"}`:                      false,
		`{"type":"tool.called","call":7,"name":"n"}`:             false,
		`{"type":"tool.succeeded"}`:                              false,
		`{"type":"tool.failed","call":"c","error":{"code":"x"}}`: false,
		`{"type":"ended","continue":"yes"}`:                      false,
		`{"type":"declined","reason":7}`:                         false,
		deep:                                                     false,
	} {
		rec := &recorder{}
		said := rec.parse(t, line+"\n")
		if asText := rec.text() == line+"\n"; asText == event {
			t.Errorf("%q: event %v, want %v (%s)", line, !asText, event, rec.events())
		}
		if said.Err != nil {
			t.Errorf("%q: %v", line, said.Err)
		}
	}
}

func TestInvalidUTF8(t *testing.T) {
	rec := &recorder{}
	said := rec.parse(t, "a\xffb\n{\"type\":\"text\",\"text\":\"c\xff\"}\n"+
		"{\"type\":\"tool.called\",\"call\":\"\xff\",\"name\":\"n\",\"input\":\"\xff\"}\n"+
		"{\"type\":\"ended\",\"result\":\"\xff\"}\n\xe6\x97")
	want := "text {\"text\":\"a\uFFFDb\\n\"}\ntext {\"text\":\"c\uFFFD\"}\n" +
		"tool.called {\"call\":\"\uFFFD\",\"name\":\"n\",\"input\":\"\uFFFD\"}\ntext {\"text\":\"\uFFFD\"}\n"
	if got := rec.events(); got != want || string(said.Result.Value) != "\"\uFFFD\"" {
		t.Errorf("events\n%sand %s, want\n%s", got, said.Result.Value, want)
	}
}

// However the bytes are cut into writes, flushed and cut into pieces, the text
// is the same, in pieces that are valid wherever the line is.
func FuzzText(f *testing.F) {
	f.Add([]byte("héllo\nwörld"), uint8(3), uint8(1))
	f.Add(bytes.Repeat([]byte("日本語"), 100), uint8(7), uint8(2))
	f.Add([]byte("\xf0\x9f\x98 \xff\xff{\n"), uint8(1), uint8(1))
	runs := regexp.MustCompile("\uFFFD+")
	f.Fuzz(func(t *testing.T, in []byte, size, flushes uint8) {
		rec := &recorder{}
		p := New(rec.output(), MinMax)
		for i, rest := 0, in; len(rest) > 0; i++ {
			n := min(len(rest), 1+int(size))
			if _, err := p.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			p.mu.Lock()
			if rest = rest[n:]; flushes > 0 && i%int(flushes) == 0 && p.canFlush() {
				p.flush() // as the timer would
			}
			if len(p.pending) > MinMax {
				t.Fatalf("%d bytes are pending", len(p.pending))
			}
			p.mu.Unlock()
		}
		p.Close()
		if bytes.Contains(in, []byte("type")) {
			return // may be an event
		}
		// A run of bad bytes is one U+FFFD, two where it was cut.
		want := runs.ReplaceAllString(strings.ToValidUTF8(string(in), "\uFFFD"), "\uFFFD")
		if got := runs.ReplaceAllString(rec.text(), "\uFFFD"); got != want {
			t.Fatalf("text %q, want %q", got, want)
		}
		if utf8.Valid(in) && rec.text() != string(in) {
			t.Fatalf("text %q, want %q", rec.text(), in)
		}
	})
}

// What waits for the rest of its line, and what is shown after a moment.
func TestPartialLine(t *testing.T) {
	for _, c := range []struct{ written, shown string }{
		{"name? ", "name? "},
		{"name? \xc3", "name? "},
		{"line\nname? ", "line\nname? "},
		{"{\"type\":\"text\"", ""},
		{" \t", ""},
		{" {", ""},
		{"\xf0\x9f", ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			rec := &recorder{}
			p := New(rec.output(), DefaultMax)
			write(t, p, c.written)
			if got, want := rec.text(), c.written[:strings.LastIndex(c.written, "\n")+1]; got != want {
				t.Errorf("%q: %q is out at once, want %q", c.written, got, want)
			}
			time.Sleep(flushAfter)
			synctest.Wait()
			if got := rec.text(); got != c.shown {
				t.Errorf("%q: shown %q, want %q", c.written, got, c.shown)
			}
			p.Close()
		})
	}
}

// A line that never ends, one token after the other, is shown as it comes, and
// its rest stays text.
func TestTokensAreShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &recorder{}
		p := New(rec.output(), DefaultMax)
		want := ""
		for range 50 {
			write(t, p, "tok")
			want += "tok"
			time.Sleep(flushAfter / 4)
			synctest.Wait()
			if got := rec.text(); len(want)-len(got) > 4*len("tok") {
				t.Fatalf("%d bytes of text wait", len(want)-len(got))
			}
		}
		write(t, p, `{"type":"ended"}`+"\n")
		if said := p.Close(); said.Ended || rec.text() != want+`{"type":"ended"}`+"\n" {
			t.Errorf("%+v, text %q, want the rest of the line as text", said, rec.text())
		}
	})
}

func write(t *testing.T, p *Parser, s string) {
	t.Helper()
	if _, err := io.WriteString(p, s); err != nil {
		t.Fatalf("write %q: %v", s, err)
	}
}

// A line of 10 MB is text in bounded pieces, and nothing of it is kept.
func TestLongLine(t *testing.T) {
	const length = 10 << 20
	rec := &recorder{}
	p := New(rec.output(), DefaultMax)
	chunk := strings.Repeat("é{\"", 1024)
	sent := 0
	for sent < length {
		write(t, p, chunk)
		sent += len(chunk)
		p.mu.Lock()
		if size := cap(p.pending); size > 2*DefaultMax {
			t.Fatalf("%d bytes are held after %d", size, sent)
		}
		p.mu.Unlock()
	}
	write(t, p, "\n"+`{"type":"ended","result":1}`+"\n")
	if size := cap(p.pending); size > pieceBytes {
		t.Errorf("%d bytes are held for short lines", size)
	}
	said := p.Close()
	if text := rec.text(); !said.Ended || len(text) != sent+1 || !utf8.ValidString(text) {
		t.Errorf("%+v, %d bytes of text, want %d", said, len(text), sent+1)
	}
	for _, c := range rec.content {
		if piece := c.Data.(claims.TextData).Text; len(piece) > DefaultMax || !utf8.ValidString(piece) {
			t.Errorf("a piece has %d bytes, valid %v", len(piece), utf8.ValidString(piece))
		}
	}
}

func TestDeclineIsTheLast(t *testing.T) {
	rec := &recorder{}
	p := New(rec.output(), DefaultMax)
	const first = "before\n{\"type\":\"declined\",\"reason\":\"no\"}\n"
	if n, err := io.WriteString(p, first+"x\n{\"type\":\"declined\"}\n{\"type\":\"ended\",\"result\":1}\ny"); n != 0 || !errors.Is(err, ErrDeclined) {
		t.Errorf("Write = %d, %v, want %v", n, err, ErrDeclined)
	}
	select {
	case <-p.Declined():
	default:
		t.Error("Declined is open")
	}
	if said := p.Close(); !said.Declined || said.Ended || said.Err != nil {
		t.Errorf("%+v, want declined and no more", said)
	}
	if got := rec.text(); got != "before\n" || len(rec.reasons) != 1 || rec.reasons[0] != "no" {
		t.Errorf("text %q, reasons %q, want one decline and nothing after it", got, rec.reasons)
	}
}

// An Output that takes no more is asked once.
func TestErrorIsTheLast(t *testing.T) {
	broken := errors.New("disk is full")
	for name, said := range map[string]string{"text": "x\n", "decline": "{\"type\":\"declined\"}\n", "unfinished": ""} {
		synctest.Test(t, func(t *testing.T) {
			calls := 0
			rec := &recorder{fail: func() error { calls++; return broken }}
			p := New(rec.output(), DefaultMax)
			if said == "" { // only the timer puts it out
				write(t, p, "x")
				time.Sleep(flushAfter)
				synctest.Wait()
			}
			for range 3 {
				if n, err := io.WriteString(p, said+"y\nz"); n != 0 || !errors.Is(err, broken) {
					t.Errorf("%s: Write = %d, %v, want %v", name, n, err, broken)
				}
			}
			time.Sleep(flushAfter)
			synctest.Wait()
			if end := p.Close(); !errors.Is(end.Err, broken) || end.Declined || calls != 1 {
				t.Errorf("%s: %+v after %d calls, want %v after one", name, end, calls, broken)
			}
			select {
			case <-p.Declined():
				if name != "decline" {
					t.Errorf("%s: declined", name)
				}
			default:
				if name == "decline" {
					t.Error("a refusal that could not be recorded stops nothing")
				}
			}
		})
	}
}

// Close waits for a flush that is under way, and nothing comes after it.
func TestCloseIsTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate, flushing := make(chan struct{}), make(chan struct{}, 1)
		rec := &recorder{fail: func() error {
			flushing <- struct{}{}
			<-gate
			return nil
		}}
		p := New(rec.output(), DefaultMax)
		write(t, p, "prompt")
		<-flushing
		closed := make(chan Said)
		go func() { closed <- p.Close() }()
		close(gate)
		<-closed
		if n, err := io.WriteString(p, "more\n"); n != 0 || !errors.Is(err, errClosed) {
			t.Errorf("Write after Close = %d, %v", n, err)
		}
		p.Close() // harmless
		time.Sleep(flushAfter)
		synctest.Wait()
		if got := rec.text(); got != "prompt" {
			t.Errorf("text %q", got)
		}
	})
}

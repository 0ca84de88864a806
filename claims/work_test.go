package claims

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestParseSession(t *testing.T) {
	for s, ok := range map[string]bool{
		"a": true, "A": true, "0": true, "ses_1": true, "a:b-c_d": true, strings.Repeat("x", 128): true,
		"": false, strings.Repeat("x", 129): false, "_a": false, ":a": false, "-a": false, "a.b": false, "a b": false, "a*": false,
		"*": false, ">": false, "a>": false, "a\x00": false, "é": false, "a\n": false, "a/b": false, "a\xff": false,
	} {
		id, err := ParseSession(s)
		if (err == nil) != ok || ok && string(id) != s {
			t.Errorf("%q: %q, %v; want ok %v", s, id, err, ok)
		}
	}
}

func FuzzParseSession(f *testing.F) {
	f.Add("ses_1")
	f.Add("a.b")
	f.Add(strings.Repeat("x", 129))
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseSession(s)
		if err != nil {
			return
		}
		// What passes is one token of a NATS subject, and the same as a key of the database.
		if string(id) != s || s == "" || len(s) > 128 || !utf8.ValidString(s) || strings.ContainsAny(s, ".*> \t\r\n\x00") {
			t.Errorf("%q passed", s)
		}
	})
}

func TestCleanJSON(t *testing.T) {
	for raw, want := range map[string]string{
		` { "a" : 1 } `:     `{"a":1}`,
		`"x"`:               `"x"`,
		"\"\xff\"":          "\"\uFFFD\"",
		`"\u0000"`:          `"\u0000"`,
		`[1.0,1e3]`:         `[1.0,1e3]`,
		`"<&>"`:             `"<&>"`,
		`"[[[[" `:           `"[[[["`,
		`"\"[" `:            `"\"["`,
		"\"a\x00\"":         "",
		"{\"a\":\n1}":       `{"a":1}`,
		``:                  "",
		`{`:                 "",
		`1 2`:               "",
		`{"a":1}x`:          "",
		"\"a\nb\"":          "",
		"\"a\u2028b\"":      "\"a\u2028b\"",
		`null`:              `null`,
		"\xef\xbb\xbf\"a\"": "",
	} {
		got, err := CleanJSON([]byte(raw))
		if (err != nil) != (want == "") || string(got) != want {
			t.Errorf("%q: %q, %v; want %q", raw, got, err, want)
		}
	}
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	if _, err := CleanJSON([]byte(deep(maxJSONDepth))); err != nil {
		t.Errorf("nested %d deep: %v", maxJSONDepth, err)
	}
	for _, raw := range []string{deep(maxJSONDepth + 1), strings.Repeat("[", 1<<20), strings.Repeat(`{"a":`, maxJSONDepth+1)} {
		if _, err := CleanJSON([]byte(raw)); err == nil {
			t.Errorf("%.20q… of %d bytes passed", raw, len(raw))
		}
	}
}

func FuzzCleanJSON(f *testing.F) {
	f.Add([]byte(`{"a":[1,2,{"b":"\\\""}]}`))
	f.Add([]byte("\"\xff\\\""))
	f.Fuzz(func(t *testing.T, raw []byte) {
		got, err := CleanJSON(raw)
		if err != nil {
			return
		}
		if !json.Valid(got) || !utf8.Valid(got) || strings.ContainsAny(string(got), "\n\r\x00") {
			t.Fatalf("%q became %q", raw, got)
		}
		again, err := CleanJSON(got)
		if err != nil || string(again) != string(got) || !SameJSON(raw, got) && utf8.Valid(raw) {
			t.Fatalf("%q became %q and then %q, %v", raw, got, again, err)
		}
	})
}

func TestSameJSON(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{`{"a":1,"b":[2]}`, ` { "b" : [ 2 ] , "a" : 1 } `, true},
		{`"\u00e9"`, `"é"`, true},
		{`1`, `1`, true},
		{`1.0`, `1`, false}, // as they are written
		{`12345678901234567890`, `12345678901234567891`, false},
		{`[1,2]`, `[2,1]`, false},
		{`{"a":1}`, `{"a":1,"b":null}`, false},
		{`null`, `{}`, false},
		{`{`, `[`, false},
		{`1`, `x`, false},
	} {
		if got := SameJSON([]byte(c.a), []byte(c.b)); got != c.want {
			t.Errorf("%s and %s: %v", c.a, c.b, got)
		}
		if got := SameJSON([]byte(c.b), []byte(c.a)); got != c.want {
			t.Errorf("%s and %s: %v", c.b, c.a, got)
		}
	}
}

// TestSameJSONLooksAtAllOfIt: only what was cleaned should come here, but a text with something behind it is not the
// same as one without.
func TestSameJSONLooksAtAllOfIt(t *testing.T) {
	if SameJSON([]byte(`1 2`), []byte(`1`)) {
		t.Error("what follows the first value is not looked at")
	}
}

func TestMarshalIsOneLine(t *testing.T) {
	raw, err := Marshal(Event{Session: "s", Seq: 1, Type: TextEvent, Data: json.RawMessage("{\n \"text\": \"<&>\u2028\"}")})
	if err != nil || strings.Contains(string(raw), "\n") || !strings.Contains(string(raw), "<&>") {
		t.Errorf("%s, %v", raw, err)
	}
	r, err := ParseRecord(raw)
	if err != nil || r.Session != "s" || r.Seq != 1 || string(r.Line) != string(raw) {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := ParseRecord([]byte("{")); err == nil {
		t.Error("half an event parses")
	}
}

func TestStamp(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_000, time.FixedZone("", 3600))
	if got := Stamp(at); got != "2026-01-02T02:04:05.000678Z" {
		t.Error(got)
	}
}

func goodContinuation() Continuation {
	return Continuation{Session: "s", Number: 3, Kind: KindRetry, Lineage: "l", Execution: "e", Step: "st", Epoch: 5, Attempt: 1, Inputs: []string{"a"}}
}

func TestDecodeContinuation(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Continuation)
		want   Reason
	}{
		"good":                {func(*Continuation) {}, ""},
		"of the same epoch":   {func(c *Continuation) { c.Epoch = 7 }, ""},
		"kind":                {func(c *Continuation) { c.Kind = "again" }, ReasonInvalidContinuation},
		"no kind":             {func(c *Continuation) { c.Kind = "" }, ReasonInvalidContinuation},
		"foreign":             {func(c *Continuation) { c.Session = "t" }, ReasonForeignContinuation},
		"no lineage":          {func(c *Continuation) { c.Lineage = "" }, ReasonInvalidContinuation},
		"no execution":        {func(c *Continuation) { c.Execution = "" }, ReasonInvalidContinuation},
		"negative attempt":    {func(c *Continuation) { c.Attempt = -1 }, ReasonInvalidContinuation},
		"negative recoveries": {func(c *Continuation) { c.Recoveries = -1 }, ReasonInvalidContinuation},
		"another number":      {func(c *Continuation) { c.Number = 4 }, ReasonIdentityConflict},
		"later epoch":         {func(c *Continuation) { c.Epoch = 8 }, ReasonIdentityConflict},
	} {
		v := goodContinuation()
		c.change(&v)
		raw, err := Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		got, bad := DecodeContinuation("s", 3, 7, raw)
		if (bad == nil) != (c.want == "") || bad != nil && (bad.Reason != c.want || bad.Detail == "" || got != nil) {
			t.Errorf("%s: %v, %v; want %q", name, got, bad, c.want)
		}
	}
	for _, body := range []string{"", "{", "null", "[]", `"x"`, `{"session":1}`, `{"not_before":"x"}`} {
		if _, bad := DecodeContinuation("s", 3, 7, []byte(body)); bad == nil {
			t.Errorf("%q decodes", body)
		} else if bad.Reason != ReasonInvalidContinuation {
			t.Errorf("%q: %v", body, bad)
		}
	}
}

func goodStep() OpenStep {
	return OpenStep{Session: "s", Execution: "e", Step: "st", Epoch: 5, Index: 2, Inputs: []string{"a"}, Lineage: "l", Executions: []ExecutionID{"l", "e"}}
}

func TestDecodeStep(t *testing.T) {
	at := Stands{Session: "s", Step: "st", RanAs: "e", Started: 2, Epoch: 5}
	for name, c := range map[string]struct {
		change func(*OpenStep)
		want   Reason
	}{
		"good":                {func(*OpenStep) {}, ""},
		"foreign":             {func(o *OpenStep) { o.Session = "t" }, ReasonIdentityConflict},
		"another step":        {func(o *OpenStep) { o.Step = "x" }, ReasonIdentityConflict},
		"later epoch":         {func(o *OpenStep) { o.Epoch = 6 }, ReasonIdentityConflict},
		"index":               {func(o *OpenStep) { o.Index = 0 }, ReasonInvalidStep},
		"negative attempt":    {func(o *OpenStep) { o.Attempt = -1 }, ReasonInvalidStep},
		"negative recoveries": {func(o *OpenStep) { o.Recoveries = -1 }, ReasonInvalidStep},
		"no lineage":          {func(o *OpenStep) { o.Lineage = "" }, ReasonInvalidStep},
		"no execution":        {func(o *OpenStep) { o.Execution = "" }, ReasonIdentityConflict},
		"another execution":   {func(o *OpenStep) { o.Execution = "l" }, ReasonIdentityConflict},
		"superseded":          {func(o *OpenStep) { o.Index = 1 }, ReasonSuperseded},
	} {
		v := goodStep()
		c.change(&v)
		raw, err := Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		got, bad := DecodeStep(at, raw)
		if (bad == nil) != (c.want == "") || bad != nil && (bad.Reason != c.want || bad.Detail == "" || got != nil) {
			t.Errorf("%s: %v, %v; want %q", name, got, bad, c.want)
		}
	}
	if _, bad := DecodeStep(at, []byte("{")); bad == nil || bad.Reason != ReasonInvalidStep {
		t.Errorf("half a step: %v", bad)
	}
}

// FuzzDecode: whatever stands in the database, decoding answers, and what it lets through is what the row says.
func FuzzDecode(f *testing.F) {
	c, err := Marshal(goodContinuation())
	if err != nil {
		f.Fatal(err)
	}
	o, err := Marshal(goodStep())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(c)
	f.Add(o)
	f.Fuzz(func(t *testing.T, body []byte) {
		if c, bad := DecodeContinuation("s", 3, 7, body); bad == nil && (c.Session != "s" || c.Number != 3 || c.Epoch > 7 || c.Attempt < 0) {
			t.Errorf("%q: %+v", body, c)
		}
		if o, bad := DecodeStep(Stands{Session: "s", Step: "st", RanAs: "e", Started: 1, Epoch: 5}, body); bad == nil && (o.Session != "s" || o.Step != "st" || o.Epoch > 5 || o.Index < 1) {
			t.Errorf("%q: %+v", body, o)
		}
	})
}

func TestPromiseCounts(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	o := goodStep()
	o.Attempt, o.Recoveries, o.Trace = 2, 1, "trace"
	for kind, want := range map[ContinuationKind]struct {
		attempt, recoveries, inputs int
		continues                   int // what the next step says
	}{
		KindContinue: {0, 0, 0, 0},
		KindRetry:    {3, 1, 1, 3},
		KindRecovery: {2, 2, 1, 2},
		KindHandover: {2, 1, 1, 2},
		KindRelease:  {2, 1, 1, 2},
	} {
		c := o.Promise(kind, at)
		if c.Attempt != want.attempt || c.Recoveries != want.recoveries || len(c.Inputs) != want.inputs {
			t.Errorf("%s: attempt %d, %d recoveries, inputs %v", kind, c.Attempt, c.Recoveries, c.Inputs)
		}
		if c.Kind != kind || c.Session != o.Session || c.Step != o.Step || c.Execution != o.Execution || c.Epoch != o.Epoch ||
			c.Lineage != o.Lineage || !c.NotBefore.Equal(at) || c.Trace != o.Trace {
			t.Errorf("%s: %+v", kind, c)
		}
		if got := c.ContinuesAs(); got.Attempt != want.continues || got.Kind != kind || got.Step != o.Step {
			t.Errorf("%s: the next step says %+v", kind, got)
		}
	}
	if o.Attempt != 2 || len(o.Inputs) != 1 || len(o.Executions) != 2 {
		t.Errorf("a promise changed its step: %+v", o)
	}
}

func TestLineage(t *testing.T) {
	var executions []ExecutionID
	for i := range 200 {
		before := fmt.Sprint(executions)
		next := Extend(executions, ExecutionID(fmt.Sprint("e", i)))
		if fmt.Sprint(executions) != before {
			t.Fatal("Extend changed what it was given")
		}
		executions = Extend(next, ExecutionID(fmt.Sprint("e", i))) // the same again is one
	}
	if len(executions) != maxLineage || executions[0] != "e136" || executions[maxLineage-1] != "e199" {
		t.Errorf("%d executions, %s to %s", len(executions), executions[0], executions[len(executions)-1])
	}
	for e, want := range map[ExecutionID]bool{"e0": true, "e136": true, "e170": true, "e199": true, "e1": false, "x": false, "": false} {
		if got := InLineage(e, "e0", executions); got != want {
			t.Errorf("%q: %v", e, got)
		}
	}
	// Two continuations of one list must not write into each other's.
	base := Extend(nil, "a")
	x, y := Extend(base, "x"), Extend(base, "y")
	if x[1] != "x" || y[1] != "y" {
		t.Errorf("%v and %v share memory", x, y)
	}
}

func TestLimits(t *testing.T) {
	l := Limits{Recoveries: 2, Takeovers: 3}
	for _, c := range []struct {
		recoveries, takeovers int
		want                  Reason
	}{{0, 0, ""}, {2, 3, ""}, {3, 0, ReasonAttemptsExhausted}, {0, 4, ReasonNoProgress}, {3, 4, ReasonAttemptsExhausted}} {
		bad := l.Exceeded(c.recoveries, c.takeovers)
		if (bad == nil) != (c.want == "") || bad != nil && bad.Reason != c.want {
			t.Errorf("%d recoveries, %d takeovers: %v", c.recoveries, c.takeovers, bad)
		}
	}
}

func TestEndingOutcome(t *testing.T) {
	d := time.Second
	for _, c := range []struct {
		e    Ending
		want ExecutionOutcome
	}{{Ending{}, OutcomeCompleted}, {Ending{Continue: true}, OutcomeCompleted}, {Ending{Failure: &Failure{}}, OutcomeFailed}, {Ending{Failure: &Failure{}, Retry: &d}, OutcomeRetrying}} {
		if got := c.e.Outcome(); got != c.want {
			t.Errorf("%+v: %s", c.e, got)
		}
	}
}

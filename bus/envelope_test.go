package bus

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nats-io/nats.go"

	"reveille/claims"
)

const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestDecode(t *testing.T) {
	at := time.Unix(1700000000, 123456789)
	long := strings.Repeat("é", 600)
	for _, tc := range []struct {
		name, kind, body string
		want             claims.Command // Kind, Session, Sequence and Time are filled in
		reason           RejectReason
	}{
		{name: "bare wake", kind: "wake"},
		{name: "bare wake of white space", kind: "wake", body: " \n\t"},
		{name: "bare wake of an object", kind: "wake", body: `{}`},
		{name: "null members are not there", kind: "wake", body: `{"input":null,"not_before":null}`},
		{name: "input", kind: "wake", body: `{"input":{"id":"a","body":{ "x" : 1 }},"extra":[1]}`, want: claims.Command{Input: input("a", `{"x":1}`)}},
		{name: "null body", kind: "admit", body: `{"input":{"id":"a","body":null}}`, want: claims.Command{Input: input("a", `null`)}},
		{name: "NUL in a body", kind: "admit", body: `{"input":{"id":"a","body":"\u0000"}}`, want: claims.Command{Input: input("a", `"\u0000"`)}},
		{name: "not UTF-8 in a body", kind: "admit", body: "{\"input\":{\"id\":\"a\",\"body\":\"\xff\"}}", want: claims.Command{Input: input("a", `"`+"\uFFFD"+`"`)}},
		{name: "steer", kind: "wake", body: `{"input":{"id":"a","body":1,"delivery":"steer"}}`, want: claims.Command{Input: &claims.Input{ID: "a", Delivery: claims.Steer, Body: json.RawMessage("1")}}},
		{name: "later", kind: "wake", body: `{"not_before":"2026-12-01T09:00:00.5+01:00"}`, want: claims.Command{NotBefore: time.Date(2026, 12, 1, 8, 0, 0, 5e8, time.UTC)}},
		{name: "long past is now", kind: "wake", body: `{"not_before":"1969-12-01T09:00:00Z"}`},
		{name: "the last counts", kind: "wake", body: `{"input":{"id":"a","id":"b","body":1}}`, want: claims.Command{Input: input("b", "1")}},
		{name: "exact names", kind: "wake", body: `{"INPUT":{"id":"a","body":1}}`},
		{name: "longest id", kind: "admit", body: `{"input":{"id":"` + strings.Repeat("x", 256) + `","body":1}}`, want: claims.Command{Input: input(strings.Repeat("x", 256), "1")}},
		{name: "interrupt", kind: "interrupt"},
		{name: "interrupt of an object", kind: "interrupt", body: `{}`},
		{
			name: "whole interrupt", kind: "interrupt",
			body: `{"reason":"stop","pending":"discard","execution":"AB9D8F00-1111-2222-3333-444455556666"}`,
			want: claims.Command{Reason: "stop", Discard: true, Execution: "ab9d8f00-1111-2222-3333-444455556666"},
		},
		{name: "keep", kind: "interrupt", body: `{"pending":"keep"}`},
		{name: "long reason", kind: "interrupt", body: `{"reason":"` + long + `"}`, want: claims.Command{Reason: long[:1024]}},
		{name: "long reason, odd", kind: "interrupt", body: `{"reason":"x` + long + `"}`, want: claims.Command{Reason: "x" + long[:1022]}},
		{name: "NUL in a reason", kind: "interrupt", body: `{"reason":"a\u0000b"}`, want: claims.Command{Reason: "a\uFFFDb"}},

		{name: "admit without input", kind: "admit", reason: InvalidBody},
		{name: "admit with null", kind: "admit", body: `{"input":null}`, reason: InvalidBody},
		{name: "null", kind: "wake", body: `null`, reason: InvalidBody},
		{name: "array", kind: "wake", body: `[]`, reason: InvalidBody},
		{name: "not JSON", kind: "wake", body: `{`, reason: InvalidBody},
		{name: "trailing data", kind: "wake", body: `{} {}`, reason: InvalidBody},
		{name: "input is no object", kind: "wake", body: `{"input":"a"}`, reason: InvalidBody},
		{name: "id is no string", kind: "wake", body: `{"input":{"id":1,"body":1}}`, reason: InvalidBody},
		{name: "no id", kind: "wake", body: `{"input":{"body":1}}`, reason: InvalidBody},
		{name: "empty id", kind: "wake", body: `{"input":{"id":"","body":1}}`, reason: InvalidBody},
		{name: "long id", kind: "wake", body: `{"input":{"id":"` + strings.Repeat("x", 257) + `","body":1}}`, reason: InvalidBody},
		{name: "NUL in an id", kind: "wake", body: `{"input":{"id":"a\u0000","body":1}}`, reason: InvalidBody},
		{name: "newline in an id", kind: "wake", body: `{"input":{"id":"a\n","body":1}}`, reason: InvalidBody},
		{name: "C1 control in an id", kind: "wake", body: `{"input":{"id":"a\u0085","body":1}}`, reason: InvalidBody},
		{name: "half a pair in an id", kind: "wake", body: `{"input":{"id":"a\ud800","body":1}}`, reason: InvalidBody},
		{name: "not UTF-8 in an id", kind: "wake", body: "{\"input\":{\"id\":\"a\xff\",\"body\":1}}", reason: InvalidBody},
		{name: "no body", kind: "wake", body: `{"input":{"id":"a"}}`, reason: InvalidBody},
		{name: "deep body", kind: "wake", body: `{"input":{"id":"a","body":` + strings.Repeat("[", 1001) + strings.Repeat("]", 1001) + `}}`, reason: InvalidBody},
		{name: "delivery", kind: "wake", body: `{"input":{"id":"a","body":1,"delivery":"now"}}`, reason: InvalidBody},
		{name: "delivery is no string", kind: "wake", body: `{"input":{"id":"a","body":1,"delivery":1}}`, reason: InvalidBody},
		{name: "not_before", kind: "wake", body: `{"not_before":"tomorrow"}`, reason: InvalidBody},
		{name: "not_before, no zone", kind: "wake", body: `{"not_before":"2026-12-01T09:00:00"}`, reason: InvalidBody},
		{name: "not_before is a number", kind: "wake", body: `{"not_before":1}`, reason: InvalidBody},
		{name: "not_before in the year 10000", kind: "wake", body: `{"not_before":"9999-12-31T23:59:59-01:00"}`, reason: InvalidBody},
		{name: "pending", kind: "interrupt", body: `{"pending":"drop"}`, reason: InvalidBody},
		{name: "execution", kind: "interrupt", body: `{"execution":"x"}`, reason: InvalidBody},
		{name: "execution without dashes", kind: "interrupt", body: `{"execution":"ab9d8f00111122223333444455556666"}`, reason: InvalidBody},
		{name: "execution in braces", kind: "interrupt", body: `{"execution":"{ab9d8f00-1111-2222-3333-444455556666}"}`, reason: InvalidBody},
		{name: "reason is no string", kind: "interrupt", body: `{"reason":{}}`, reason: InvalidBody},
		{name: "large", kind: "wake", body: `{"input":{"id":"a","body":"` + strings.Repeat("x", 256<<10) + `"}}`, reason: TooLarge},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := Raw{Subject: "rv." + tc.kind + ".ses_1", Header: nats.Header{"traceparent": {trace}}, Data: []byte(tc.body), Sequence: 7, Time: at}
			got, rej := Decode("rv", m, 0)
			if tc.reason != "" {
				if rej == nil || rej.Reason != tc.reason || got.Kind != claims.CommandKind(tc.kind) {
					t.Fatalf("got %+v, %v", got, rej)
				}
				return
			}
			if rej != nil {
				t.Fatal(rej)
			}
			want := tc.want
			want.Kind, want.Session, want.Sequence, want.Time, want.Trace = claims.CommandKind(tc.kind), "ses_1", 7, at.UnixNano(), trace
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
	if _, rej := Decode("rv", Raw{Subject: "rv.wake.*"}, 0); rej == nil || rej.Reason != InvalidSession {
		t.Errorf("the session * is %v", rej)
	}
}

func TestTraceparent(t *testing.T) {
	for v, ok := range map[string]bool{
		trace:                  true,
		strings.ToUpper(trace): false,
		"01" + trace[2:]:       false,
		trace + "-x":           false,
		trace[:len(trace)-1]:   false,
		trace + "\n":           false,
		"":                     false,
		"00-" + strings.Repeat("0", 32) + trace[35:]:      false,
		trace[:36] + strings.Repeat("0", 16) + trace[52:]: false,
	} {
		for _, key := range []string{"traceparent", "Traceparent"} {
			if got := traceparent(nats.Header{key: {v}}); (got == v && v != "") != ok {
				t.Errorf("%q: got %q", v, got)
			}
		}
	}
	if got := traceparent(nats.Header{"traceparent": {trace, trace}}); got != "" {
		t.Errorf("two are %q", got)
	}
}

func FuzzDecode(f *testing.F) {
	for _, b := range []string{
		"", "{}", `{"input":{"id":"a","body":{"x":[1,"\u0000"]},"delivery":"steer"},"not_before":"2026-12-01T08:00:00Z"}`,
		`{"reason":"x","pending":"discard","execution":"ab9d8f00-1111-2222-3333-444455556666"}`, `{"input":{"id":"\ud800"}}`,
	} {
		for kind := range 3 {
			f.Add(kind, "ses_1", []byte(b), trace)
		}
	}
	kinds := []claims.CommandKind{claims.Admit, claims.Wake, claims.Interrupt}
	f.Fuzz(func(t *testing.T, k int, session string, body []byte, header string) {
		kind := kinds[(k%3+3)%3]
		m := Raw{Subject: "rv." + string(kind) + "." + session, Header: nats.Header{HeaderTraceparent: {header}}, Data: body, Sequence: 1, Time: time.Unix(1, 0)}
		cmd, rej := Decode("rv", m, 1<<16)
		if cmd.Kind != kind {
			t.Fatalf("kind is %q", cmd.Kind)
		}
		if rej != nil {
			return
		}
		if _, err := claims.ParseSession(string(cmd.Session)); err != nil {
			t.Fatal(err)
		}
		if in := cmd.Input; in != nil {
			if in.ID == "" || len(in.ID) > 256 || !utf8.ValidString(in.ID) || strings.ContainsFunc(in.ID, unicode.IsControl) {
				t.Fatalf("id is %q", in.ID)
			}
			if !json.Valid(in.Body) || !utf8.Valid(in.Body) {
				t.Fatalf("body is %q", in.Body)
			}
		}
		if len(cmd.Reason) > 1024 || !utf8.ValidString(cmd.Reason) || strings.ContainsRune(cmd.Reason, 0) {
			t.Fatalf("reason is %q", cmd.Reason)
		}
		// What was decoded can be said again, and says the same.
		again, err := Encode("rv", cmd, 1<<20)
		if err != nil {
			t.Fatalf("%+v: %v", cmd, err)
		}
		same, rej := Decode("rv", Raw{Subject: again.Subject, Header: again.Header, Data: again.Data, Sequence: 1, Time: time.Unix(1, 0)}, 1<<20)
		if rej != nil || !reflect.DeepEqual(same, cmd) {
			t.Fatalf("%+v became %+v, %v", cmd, same, rej)
		}
	})
}

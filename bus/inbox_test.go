package bus

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
)

// credsFile is a credentials file as far as its user's name goes.
func credsFile(t *testing.T, payload string) string {
	t.Helper()
	encode := func(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) }
	token := encode(`{"typ":"JWT","alg":"ed25519-nkey"}`) + "." + encode(payload) + "." + encode("signature")
	file := filepath.Join(t.TempDir(), "user.creds")
	text := "-----BEGIN NATS USER JWT-----\n" + token + "\n------END NATS USER JWT------\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestInboxPrefix(t *testing.T) {
	t.Parallel()
	const url = "tls://rv-worker:secret@nats.example:4222"
	for name, tc := range map[string]struct {
		o    Options
		want string
	}{
		"no user":                {Options{URL: "nats://127.0.0.1:4222"}, ""},
		"no URL":                 {Options{}, ""},
		"told":                   {Options{URL: url, InboxPrefix: "_MINE"}, "_MINE"},
		"user of the URL":        {Options{URL: url}, "_INBOX.rv-worker"},
		"without a scheme":       {Options{URL: "rv-worker:secret@nats.example:4222"}, "_INBOX.rv-worker"},
		"escaped":                {Options{URL: "nats://rv%2Dworker:p%40ss@nats.example"}, "_INBOX.rv-worker"},
		"several servers":        {Options{URL: url + ", nats://rv-worker:other@b:4222"}, "_INBOX.rv-worker"},
		"several users":          {Options{URL: url + ",nats://rv-scanner:secret@b:4222"}, ""},
		"some without a user":    {Options{URL: url + ",nats://b:4222"}, ""},
		"a token is a secret":    {Options{URL: "nats://sometoken@nats.example:4222"}, ""},
		"more than one token":    {Options{URL: "nats://me.too:secret@nats.example:4222"}, ""},
		"a wildcard":             {Options{URL: "nats://%3E:secret@nats.example:4222"}, ""},
		"user of the creds":      {Options{Creds: credsFile(t, `{"name":"rv-observer","sub":"U"}`)}, "_INBOX.rv-observer"},
		"creds before the URL":   {Options{URL: url, Creds: credsFile(t, `{"name":"rv-observer"}`)}, "_INBOX.rv-observer"},
		"creds without a name":   {Options{Creds: credsFile(t, `{"sub":"U"}`)}, ""},
		"creds with a long name": {Options{Creds: credsFile(t, `{"name":"`+strings.Repeat("n", 65)+`"}`)}, ""},
		"creds that are no JWT":  {Options{Creds: credsFile(t, `no JSON`)}, ""},
		"creds that are missing": {Options{Creds: filepath.Join(t.TempDir(), "none.creds")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := inboxPrefix(tc.o); got != tc.want {
				t.Errorf("inbox prefix is %q, want %q", got, tc.want)
			}
		})
	}
}

// TestInboxPrefixIsUsed: the connection's answers come below it.
func TestInboxPrefixIsUsed(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	url := strings.Replace(s.srv.ClientURL(), "://", "://somebody:secret@", 1) // the server asks for none
	c, err := Connect(testContext(t), Options{URL: url, Logger: testLog(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	heard := make(chan string, 1)
	if _, err := c.nc.Subscribe("question", func(m *nats.Msg) {
		heard <- m.Reply
		_ = m.Respond(nil)
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.nc.RequestWithContext(testContext(t), "question", nil); err != nil {
		t.Fatal(err)
	}
	if reply := receive(t, "the question", heard); !strings.HasPrefix(reply, "_INBOX.somebody.") {
		t.Errorf("the answer is asked to %q, want it below _INBOX.somebody.", reply)
	}
}

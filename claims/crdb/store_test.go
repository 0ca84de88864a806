package crdb_test

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"reveille/claims/crdb"
	"reveille/internal/dbtest"
)

// What a person has to put right says so, in one line and without the password.
func TestRefusals(t *testing.T) {
	u, err := url.Parse(dbtest.New(t))
	if err != nil {
		t.Fatal(err)
	}
	missing := *u
	missing.Path = "/nowhere"
	stranger := *u
	stranger.User = url.UserPassword("nobody", "secret")
	for address, want := range map[string]string{
		missing.String():     "there is no database nowhere at " + u.Hostname() + ": create it",
		stranger.String():    "does not let user nobody in: check the name and the password",
		"nonsense":           "want postgres://user:password@host:port/name",
		"http://u:secret@h/": "want postgres://user:password@host:port/name",
	} {
		_, err := crdb.Open(t.Context(), address, crdb.Options{Timeout: 5 * time.Second})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") || crdb.Unavailable(err) {
			t.Errorf("open: %v, want %q", err, want)
		}
		for _, dry := range []bool{true, false} {
			if _, err := crdb.Migrate(t.Context(), address, dry); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
				t.Errorf("migrate: %v, want %q", err, want)
			}
		}
	}
}
